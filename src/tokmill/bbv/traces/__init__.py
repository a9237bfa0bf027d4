"""Block vectors and costs of executions, from files of all producers and from a profile made here.

Read `read` first.
"""
