"""The recipe of a training: read, checked and resolved."""
