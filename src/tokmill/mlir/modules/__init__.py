"""MLIR modules: read, made, cut into single operations, and what their operations are."""
