"""The device of a process: precision, random states, memory. Read `device` first."""
