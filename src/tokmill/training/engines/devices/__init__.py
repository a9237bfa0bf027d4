"""The device of a process: precision, random states, compilation, memory.

Read `device` first.
"""
