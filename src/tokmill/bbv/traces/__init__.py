"""Block vectors and costs of executions; begin with `read`."""
