"""A diff as BinDiff's database of results (SQLite), with the two `.BinExport` files beside it.

Tables and columns are those of `database_writer.cc` of github.com/google/bindiff, flags those of
its `change_classifier.h`. The reason of a match is written in the words of `Reason`; BinDiff's own
algorithms have other names, and readers know their numbers up to 19 (functions) and 20 (blocks).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from tokmill.base.errors import UsageError
from tokmill.base.files import write_file
from tokmill.store.schema import Array
from tokmill.version import __version__
from tokmill.x86.diff.result import Diff, Reason
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.binexport import mnemonics_of
from tokmill.x86.graphs.calls import calls_of
from tokmill.x86.graphs.graph_files import SUFFIXES, read_about, write_graph
from tokmill.x86.image.ranges import distinct, member
from tokmill.x86.walks import Flow, flow_of

MANUAL = 20
"""Number of the last algorithm for blocks, which means matched by hand. Viewers expect it."""
FUNCTIONS = {
    Reason.NAME: 1, Reason.CODE: 2, Reason.STRUCTURE: 3, Reason.CONSTANTS: 7, Reason.CALLS: 8,
    Reason.INSTRUCTIONS: 11, Reason.LAYOUT: 12, Reason.STRINGS: 13, Reason.FLOW: 17,
    Reason.IMPORTS: 18, Reason.VECTORS: 19, Reason.TABLES: 16,
}  # fmt: skip
"""Reason → the number of the nearest algorithm of BinDiff; each is used once."""
BLOCKS = {
    Reason.CODE: 2, Reason.CONSTANTS: 3, Reason.CALLS: 4, Reason.STRINGS: 5, Reason.IMPORTS: 8,
    Reason.STRUCTURE: 10, Reason.INSTRUCTIONS: 11, Reason.NAME: 15, Reason.LAYOUT: 16,
    Reason.VECTORS: 18, Reason.FLOW: 19, Reason.TABLES: 17,
}  # fmt: skip
STRUCTURE_CHANGED, INSTRUCTIONS_CHANGED, OPERANDS_CHANGED = 1, 2, 4
"""Flags of a match of functions."""
LONG = 256
"""In changed blocks with more instructions only the equal beginning and end are matched."""
SCHEMA = """
CREATE TABLE basicblockalgorithm (id SMALLINT PRIMARY KEY, name TEXT);
CREATE TABLE functionalgorithm (id SMALLINT PRIMARY KEY, name TEXT);
CREATE TABLE file (id INT, filename TEXT, exefilename TEXT, hash CHARACTER(40), functions INT,
    libfunctions INT, calls INT, basicblocks INT, libbasicblocks INT, edges INT, libedges INT,
    instructions INT, libinstructions INT);
CREATE TABLE metadata (version TEXT, file1 INT REFERENCES file(id), file2 INT REFERENCES file(id),
    description TEXT, created DATE, modified DATE, similarity DOUBLE PRECISION,
    confidence DOUBLE PRECISION);
CREATE TABLE function (id INT PRIMARY KEY, address1 BIGINT, name1 TEXT, address2 BIGINT, name2 TEXT,
    similarity DOUBLE PRECISION, confidence DOUBLE PRECISION, flags INTEGER,
    algorithm SMALLINT REFERENCES functionalgorithm(id), evaluate BOOLEAN, commentsported BOOLEAN,
    basicblocks INTEGER, edges INTEGER, instructions INTEGER, UNIQUE(address1, address2));
CREATE TABLE basicblock (id INT PRIMARY KEY, functionid INT REFERENCES function(id),
    address1 BIGINT, address2 BIGINT, algorithm SMALLINT REFERENCES basicblockalgorithm(id),
    evaluate BOOLEAN);
CREATE TABLE instruction (basicblockid INT REFERENCES basicblock(id), address1 BIGINT,
    address2 BIGINT);
