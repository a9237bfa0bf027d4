"""Programs to functions and blocks: tokmill beside angr, SMDA and objdump.

Lifted from the stripped file, and once more without `.eh_frame`; the truth are the symbols of the
unstripped one. Blocks and jump tables are compared with angr's, and every difference is put into a
class. What each of them found is kept as JSON below CACHE/lifting, by the digest of the program.

    TOKMILL_ANGR_PYTHON=… python benchmarks/lifting.py CACHE PEERS-PYTHON [--reuse]

With `--reuse` what is kept is not made again: for looking at differences, not for times.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from elftools.dwarf.callframe import FDE
from elftools.elf.elffile import ELFFile

import lifting_blocks as blocks
import programs
from function_truth import Score
from lifters import NAMES, ROUNDS, Bench, angr, swept
from symbol_truth import Truth, read_truth, score
from tokmill.store.schema import Array
from tokmill.x86.image.program import open_program
from tokmill.x86.lift.cfg import lift

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
    *(
        Row(language, lambda case, one=language: case.kind == one)
        for language in ("OCaml", "D", "Fortran", "Go", *programs.OPTIONS)
    ),
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


MEANING = {
    "padding": "no-operations between functions, which angr lists as blocks of a function",
    "outside every function": "bytes that no symbol covers, nor, where there are none, an entry of "
    "the unwind table: random bytes, alignment, tables between functions",
    "inside an instruction": "none begins there for the other, or for objdump with symbols",
    "cut: around REP": "angr's decoder ends a block at an instruction that repeats",
    "cut: behind no jump": "angr ends a block at 99 instructions or 400 bytes; or code falls into "
    "what is said to be a function",
    "cut: beginning of a function": "a function is said to begin in the middle of a block, most "
    "often at a `sub rsp` behind the pushes of one that nothing calls",
    "cut: target of a jump table": "a table that the other did not resolve, or read further",
    "cut: target of a jump": "a jump from code that the other does not have",
    "cut: behind a call": "the other does not end the block there",
    "cut: nothing leads there": "a block without a way to it",
    "code: target of a jump table": "code behind a table that the other did not resolve",
    "code: target of a jump": "code that only code leads to that the other does not have",
    "code: behind a call": "the other holds that the call does not return",
    "code: beginning of a function": "a function that the other does not have",
    "code: behind no jump": "code behind other code that the other does not have",
    "code: around REP": "the same, at an instruction that repeats",
    "code: nothing leads there": "code found by other means: landing pads, gaps",
}


KINDS = {"others": "programs without random bytes", "junk": "with random bytes"}
BLOCKS = {
    "programs": "programs", "blocks of tokmill": "mine", "blocks of angr": "blocks",
    "of both": "both", "angr's in functions, padding left out": "code",
    "of these in tokmill": "code_both",
}  # fmt: skip
JUMPS = {
    "seen by tokmill": "seen", "resolved": "resolved", "seen by angr": "other_seen",
    "resolved by angr": "other_resolved", "of these by tokmill": "both_resolved",
    "with all of angr's targets": "all_targets", "angr's that lead to instructions only": "true",
    "of these by tokmill, with all targets": "true_resolved",
}  # fmt: skip


def blocks_tables(bench: Bench, cases: Sequence[programs.Case]) -> list[str]:
    """Return what becomes of angr's blocks and jump tables, and of tokmill's that angr lacks."""
    places: dict[str, list[str]] = {}
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for case in cases:
        answer = bench.angr(case.stripped)
        if answer.failed:
            continue
        truth = read_truth(case.whole) if case.whole else unwound(case.stripped)
        mine = blocks.view(lift(case.stripped))
        other = blocks.view(angr.graph_of(answer.answer, open_program(case.stripped)))
        total = totals["junk" if case.kind == "junk" else "others"]
        total += blocks.shares(mine, other, truth)
        seen = swept(case.whole or case.stripped)
        total += blocks.compare_jumps(blocks.jumps(mine.graph), blocks.jumps(other.graph), seen)
        total.update(programs=1, mine=len(mine.start))
        for who, here, there in (("angr", mine, other), ("tokmill", other, mine)):
            for name, found in blocks.differences(here, there, truth, seen).items():
                listed = places.setdefault(f"only in {who}: {name}", [])
                listed += [f"{case.name} {address:#x}" for address in found]
                total[f"only in {who}: {name}"] += len(found)
    (bench.folder / "differences.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(places))
    )
    for total in totals.values():
        # A place that both have as code, though no block begins there, is a cut.
        lost = sum(n for name, n in total.items() if name.startswith("only in angr: code"))
        total["as_code"] = total["code"] - lost
    lines = _table("blocks", totals, BLOCKS)
    lines.append(_shares("share", totals, "code_both", "code"))
    lines.append(_shares("share that tokmill has as code", totals, "as_code", "code"))
    for who in ("angr", "tokmill"):
        head = f"only in {who}: "
        names = sorted(name.removeprefix(head) for name in places if name.startswith(head))
        rows = {f"`{name}`: {MEANING[name]}": head + name for name in names}
        lines += ["", *_table(f"only in {who}", totals, rows)]
    lines += ["", *_table("indirect jumps, those to imports left out", totals, JUMPS)]
    lines.append(_shares("share", totals, "true_resolved", "true"))
    return lines


def unwound(path: Path) -> Truth:
    """Return the ranges of a program's unwind table: what is a function where symbols are gone."""
    with path.open("rb") as file:
        table = ELFFile(file).get_dwarf_info().EH_CFI_entries()
    heads = [entry.header for entry in table if isinstance(entry, FDE)]
    ranges = sorted(
        (head.initial_location, head.initial_location + head.address_range) for head in heads
    )
    start, stop = np.asarray(ranges, np.uint64).reshape(-1, 2).T
    none = np.zeros(0, np.uint64)
    return Truth(start, stop, [""] * len(start), none, none)


