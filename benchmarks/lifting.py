"""Where functions of programs begin: tokmill, angr, SMDA and objdump.

Programs are lifted from the stripped file, and once more without `.eh_frame`; the truth are the
symbols of the unstripped one. What each of them found is kept as JSON below CACHE/lifting, by the
digest of the program.

    TOKMILL_ANGR_PYTHON=… python benchmarks/lifting.py CACHE PEERS-PYTHON [--reuse]

With `--reuse` what is kept is not made again: not for times.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import programs
from function_truth import Score
from lifters import NAMES, ROUNDS, Bench
from symbol_truth import read_truth, score
from tokmill.store.schema import Array
from tokmill.x86.image.program import open_program

LARGE = 1 << 20
"""Bytes of code of what counts as a large program."""


def starts_of(path: Path, starts: Sequence[int]) -> Array:
    """Return the starts that lie in code and not in import stubs (u8)."""
    found = np.asarray(starts, np.uint64)
    kept = np.zeros(len(found), bool)
    for section in open_program(path).sections:
        if section.execute and not section.stubs:
            kept |= (found >= section.address) & (found < section.stop)
    return found[kept]


@dataclass(frozen=True)
class Row:
    """A row of a table of function starts: a name, and which programs count."""

    name: str
    takes: Callable[[programs.Case], bool]


ROWS = [
    *(
        Row(f"{compiler} -{level}", lambda case, c=compiler, v=level: (
            case.kind in ("C", "C++") and (case.compiler, case.level) == (c, v)
        ))
        for compiler in ("gcc", "clang")
        for level in programs.LEVELS
    ),
    Row("**all of these**", lambda case: case.kind in ("C", "C++")),
    Row("random bytes between functions", lambda case: case.kind == "junk"),
    Row("PE, mingw-w64", lambda case: case.kind == "PE"),
]  # fmt: skip


def starts_table(
    bench: Bench, cases: Sequence[programs.Case], path_of: Callable[[programs.Case], Path | None]
) -> list[str]:
    """Return the table of function starts: recall / precision in per cent of each contestant."""
    scores: dict[tuple[str, str], Score] = {}
    sizes: dict[str, int] = {}
    failures: list[str] = []
    for case in cases:
        path = path_of(case)
        if path is None or case.whole is None:
            continue
        truth = read_truth(case.whole)
        sizes[case.name] = len(truth.start)
        for who in NAMES:
            found = bench.run(who, path)
            if found.failed:
                failures.append(f"{NAMES[who]} on {case.name}: {found.failed}")
            else:
                starts = starts_of(path, found.starts)
                scores[case.name, who] = score(starts, truth)
    lines = [
        f"| built by | programs | functions | {' | '.join(NAMES.values())} |",
        f"|---|---|---|{'---|' * len(NAMES)}",
    ]
    for row in ROWS:
        names = [case.name for case in cases if case.name in sizes and row.takes(case)]
        if names:
            cells = [_cell([scores.get((name, who)) for name in names]) for who in NAMES]
            functions = sum(sizes[name] for name in names)
            lines.append(f"| {row.name} | {len(names)} | {functions:,} | {' | '.join(cells)} |")
    return lines + ["", *(f"- No answer: {one}." for one in failures)] if failures else lines


def _cell(found: Sequence[Score | None]) -> str:
    there = [one for one in found if one is not None]
    if not there:
        return "-"
    total = sum(there, Score(0, 0, 0))
    left = f" ({len(there)} programs)" if len(there) < len(found) else ""
    return f"{100 * total.recall:.2f} / {100 * total.precision:.2f}{left}"


def code_size(path: Path) -> int:
    """Return the bytes of code of a program."""
    return sum(len(one.data) for one in open_program(path).sections if one.execute)


def speed(bench: Bench, cases: Sequence[programs.Case]) -> list[str]:
    """Return seconds and memory: medians of small programs, and each large one."""
    groups: dict[str, list[programs.Case]] = {}
    for case in cases:
        large = code_size(case.stripped) >= LARGE
        groups.setdefault(case.name if large else "", []).append(case)
    lines = [
        "| program | code, KB | contestant | CPU seconds | whole process, seconds | peak MiB | "
        "CPU / tokmill | peak / tokmill |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, members in sorted(groups.items(), key=lambda one: one[0]):
        title = name or f"median of {len(members)} below {LARGE >> 20} MiB of code"
        size = statistics.median(code_size(case.stripped) for case in members) / 1000
        ours = [bench.run("tokmill", case.stripped) for case in members]
        for who in NAMES:
            theirs = [bench.run(who, case.stripped) for case in members]
            pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not b.failed]
            if not pairs:
                lines.append(f"| {title} | {size:,.0f} | {NAMES[who]} | no answer | | | | |")
                continue
            cells = [
                f"{statistics.median(b.seconds for _, b in pairs):.2f}",
                f"{statistics.median(b.whole for _, b in pairs):.2f}",
                f"{statistics.median(b.peak for _, b in pairs) / 2**20:.0f}",
                f"{statistics.median(b.seconds / a.seconds for a, b in pairs):.1f}",
                f"{statistics.median(b.peak / a.peak for a, b in pairs):.1f}",
            ]
            left = f" ({len(pairs)})" if len(pairs) < len(members) else ""
            lines.append(f"| {title} | {size:,.0f} | {NAMES[who]}{left} | {' | '.join(cells)} |")
    return lines


def main(cache: Path, peers_python: str, *, reuse: bool = False) -> list[str]:
    """Measure; return the section for RESULTS.md."""
    made = programs.main(cache)
    bench = Bench(cache / "lifting", peers_python, reuse)
    cases = made.cases
    built = [case for case in cases if case.whole is not None]
    return [
        f"{len(built)} programs built here (C, C++, random bytes between functions, PE) and "
        f"{len(cases) - len(built)} of this machine. Recall / precision of function starts in per "
        "cent, from the stripped file; truth: symbols of functions, parts of functions (`.cold`, "
        "`.part`) left out. angr: CFGFast(normalize=True); SMDA with unwind tables; of objdump the "
        "targets of calls in its linear sweep.",
        "",
        *(f"- Left out: {line}." for line in made.missing),
        "",
        "### Function starts, stripped",
        "",
        *starts_table(bench, cases, lambda case: case.stripped),
        "",
        "### Function starts, stripped and without `.eh_frame`",
        "",
        *starts_table(bench, cases, lambda case: case.bare),
        "",
        "### Time and memory, stripped",
        "",
        *speed(bench, cases),
        "",
        "CPU time without imports, wall time of the whole process, peak until all was found. Of "
        f"tokmill the middle of {ROUNDS} runs, of the others one.",
    ]


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]), sys.argv[2], reuse="--reuse" in sys.argv)))
