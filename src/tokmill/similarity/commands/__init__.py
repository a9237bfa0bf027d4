"""Commands for similar functions: eval, score, index, query."""
