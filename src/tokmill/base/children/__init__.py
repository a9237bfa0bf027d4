"""Commands and functions in child processes, which may die, with limits on time and memory.

Read `child` first."""
