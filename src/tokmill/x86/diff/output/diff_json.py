"""A diff as a file: `diff.json`, written from two graphs and the columns of `Diff`, and read back.

Functions and blocks are named by their addresses, so that the file can be read without the graphs.
"""

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from tokmill.base.files import write_file
from tokmill.terminal.output import html_table
from tokmill.x86.diff.result import Diff, ProgramChanges, Reason
from tokmill.x86.graph import Graph

FORMAT = "tokmill.diff"
VERSION = 2
"""1: without `level`, `references` and `other`."""
LEVELS = "same", "references", "changed"
SHOWN = 20
"""Functions that a notebook shows."""
REASONS = [reason.name.lower() for reason in Reason]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two programs."""

    program: str
    bits: int
    functions: int
    blocks: int
    instructions: int
    compiler: str = ""
    level: str = ""
    digest: str = ""
    """sha256 of the file that it was read from."""


class BlockMatch(msgspec.Struct, frozen=True, array_like=True):
    """A pair of blocks: in JSON a list of its fields."""

    a: int
    """Address."""
    b: int
    similarity: float
    reason: str


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Operands of equal instructions that refer to something else: in JSON a list of its fields."""

    a: int
    """Address of the instruction."""
    b: int
    old: str
    """What it refers to, in words."""
    new: str


class FunctionMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of functions, and the matches of their blocks."""

    a: int
    """Address."""
    b: int
    name_a: str
    """Raw symbol name; "" if there is none."""
    name_b: str
    level: str
    """One of `LEVELS`: all is the same; the same instructions that refer to something else."""
    similarity: float
    confidence: float
    reason: str
    blocks: list[BlockMatch]
    references: list[Reference] = []
    deleted: list[int] = []
    """Addresses of blocks of A without a partner."""
    inserted: list[int] = []


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function without a partner."""

    address: int
    name: str
    blocks: int
    instructions: int


class DiffFile(msgspec.Struct, frozen=True, kw_only=True):
    """All of a `diff.json`."""

    format: str = FORMAT
    version: int = VERSION
    a: Program
    b: Program
    matched: list[FunctionMatch]
    """By address in A."""
    deleted: list[Function]
    """In A, without a partner: removed or inlined."""
    inserted: list[Function]
    """In B, without a partner: new or no longer inlined."""
    other: ProgramChanges = ProgramChanges()
    left_out: dict[str, int] = {}

    def __repr__(self) -> str:
        levels = Counter(match.level for match in self.matched)
        counts = {level: levels[level] for level in reversed(LEVELS)}
        counts |= {"deleted": len(self.deleted), "inserted": len(self.inserted)}
        shown = ", ".join(f"{name}={count}" for name, count in counts.items())
        return f"DiffFile({self.a.program!r}, {self.b.program!r}, {shown})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: the functions that changed most."""
        changed = [match for match in self.matched if match.level != LEVELS[0]]
        shown = sorted(changed, key=lambda match: match.similarity)[:SHOWN]
        rows = {
            f"{m.name_a} {m.a:#x} → {m.name_b} {m.b:#x}": f"{m.level} {m.similarity:.0%}"
            for m in shown
        }
        return html_table(repr(self), rows)


def diff_file(a: Graph, b: Graph, diff: Diff, digests: tuple[str, str] = ("", "")) -> DiffFile:
    """Return the content of the file of a diff; `digests`: sha256 of the two program files."""
    gone = _by_function(a, diff.deleted_blocks)
    new = _by_function(b, diff.inserted_blocks)
    address_a, address_b = a.block_address.tolist(), b.block_address.tolist()
    blocks_a, blocks_b = diff.block_a.tolist(), diff.block_b.tolist()
    similar = _rounded(diff.block_similarity)
    reasons = diff.block_reason.tolist()
    bounds = diff.match_blocks.tolist()
    refs = diff.references
    references = [
        Reference(*row)
        for row in zip(refs.a.tolist(), refs.b.tolist(), refs.old, refs.new, strict=True)
    ]
    ends = np.searchsorted(refs.match, np.arange(len(diff.function_a) + 1)).tolist()
    levels = np.where(diff.references_only, 1, 2 * diff.changed).tolist()
    matched = []
    columns = (diff.function_a, diff.function_b, diff.reason)
    scores = zip(_rounded(diff.similarity), _rounded(diff.confidence), strict=True)
    rows = zip(*(column.tolist() for column in columns), scores, strict=True)
    for number, (one, other, reason, (similarity, confidence)) in enumerate(rows):
        inside = range(bounds[number], bounds[number + 1])
        matched.append(
            FunctionMatch(
                a=int(a.function_address[one]),
                b=int(b.function_address[other]),
                name_a=a.function_name[one],
                name_b=b.function_name[other],
                level=LEVELS[levels[number]],
                similarity=similarity,
                confidence=confidence,
                reason=REASONS[reason],
                blocks=[
                    BlockMatch(
                        address_a[blocks_a[i]],
                        address_b[blocks_b[i]],
                        similar[i],
                        REASONS[reasons[i]],
                    )
                    for i in inside
                ],
                references=references[ends[number] : ends[number + 1]],
                deleted=gone.get(one, []),
                inserted=new.get(other, []),
            )
        )
    return DiffFile(
        a=_program(a, digests[0]),
        b=_program(b, digests[1]),
        matched=matched,
        deleted=_functions(a, diff.deleted.tolist()),
        inserted=_functions(b, diff.inserted.tolist()),
        other=diff.other,
        left_out=diff.left_out,
    )


def write_diff(path: Path | str, diff: DiffFile) -> None:
    write_file(path, msgspec.json.encode(diff) + b"\n")


def _program(graph: Graph, digest: str) -> Program:
    return Program(
        program=graph.program,
        bits=graph.bits,
        functions=len(graph.function_address),
        blocks=len(graph.block_address),
        instructions=len(graph.lengths),
        compiler=graph.compiler,
        level=graph.level,
        digest=digest,
    )


def _functions(graph: Graph, numbers: list[int]) -> list[Function]:
    blocks = graph.function_blocks
    instructions = graph.block_instructions[blocks]
    return [
        Function(
            address=int(graph.function_address[number]),
            name=graph.function_name[number],
            blocks=int(blocks[number + 1] - blocks[number]),
            instructions=int(instructions[number + 1] - instructions[number]),
        )
        for number in numbers
    ]


def _by_function(graph: Graph, blocks: np.ndarray) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    owners = np.searchsorted(graph.function_blocks, blocks, side="right") - 1
    for owner, address in zip(owners.tolist(), graph.block_address[blocks].tolist(), strict=True):
        result.setdefault(owner, []).append(address)
    return result


def _rounded(values: np.ndarray) -> list[float]:
    """Return shares to 4 places; what is not 1 does not become 1."""
    rounded = np.round(values.astype(np.float64), 4)
    rounded[(rounded == 1) & (values < 1)] = 0.9999
    return rounded.tolist()
