"""Commands for similar functions: eval, index, query."""