"""


def write_bindiff(
    path: Path,
    a: Graph,
    b: Graph,
    diff: Diff,
    digests: tuple[str, str] = ("", ""),
    created: datetime | None = None,
) -> tuple[Path, Path]:
    """Write a diff as a database, and both graphs in its folder, where viewers look for them.

    Imports are no functions here. `digests`: sha256 of the programs; `created`: else now. Returns
    the paths of the two `.BinExport` files. Each file is atomic. Raises `TokmillError` for a graph
    whose blocks are no instructions, and `UsageError` where a `.BinExport` file of another program,
    or by another tool, has the name.
    """
    names = [Path(graph.program).name or "program" for graph in (a, b)]
    if names[0] == names[1]:
        names = [f"{names[0]}-a", f"{names[1]}-b"]
    exports = tuple(path.with_name(name + SUFFIXES["binexport"]) for name in names)
    for export, digest in zip(exports, digests, strict=True):
        _check_replaced(export, digest, again=path.exists())
    for graph, export, digest in zip((a, b), exports, digests, strict=True):
        write_graph(graph, export, digest)
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA)
        flows = flow_of(a), flow_of(b)
        _write_files(database, (a, b), flows, names, digests)
        _write_about(database, (a, b), diff, created or datetime.now(UTC))
        _write_matches(database, a, b, diff, flows)
        database.commit()
        data = database.serialize()
    write_file(path, data)
    return exports[0], exports[1]


def _check_replaced(export: Path, digest: str, *, again: bool) -> None:
    """Refuse to replace the graph of another program, or one that tokmill has not written.

    again: whether the database that the graph belongs to is replaced, too.
    """
    if not export.exists():
        return
    there = read_about(export)
    if there is None or not (again or there.digest == digest):
        raise UsageError(
            "the graph of the program would replace this file, which "
            + ("tokmill has not written" if there is None else "is of another program"),
            where=str(export),
            hint="name the database in a folder of its own: -o FOLDER/result.BinDiff",
        )


def _write_files(
    database: sqlite3.Connection,
    graphs: tuple[Graph, Graph],
    flows: tuple[Flow, Flow],
    names: list[str],
    digests: tuple[str, str],
) -> None:
    for number, graph in enumerate(graphs):
        calls = calls_of(graph)
        functions, imports = len(graph.function_address), len(graph.import_address)
        callee = np.where(calls.function >= 0, calls.function, functions + calls.imported)
        pairs = distinct(calls.caller * (functions + imports) + callee)
        counts = (
            functions, 0, len(pairs), len(graph.block_address), 0,
            len(flows[number].target), 0, len(graph.lengths), 0,
        )  # fmt: skip
        row = (number + 1, names[number], Path(graph.program).name, digests[number], *counts)
        database.execute(f"INSERT INTO file VALUES ({_places(row)})", row)


def _write_about(
    database: sqlite3.Connection, graphs: tuple[Graph, Graph], diff: Diff, created: datetime
) -> None:
    """Write the similarity of the programs: matches are weighted by their instructions."""
    sizes = [np.diff(graph.block_instructions[graph.function_blocks]) for graph in graphs]
    weight = sizes[0][diff.function_a] + sizes[1][diff.function_b]
    every, matched = max(1, sum(int(size.sum()) for size in sizes)), max(1, int(weight.sum()))
    similarity = float((diff.similarity * weight).sum() / every)
    confidence = float((diff.confidence * weight).sum() / matched)
    when = created.strftime("%Y-%m-%d %H:%M:%S")
    row = (f"tokmill {__version__}", 1, 2, "", when, when, similarity, confidence)
    database.execute(f"INSERT INTO metadata VALUES ({_places(row)})", row)


def _write_matches(
    database: sqlite3.Connection, a: Graph, b: Graph, diff: Diff, flows: tuple[Flow, Flow]
) -> None:
    rows = [(number, _way(reason)) for reason, number in FUNCTIONS.items()]
    database.executemany("INSERT INTO functionalgorithm VALUES (?, ?)", rows)
    rows = [(number, _way(reason)) for reason, number in BLOCKS.items()]
    rows.append((MANUAL, "manual"))
    database.executemany("INSERT INTO basicblockalgorithm VALUES (?, ?)", rows)
    owner = np.repeat(np.arange(len(diff.function_a)), np.diff(diff.match_blocks))
    pairs = _Pairs(a, b, diff)
    flags = np.zeros(len(diff.function_a), np.int64)
    for graph, functions, blocks in (
        (a, diff.function_a, diff.deleted_blocks), (b, diff.function_b, diff.inserted_blocks)
    ):  # fmt: skip
        of_block = np.searchsorted(graph.function_blocks, blocks, side="right") - 1
        flags[member(functions, distinct(of_block))] |= STRUCTURE_CHANGED
    changed = diff.block_similarity < 1
    flags[owner[changed & ~pairs.same]] |= INSTRUCTIONS_CHANGED
    flags[owner[changed & pairs.same]] |= OPERANDS_CHANGED
    database.executemany("INSERT INTO instruction VALUES (?, ?, ?)", pairs.rows())
    numbers = np.arange(1, len(owner) + 1)
    database.executemany(
        "INSERT INTO basicblock VALUES (?, ?, ?, ?, ?, 0)",
        zip(
            numbers.tolist(), (owner + 1).tolist(), _signed(a.block_address[diff.block_a]),
            _signed(b.block_address[diff.block_b]),
            [BLOCKS[Reason(reason)] for reason in diff.block_reason.tolist()], strict=True,
        ),
    )  # fmt: skip
    matched = np.bincount(owner, pairs.matched, len(flags)).astype(np.int64)
    database.executemany(
        "INSERT INTO function VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, ?, ?, ?)",
        zip(
            range(1, len(flags) + 1),
            _signed(a.function_address[diff.function_a]), _names(a, diff.function_a),
            _signed(b.function_address[diff.function_b]), _names(b, diff.function_b),
            diff.similarity.astype(float).tolist(), diff.confidence.astype(float).tolist(),
            flags.tolist(), [FUNCTIONS[Reason(reason)] for reason in diff.reason.tolist()],
            np.diff(diff.match_blocks).tolist(), _edges(diff, owner, flows).tolist(),
            matched.tolist(), strict=True,
        ),
    )  # fmt: skip


class _Pairs:
    """The instructions of matched blocks; N pairs of blocks."""

    def __init__(self, a: Graph, b: Graph, diff: Diff) -> None:
        self.blocks = list(zip(diff.block_a.tolist(), diff.block_b.tolist(), strict=True))
        self.begin = a.block_instructions.tolist(), b.block_instructions.tolist()
        self.mnemonics = mnemonics_of(a).tolist(), mnemonics_of(b).tolist()
        self.address = _signed(_addresses(a)), _signed(_addresses(b))
        self.runs = [self._matched(*pair) for pair in self.blocks]
        """For each pair of blocks its matched runs: begin in A, begin in B, length."""
        self.matched = np.asarray([sum(run[2] for run in runs) for runs in self.runs], np.float64)
        """(N,) f8, how many instructions are matched."""
        sizes = np.diff(a.block_instructions)[diff.block_a], np.diff(b.block_instructions)
        self.same = (self.matched == sizes[0]) & (sizes[0] == sizes[1][diff.block_b])
        """(N,) bool: the same mnemonics in the same order."""

    def _matched(self, one: int, other: int) -> list[tuple[int, int, int]]:
        low, high = self.begin[0][one], self.begin[0][one + 1]
        start, stop = self.begin[1][other], self.begin[1][other + 1]
        left, right = self.mnemonics[0][low:high], self.mnemonics[1][start:stop]
        if left == right:
            return [(low, start, len(left))]
        if max(len(left), len(right)) > LONG:
            return _ends(left, right, low, start)
        found = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
        return [(low + run.a, start + run.b, run.size) for run in found if run.size]

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield number of the match of blocks and two addresses of each matched instruction."""
        for number, runs in enumerate(self.runs, 1):
            for one, other, size in runs:
                for i in range(size):
                    yield number, self.address[0][one + i], self.address[1][other + i]


