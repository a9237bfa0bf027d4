"""Commands for schedules of MLIR modules: search, train, tune, replay."""
