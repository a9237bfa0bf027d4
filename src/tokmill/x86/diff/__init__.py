"""Which functions and blocks of two programs are the same, and which changed."""
