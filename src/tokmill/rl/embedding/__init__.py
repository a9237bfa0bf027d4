"""From an observation to a vector; begin with `embeddings`."""
