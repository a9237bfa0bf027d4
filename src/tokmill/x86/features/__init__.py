"""Features of functions and blocks, as sparse matrices, to compare them by."""
