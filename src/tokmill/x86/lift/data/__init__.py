"""Data in or near code: pointers, constants; begin with `block_facts`."""
