"""The folder of a run: checkpoints, weights, metrics, exchange."""
