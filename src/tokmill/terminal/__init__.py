"""The frame of commands: options, tables, JSON, messages on a terminal.

Read `output` first; `structs` makes flags of a struct of options.
"""