def _table(title: str, totals: dict[str, Counter[str]], rows: dict[str, str]) -> list[str]:
    lines = [f"| {title} | {' | '.join(KINDS.values())} |", "|---|---|---|"]
    for name, key in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{total[key]:,}' for total in totals.values())} |")
    return lines


def _shares(title: str, totals: dict[str, Counter[str]], part: str, whole: str) -> str:
    shares = [total[part] / max(1, total[whole]) for total in totals.values()]
    return f"| {title} | {' | '.join(f'{share:.2%}' for share in shares)} |"


def unstripped(cases: Sequence[programs.Case]) -> list[str]:
    """Return how many functions of unstripped programs decode without conflict."""
    total = Counter[str]()
    for case in cases:
        if case.whole is None or case.kind == "PE":
            continue
        truth = read_truth(case.whole)
        found, sound, agreed = blocks.without_conflict(lift(case.whole), truth, swept(case.whole))
        total.update(programs=1, functions=len(truth.start), found=found, sound=sound)
        total.update(agreed=agreed)
    share = {key: total[key] / max(1, total["functions"]) for key in ("found", "sound", "agreed")}
    return [
        f"With symbols, {total['programs']} ELF programs, {total['functions']:,} functions: "
        f"{share['found']:.2%} are found, {share['sound']:.2%} decode without conflict (no "
        f"instruction overlaps another), {share['agreed']:.2%} with every instruction where "
        "objdump, which begins anew at each symbol, sees one."
    ]


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


BEYOND = [
    "- angr goes on from the graph: VEX code, symbolic execution, calling conventions, many "
    "machines and file formats; it splits blocks at REP as its code does.",
    "- SMDA reads dumps and shellcode without headers, .NET and other machines, and hashes "
    "functions for comparing malware.",
    "- objdump prints every byte of a section as text, needs milliseconds, and reads all formats "
    "of binutils; it has neither functions of stripped files nor blocks.",
    "- tokmill gives raw bytes, lengths, edges with kinds and reasons of what it did not follow, "
    "as columns; x86 only.",
]


def main(cache: Path, peers_python: str, *, reuse: bool = False) -> list[str]:
    """Measure; return the section for RESULTS.md."""
    made = programs.main(cache)
    bench = Bench(cache / "lifting", peers_python, reuse)
    cases = made.cases
    built = [case for case in cases if case.whole is not None]
    return [
        f"{len(built)} programs built here (C, C++, random bytes between functions, PE; small "
        "ones in OCaml, D, Fortran and Go) and "
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
        "### Blocks and jump tables beside angr's, stripped",
        "",
        *blocks_tables(bench, cases),
        "",
        *unstripped(built),
        "",
        "### Time and memory, stripped",
        "",
        *speed(bench, cases),
        "",
        "CPU time without imports, wall time of the whole process, peak until all was found. Of "
        f"tokmill the middle of {ROUNDS} runs, of the others one.",
        "",
        *BEYOND,
    ]


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]), sys.argv[2], reuse="--reuse" in sys.argv)))
