"""Where functions of programs begin: tokmill, angr, SMDA and objdump.

Programs are lifted from the stripped file, and once more without `.eh_frame`; the truth are the
symbols of the unstripped one. What each of them found is kept as JSON below CACHE/lifting, by the
digest of the program.

    TOKMILL_ANGR_PYTHON=… python benchmarks/lifting.py CACHE PEERS-PYTHON [--reuse]

With `--reuse` what is kept is not made again: not for times.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import programs
from function_truth import Score
from lifters import NAMES, ROUNDS, Bench
from measure import markdown
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


def groups(cases: Sequence[programs.Case]) -> dict[str, list[programs.Case]]:
    """Return row of a table of function starts → the programs that count."""
    plain = [case for case in cases if case.kind in ("C", "C++")]
    found = {
        f"{compiler} -{level}": [
            case for case in plain if (case.compiler, case.level) == (compiler, level)
        ]
        for compiler in ("gcc", "clang")
        for level in programs.LEVELS
    }
    return found | {
        "**all of these**": plain,
        "random bytes between functions": [case for case in cases if case.kind == "junk"],
        "PE, mingw-w64": [case for case in cases if case.kind == "PE"],
    }


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
    rows = []
    for title, some in groups(cases).items():
        names = [case.name for case in some if case.name in sizes]
        if names:
            cells = [_cell([scores.get((name, who)) for name in names]) for who in NAMES]
            functions = sum(sizes[name] for name in names)
            rows.append([title, str(len(names)), f"{functions:,}", *cells])
    lines = markdown(["built by", "programs", "functions", *NAMES.values()], rows)
    return lines + ["", *(f"- No answer: {one}." for one in failures)] if failures else lines


def _cell(found: Sequence[Score | None]) -> str:
    there = [one for one in found if one is not None]
    if not there:
        return "-"
    total = sum(there, Score(0, 0, 0))
    left = f" ({len(there)} programs)" if len(there) < len(found) else ""
    return f"{100 * total.recall:.2f} / {100 * total.precision:.2f}{left}"


def code_size(path: Path) -> int:
    return sum(len(one.data) for one in open_program(path).sections if one.execute)


def speed(bench: Bench, cases: Sequence[programs.Case]) -> list[str]:
    """Return seconds and memory: medians of small programs, and each large one."""
    sized: dict[str, list[programs.Case]] = {}
    for case in cases:
        large = code_size(case.stripped) >= LARGE
        sized.setdefault(case.name if large else "", []).append(case)
    rows = []
    for name, members in sorted(sized.items()):
        title = name or f"median of {len(members)} below {LARGE >> 20} MiB of code"
        size = statistics.median(code_size(case.stripped) for case in members) / 1000
        ours = [bench.run("tokmill", case.stripped) for case in members]
        for who in NAMES:
            theirs = [bench.run(who, case.stripped) for case in members]
            pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not b.failed]
            if not pairs:
                rows.append([title, f"{size:,.0f}", NAMES[who], "no answer", "", "", "", ""])
                continue
            cells = [
                f"{statistics.median(b.seconds for _, b in pairs):.2f}",
                f"{statistics.median(b.whole for _, b in pairs):.2f}",
                f"{statistics.median(b.peak for _, b in pairs) / 2**20:.0f}",
                f"{statistics.median(b.seconds / a.seconds for a, b in pairs):.1f}",
                f"{statistics.median(b.peak / a.peak for a, b in pairs):.1f}",
            ]
            left = f" ({len(pairs)})" if len(pairs) < len(members) else ""
            rows.append([title, f"{size:,.0f}", f"{NAMES[who]}{left}", *cells])
    head = [
        "program", "code, KB", "tool", "CPU seconds", "whole process, seconds", "peak MiB",
        "CPU / tokmill", "peak / tokmill",
    ]  # fmt: skip
    return markdown(head, rows)


def main(cache: Path, peers_python: str, *, reuse: bool = False) -> list[str]:
    made = programs.main(cache)
    bench = Bench(cache / "lifting", peers_python, reuse)
    cases = made.cases
    built = [case for case in cases if case.whole is not None]
    return [
        f"{len(built)} programs built here (C, C++, random bytes between functions, PE) and "
        f"{len(cases) - len(built)} of this machine. Recall / precision of function starts in per "
        "cent, from the stripped file; ground truth: function symbols, without parts of functions "
        "(`.cold`, `.part`). angr: CFGFast(normalize=True); SMDA with unwind tables; objdump: the "
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
