"""Weights of the ranker of functions, learned by `benchmarks/similarity_ranker.py`."""

# 3,604 pairs of train, 360c61f322df26c0.
WEIGHTS = {
    "templates": 6.21,
    "forms": 5.54,
    "form pairs": 1.73,
    "shape": 3.3,
    "constants": 0.388,
    "strings": 2.48,
    "imports": 1.68,
    "facts": 0.745,
    "callees": 2.52,
    "deep": 11.5,
    "around": 4.25,
    "callers": 7.76,
}
"""Part of `tokmill.x86.features.baselines.parts_of` → its weight."""
