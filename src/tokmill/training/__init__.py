"""Training: the loop, engines, checkpoints and the folder of a run."""
