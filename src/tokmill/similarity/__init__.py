"""How well vectors find the same function again: evaluation, queries, an index."""
