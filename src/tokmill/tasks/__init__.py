"""Tasks: rows, masks, head, loss and metrics around a model."""
