"""What `tokmill diff` prints."""

from tokmill.base.errors import one_line
from tokmill.base.progress import human_count, human_share
from tokmill.terminal.output import print_table
from tokmill.x86.commands.program_options import MOST_LISTED
from tokmill.x86.diff.output.summary import (
    ADDED,
    ARROW,
    REMOVED,
    Counts,
    changed_most,
)
from tokmill.x86.diff.program_diff import NOT_FOLLOWED
from tokmill.x86.diff.result import Diff, ProgramChanges
from tokmill.x86.graph import Graph
from tokmill.x86.image.program import demangle

MEANING = {
    NOT_FOLLOWED: " (indirect jumps and calls whose targets are not known: code that nothing else "
    "leads to may be missing; `tokmill cfg PROGRAM -o GRAPH.jsonl` lists them)"
}
"""What could not be looked at → what that means."""
DOUBTFUL = 0.5
"""Matches with a lower confidence get a question mark."""
MOST_REFERENCES = 2
"""Most references of one function in a table."""
LONGEST_NAME = 48
"""Characters of a function's name in a table; templates of C++ have hundreds."""


def print_programs(
    graphs: tuple[Graph, Graph],
    called: tuple[str, str],
    diff: Diff,
    counts: Counts,
    same_bytes: bool,
) -> None:
    for title, name, graph in zip(("old", "new"), called, graphs, strict=True):
        by = one_line(" ".join(part for part in (graph.compiler, graph.level) if part))
        facts = [f"{graph.bits} bits", human_count(len(graph.function_address), "function")]
        print(f"{title}: {one_line(name)}, {', '.join([*facts, by] if by else facts)}")
    print(_in_words(counts))
    if counts.reasons:
        print(f"matched by: {', '.join(f'{why} {n:,}' for why, n in counts.reasons.items())}")
    most = changed_most(*graphs, diff, MOST_LISTED)
    if most:
        print("\nchanged most")
        headers = [
            "function", "old", "new", "similarity", "instructions", "blocks changed", "by",
            "confidence", "other references",
        ]  # fmt: skip
        rows = [
            [
                _short(one.name),
                f"{one.a:x}",
                f"{one.b:x}",
                one.similarity,
                f"{one.instructions_a:,}{ARROW}{one.instructions_b:,}",
                one.blocks,
                one.reason,
                f"{one.confidence:.2f}{'?' if one.confidence < DOUBTFUL else ''}",
                _listed(one.references, MOST_REFERENCES),
            ]
            for one in most
        ]
        print_table(headers, rows)
        if counts.changed > len(most):
            print(f"… {counts.changed - len(most):,} more changed (-o diff.json has all)")
    lists = (
        (f"no partner in new ({REMOVED})", graphs[0], diff.deleted),
        (f"no partner in old ({ADDED})", graphs[1], diff.inserted),
    )
    for title, graph, functions in lists:
        if len(functions):
            print(f"\n{title}: {_listed(graph.names(functions.tolist()))}")
    _print_other(diff.other)
    if diff.same and not same_bytes:
        where = "data, imports or exports" if diff.other.any else "other bytes"
        if all(graph.facts for graph in graphs):
            print(f"no function differs; the files differ in {where}")
        else:
            print("no instruction differs; what they refer to is not known")
    for what, count in diff.left_out.items():
        print(f"not analysed: {count:,} {what}{MEANING.get(what, '')}")


def _print_other(changes: ProgramChanges) -> None:
    if changes.data:
        print("\ndata changed")
        rows = [
            [
                _short(one.name) or "(no name)", f"{one.a:x}", f"{one.b:x}",
                f"{one.size_a:,}{ARROW}{one.size_b:,}",
                f"at +{one.first:#x}: {one.old or 'nothing'}{ARROW}{one.new or 'nothing'}",
            ]
            for one in changes.data[:MOST_LISTED]
        ]  # fmt: skip
        print_table(["name", "old", "new", "bytes", "first difference"], rows)
        if len(changes.data) > MOST_LISTED:
            print(f"… {len(changes.data) - MOST_LISTED:,} more (-o diff.json has all)")
    for what in ("imports", "exports"):
        for how in ("deleted", "inserted"):
            if names := getattr(changes, f"{what}_{how}"):
                print(f"{what} {how}: {_listed(names)}")


def _in_words(counts: Counts) -> str:
    parts = (
        (counts.references_only, "only in what they refer to"),
        (counts.nothing_equal, "without an equal block"),
    )
    parts_in_words = "; ".join(f"{count:,} {how}" for count, how in parts if count)
    details = f" ({parts_in_words})" if parts_in_words else ""
    return (
        f"{counts.same:,} the same, {counts.changed:,} changed{details}, "
        f"without a partner {counts.deleted:,} of old, {counts.inserted:,} of new; "
        f"similarity {human_share(counts.similarity)}"
    )


def _listed(names: list[str], most: int = MOST_LISTED) -> str:
    """Return the first names as they fit into a line, and how many more there are."""
    more = [f"{len(names) - most:,} more"] if len(names) > most else []
    return ", ".join([*map(_short, names[:most]), *more])


def _short(name: str) -> str:
    """Return a name of a function as it fits into a line: C++ demangled, long ones cut."""
    parts = (one_line(part) for part in demangle(name.split(ARROW)))
    return ARROW.join(
        part if len(part) <= LONGEST_NAME else f"{part[: LONGEST_NAME - 1]}…" for part in parts
    )
