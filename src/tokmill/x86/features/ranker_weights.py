"""Weights of the ranker of functions, learned by `benchmarks/similarity_ranker.py`."""

# 1,643 pairs of train, 221a64d1e7f7f973.
WEIGHTS = {
    "opcodes": 0.327,
    "templates": 6.19,
    "forms": 5.66,
    "form pairs": 1.3,
    "constants": 7.28,
    "strings": 5.89,
    "imports": 2.91,
    "constants of callees": 3.51,
    "strings of callees": 2.16,
    "imports of callees": 3.15,
    "callers": 11,
    "shape": 3.04,
}
"""Part of `tokmill.x86.features.baselines.parts_of` → its weight."""
