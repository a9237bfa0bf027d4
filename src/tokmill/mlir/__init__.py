"""MLIR modules: operations, schedules, and what they cost when they run on this machine."""
