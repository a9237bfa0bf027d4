"""F1 of `tokmill diff` without and with layers of `diff_evidence.py`, on projects held out.

It also prints how many matches are right by their confidence; given pairs do not count.

python benchmarks/diff_evidence_figures.py CACHE NET.npy …
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from diff_evidence import ZERO, using
from diff_evidence_programs import FIGURES, KINDS, Case, Pair, cases
from function_truth import judge_functions
from tokmill.store.schema import Array
from tokmill.x86.diff import match_functions

SAMPLES = 10_000
"""Of the bootstrap."""
BINS = (0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)
"""Of confidence."""


def judged(case: Case) -> tuple[float, Array]:
    """Return F1, and confidence and whether it is right of each match that counts: (M, 2)."""
    found = match_functions.match_functions(*case.arguments)
    j = found.j if case.order is None else case.order[found.j]
    one, other = case.partner[0][found.i], case.partner[1][found.j]
    counts = ((one >= 0) | (other >= 0)) & ~np.isin(found.i, case.arguments[-1].i)
    matches = np.column_stack([found.confidence, one == found.j])[counts]
    return judge_functions(case.truth, found.i, j)[0].f1, matches


def calibration(matches: Sequence[Array], names: Sequence[str]) -> Iterator[str]:
    """Yield by confidence how many matches there are, and the share that is right."""
    yield f"| confidence | {' | '.join(f'{name}, right' for name in names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for low, high in itertools.pairwise(BINS):
        cells = []
        for one in matches:
            right = one[(one[:, 0] >= low) & (one[:, 0] < high), 1]
            cells.append(f"{len(right)}, {right.mean():.3f}" if len(right) else "0")
        yield f"| {low} to {min(high, 1)} | {' | '.join(cells)} |"


def figures(cache: Path, nets: Sequence[Path]) -> tuple[list[Pair], Array, list[Array]]:
    """Return the pairs, F1 without a net and with each, and their matches."""
    tables = [ZERO, *map(np.load, nets)]
    seen, found = [], []
    matches: list[list[Array]] = [[] for _ in tables]
    for case in cases(cache, FIGURES, KINDS):
        row = []
        for table, mine in zip(tables, matches, strict=True):
            using(table)
            f1, there = judged(case)
            row.append(f1)
            mine.append(there)
        seen.append(case.pair)
        found.append(row)
        print(case.pair.project, case.pair.kind, *(f"{one:.4f}" for one in row), flush=True)
    return seen, np.asarray(found), [np.concatenate(one) for one in matches]


def table(seen: Sequence[Pair], f1: Array, names: Sequence[str]) -> Iterator[str]:
    """Yield the means by language and kind, and the intervals of what each net adds."""
    yield f"| | pairs | without | {' | '.join(names)} |"
    yield "|---" * (len(names) + 3) + "|"
    kinds = [kind for one in KINDS for kind in (one, f"{one}, shuffled")]
    for language, kind in itertools.product(("", "C", "C++"), ("", *kinds)):
        chosen = [
            number
            for number, pair in enumerate(seen)
            if language in ("", pair.language) and kind in ("", pair.kind)
        ]
        if chosen:
            cells = [f"{language} {kind}".strip() or "all", str(len(chosen))]
            cells += [f"{one:.4f}" for one in f1[chosen].mean(0)]
            yield f"| {' | '.join(cells)} |"
    project = np.asarray([pair.project for pair in seen])
    for place, name in enumerate(names, 1):
        gain = f1[:, place] - f1[:, 0]
        for what, groups in (
            ("pairs", [gain[[number]] for number in range(len(gain))]),
            ("projects", [gain[project == one] for one in sorted(set(project.tolist()))]),
        ):
            sums = np.asarray([[one.sum(), len(one)] for one in groups])
            drawn = np.random.default_rng(1).integers(0, len(sums), (SAMPLES, len(sums)))
            total, count = sums[drawn].sum(1).T
            low, high = np.quantile(total / count, (0.025, 0.975))
            yield f"{name}: {gain.mean():+.4f} ({low:+.4f} to {high:+.4f}, drawn by {what})"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("nets", type=Path, nargs="+")
    chosen = parser.parse_args(arguments)
    seen, f1, matches = figures(chosen.cache, chosen.nets)
    names = [net.stem for net in chosen.nets]
    print("\n".join(table(seen, f1, names)))
    print("\n".join(calibration(matches, ["without", *names])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
