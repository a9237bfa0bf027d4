"""Models: columns in, hidden states out."""
