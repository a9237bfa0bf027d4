"""The frame of commands: options, tables, JSON, messages on a terminal.

Read `output` first; `frame` makes commands, and flags of structs of options."""
