"""Weights of sums with learned vectors, learned by `benchmarks/similarity_learned.py`."""

# 9,178 functions of 10069db23a955f30.
WITH_CODE = {
    "templates": 6.61,
    "forms": 3.03,
    "form pairs": 2.06,
    "opcodes": 0.519,
    "shape": 3.46,
    "vectors": 0.889,
    "vectors of callees": 3.33,
    "vectors of callers": 6.35,
    "vectors, deep": 14.8,
    "vectors, around": 1.56,
}
"""Part of `learned_sums.py` → its weight."""
WITH_FACTS = {
    "templates": 1.1,
    "forms": 1.36,
    "form pairs": 0.998,
    "shape": 1.5,
    "constants": 0.456,
    "strings": 1.25,
    "imports": 1.42,
    "facts": 0.918,
    "callees": 0.811,
    "deep": 10.1,
    "around": 3.32,
    "callers": 5.9,
    "vectors": 0.785,
    "vectors of callees": 0.947,
    "vectors of callers": 0.939,
    "vectors, deep": 6.85,
    "vectors, around": 1.21,
}
"""Part of `learned_sums.py` → its weight."""
