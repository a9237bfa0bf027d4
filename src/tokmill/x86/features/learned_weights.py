"""Weights of sums with learned vectors; `benchmarks/similarity_inlining.py` has their fit."""

# 8,184 pairs of 15 projects.
WITH_CODE = {
    "templates": 7.29,
    "forms": 1.55,
    "form pairs": 3.08,
    "shape": 4.85,
    "opcodes": 0.848,
    "vectors": 5.41,
    "vectors of callees": 2.19,
    "vectors of callers": 8.2,
    "vectors, inlined": 12,
}
WITH_FACTS = {
    "templates": 1.12,
    "forms": 1.85,
    "form pairs": 1.62,
    "shape": 4.26,
    "constants": 0.828,
    "strings": 2.87,
    "imports": 1.59,
    "facts": 1.16,
    "callees": 0.655,
    "deep": 11.2,
    "around": 3.37,
    "callers": 1.97,
    "vectors": 3.02,
    "vectors of callees": 0.601,
    "vectors of callers": 6.2,
    "vectors, inlined": 7.22,
}
"""Part of `learned_sums.py` → its weight."""
CALLEE = (-0.155, 0.808, 0.324, -0.325, -0.0859, -0.504, -0.386, -2.92)
CALLER = (-0.126, -0.967, -0.0733, 0.108, -0.192, 0.311, -0.103, 5.13)
CALLING = (-0.173, 0.128, 0.0209, -0.183, -0.162, -0.539, -0.0709, 0.564)
"""Weights of the columns of `SHAPE`, and a constant: of log weights of calls."""
LOG_WEIGHTS = (-8.0, 6.0)
"""Least and largest log weight of a call, as they were learned."""
