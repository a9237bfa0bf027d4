"""Weights of the ranker of functions, learned by `benchmarks/similarity_ranker.py`."""

WEIGHTS = {
    "opcodes": 1.0,
    "templates": 1.0,
    "forms": 1.0,
    "form pairs": 1.0,
    "constants": 1.0,
    "strings": 1.0,
    "imports": 1.0,
    "constants of callees": 1.0,
    "strings of callees": 1.0,
    "imports of callees": 1.0,
    "callers": 1.0,
    "shape": 1.0,
}
"""Part of `tokmill.x86.features.baselines.parts_of` → its weight."""