def _ends(left: list[int], right: list[int], low: int, start: int) -> list[tuple[int, int, int]]:
    """Return the equal beginning and end of two long runs of mnemonics."""
    most = min(len(left), len(right))
    first = next((i for i in range(most) if left[i] != right[i]), most)
    last = next((i for i in range(most - first) if left[-1 - i] != right[-1 - i]), most - first)
    found = [(low, start, first), (low + len(left) - last, start + len(right) - last, last)]
    return [run for run in found if run[2]]


def _edges(diff: Diff, owner: Array, flows: tuple[Flow, Flow]) -> Array:
    """Return for each match how many edges lead between the same matched blocks in both: i8."""
    one, other = flows
    count = max(1, len(other.first))
    partner = np.full(len(one.first), -1, np.int64)
    match = np.zeros(len(one.first), np.int64)
    partner[diff.block_a], match[diff.block_a] = diff.block_b, owner
    source, target = _ways(one)
    both = (partner[source] >= 0) & (partner[target] >= 0)
    source, target = source[both], target[both]
    theirs = _ways(other)
    known = np.sort(theirs[0] * count + theirs[1])
    found = member(partner[source] * count + partner[target], known)
    counts: Array = np.bincount(match[source[found]], minlength=len(diff.function_a))
    return counts


def _ways(flow: Flow) -> tuple[Array, Array]:
    return np.repeat(np.arange(len(flow.first) - 1), np.diff(flow.first)), flow.target


def _addresses(graph: Graph) -> Array:
    """Return the address of each instruction: (I,) u8."""
    counts = np.diff(graph.block_instructions)
    begin = np.cumsum(graph.lengths, dtype=np.int64) - graph.lengths
    inside = begin - np.repeat(graph.block_bytes[:-1], counts)
    found: Array = np.repeat(graph.block_address, counts) + inside.astype(np.uint64)
    return found


def _names(graph: Graph, functions: Array) -> list[str]:
    addresses = graph.function_address.tolist()
    return [graph.function_name[i] or f"sub_{addresses[i]:x}" for i in functions.tolist()]


def _signed(addresses: Array) -> list[int]:
    """Return addresses as SQLite stores them: signed."""
    found: list[int] = addresses.astype(np.uint64).view(np.int64).tolist()
    return found


def _way(reason: Reason) -> str:
    return reason.name.lower()


def _places(row: tuple[object, ...]) -> str:
    return ", ".join("?" * len(row))
