"""Commands for executions: profile, check, simpoint."""
