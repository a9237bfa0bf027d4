"""F1 of `tokmill diff` without and with layers of `diff_evidence.py`, on projects held out.

python benchmarks/diff_evidence_figures.py CACHE NET.npy …
"""

from __future__ import annotations

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


def f1_of(case: Case) -> float:
    found = match_functions.match_functions(*case.arguments)
    j = found.j if case.order is None else case.order[found.j]
    return judge_functions(case.truth, found.i, j)[0].f1


def figures(cache: Path, nets: Sequence[Path]) -> tuple[list[Pair], Array]:
    """Return the pairs, and F1 without a net and with each."""
    tables = [ZERO, *map(np.load, nets)]
    seen, found = [], []
    for case in cases(cache, FIGURES, KINDS):
        row = []
        for table in tables:
            using(table)
            row.append(f1_of(case))
        seen.append(case.pair)
        found.append(row)
        print(case.pair.project, case.pair.kind, *(f"{one:.4f}" for one in row), flush=True)
    return seen, np.asarray(found)


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
    seen, f1 = figures(chosen.cache, chosen.nets)
    print("\n".join(table(seen, f1, [net.stem for net in chosen.nets])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
