"""Execution profiles: basic block vectors and cycles per instruction, of programs that ran."""
