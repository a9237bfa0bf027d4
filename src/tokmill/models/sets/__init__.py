"""Models of sets: a vector whatever the order of the positions. Read `set_transformer` first."""
