"""What functions and blocks look like, as sparse matrices: read by all that compares them."""
