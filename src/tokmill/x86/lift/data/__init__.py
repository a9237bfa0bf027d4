"""Data in or near code: pointers, constants; begin with `pointers`."""
