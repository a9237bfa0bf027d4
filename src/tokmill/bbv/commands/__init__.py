"""Commands for executions: profile, check, cluster, simpoint."""
