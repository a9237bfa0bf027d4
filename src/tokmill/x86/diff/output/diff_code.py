"""Functions of two programs as text, side by side, for the page of a diff."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import one_line
from tokmill.store.schema import Array
from tokmill.x86.diff.result import Diff
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.program import demangle
from tokmill.x86.tokens.instructions import intel

if TYPE_CHECKING:
    from iced_x86 import Instruction

LONGEST_NAME = 300
LONGEST_STRING = 80
MOST_STRINGS = 8
"""Most strings of one block that are shown."""
EXACT = 2000
"""The shortest difference is looked for in pairs of blocks with at most so many instructions."""
SAME, CHANGED, ALONE = "=", "~", "!"
"""Marks of instructions: the same in both, with other operands, without a counterpart."""
BLOCK = "\0"
"""Stands in a key before the number of a block: no name that is shown has it."""
RIP = re.compile(r"rip[+-]0x[0-9a-f]+")
FLOW = (Edge.FALL, Edge.JUMP, Edge.BRANCH, Edge.INDIRECT)


class Block(msgspec.Struct, array_like=True):
    """A block as the page shows it: in JSON a list of its fields."""

    address: str
    """Address, hexadecimal."""
    text: list[str]
    """One instruction on each line."""
    marks: str
    """One mark for each instruction; "" if all are the same in both."""
    partner: int
    """Number of the block on the other side; -1 for none."""
    edges: list[tuple[int, int]]
    """Number of the next block in this function, and the kind of the `Edge`."""
    strings: list[str]


class Code(msgspec.Struct, array_like=True):
    """The blocks of a function on both sides; `b` is empty if they are the same."""

    a: list[Block]
    b: list[Block]


def shown(text: str, most: int) -> str:
    """Return text of a program that is safe to show: no control characters, and cut off."""
    line = one_line(text[: most + 1])
    return line[: most - 1] + "…" if len(line) > most else line


def names_of(graph: Graph) -> list[str]:
    names = graph.names(range(len(graph.function_name)))
    return [shown(name, LONGEST_NAME) for name in demangle(names)]


class Listing:
    """The text of one program's functions, with names in place of the addresses of calls."""

    def __init__(self, graph: Graph, names: list[str], match: Array) -> None:
        """`match` (F,) i8: the number of each function's match; -1 for none."""
        self.graph, self.names = graph, names
        self.other_texts: dict[int, str] = {}
        """Address of an instruction of the function that is shown, with an operand that refers to
        something else than its counterpart → to what, in words."""
        # Targets of calls: the text that is shown, and the key by which they are compared.
        self.targets = {
            address: (names[number], f"match {match[number]}" if match[number] >= 0 else "alone")
            for number, address in enumerate(graph.function_address.tolist())
        }
        for address, name in zip(graph.import_address.tolist(), graph.import_name, strict=True):
            text = shown(name, LONGEST_NAME)
            self.targets[address] = (text, f"import {text}")

    @cached_property
    def _strings(self) -> list[str]:
        return [shown(text, LONGEST_STRING) for text in self.graph.strings]

    def blocks(self, function: int) -> range:
        bounds = self.graph.function_blocks
        return range(int(bounds[function]), int(bounds[function + 1]))

    def size(self, function: int) -> int:
        inside = self.blocks(function)
        bounds = self.graph.block_instructions
        return int(bounds[inside.stop] - bounds[inside.start])

    def block(self, number: int, places: dict[int, int], partner: int) -> tuple[Block, list[str]]:
        """Return a block, and the keys by which its instructions are compared.

        `places`: address → number in the function. A jump is compared by its target: by the number
        of the partner of that block, which the caller puts in.
        """
        graph = self.graph
        text, keys = [], []
        for instruction in self._instructions(number):
            line, key = self._line(instruction, places)
            text.append(line)
            keys.append(key)
        ways = slice(int(graph.block_edges[number]), int(graph.block_edges[number + 1]))
        ends = zip(graph.edge_target[ways].tolist(), graph.edge_kind[ways].tolist(), strict=True)
        edges = [(places[at], kind) for at, kind in ends if kind in FLOW and at in places]
        named = slice(int(graph.block_strings[number]), int(graph.block_strings[number + 1]))
        strings = [self._strings[one] for one in graph.string[named][:MOST_STRINGS].tolist()]
        address = f"{int(graph.block_address[number]):x}"
        return Block(address, text, "", partner, sorted(set(edges)), strings), keys

    def _instructions(self, number: int) -> Iterator[Instruction]:
        graph, iced = self.graph, plugins.require("iced_x86")
        low, high = int(graph.block_bytes[number]), int(graph.block_bytes[number + 1])
        bits: Literal[32, 64] = 64 if graph.bits == 64 else 32
        code = graph.code[low:high].tobytes()
        yield from iced.Decoder(bits, code, ip=int(graph.block_address[number]))

    def _line(self, instruction: Instruction, places: dict[int, int]) -> tuple[str, str]:
        formatter = intel()
        mnemonic = formatter.format_mnemonic(instruction)
        operands = formatter.format_all_operands(instruction)
        key = RIP.sub("rip", operands)
        target = instruction.near_branch_target
        if target:
            if target in places and not instruction.is_call_near:
                operands, key = f"→ {places[target]}", f"{BLOCK}{places[target]}"
            else:
                operands, key = self.targets.get(target, (operands, "elsewhere"))
        elif instruction.is_ip_rel_memory_operand:
            at = instruction.ip_rel_memory_address
            if at in self.targets:
                operands, key = f"{operands}  ; {self.targets[at][0]}", self.targets[at][1]
        if other := self.other_texts.get(instruction.ip):
            operands += "" if other in operands else f"  ; {other}"
            key += f" of {id(self)}"
        return f"{mnemonic} {operands}".rstrip(), f"{mnemonic} {key}"


class SideBySide:
    """Pairs of functions of a diff as `Code`."""

    def __init__(self, a: Graph, b: Graph, diff: Diff) -> None:
        self.diff = diff
        self.a = Listing(a, names_of(a), _matches(len(a.function_address), diff.function_a))
        self.b = Listing(b, names_of(b), _matches(len(b.function_address), diff.function_b))

    def match(self, number: int) -> Code:
        """Return both functions of a match, with marks on what changed."""
        diff = self.diff
        pairs = slice(int(diff.match_blocks[number]), int(diff.match_blocks[number + 1]))
        one, other = int(diff.function_a[number]), int(diff.function_b[number])
        start_a, start_b = self.a.blocks(one).start, self.b.blocks(other).start
        there = (diff.block_a[pairs] - start_a).tolist(), (diff.block_b[pairs] - start_b).tolist()
        to_b = dict(zip(*there, strict=True))
        if diff.similarity[number] == 1:
            return Code([block for block, _ in _function(self.a, one, to_b)], [])
        to_a = {b: a for a, b in to_b.items()}
        refs = diff.references
        rows = slice(*np.searchsorted(refs.match, [number, number + 1]).tolist())
        for listing, places, texts in ((self.a, refs.a, refs.old), (self.b, refs.b, refs.new)):
            words = (shown(text, LONGEST_STRING) for text in texts[rows])
            listing.other_texts = dict(zip(places[rows].tolist(), words, strict=True))
        code_a, code_b = _function(self.a, one, to_b), _function(self.b, other, to_a)
        same = (diff.block_similarity[pairs] == 1).tolist()
        for a, b, unchanged in zip(*there, same, strict=True):
            if unchanged:
                continue
            (block_a, keys_a), (block_b, keys_b) = code_a[a], code_b[b]
            # Targets of jumps are block numbers; on the other side, those of the partners.
            keys_b = [_jump(key, to_a) for key in keys_b]
            block_a.marks, block_b.marks = marks(keys_a, keys_b)
        self.a.other_texts = self.b.other_texts = {}
        for side in (code_a, code_b):
            for block, keys in side:
                if block.partner < 0:
                    block.marks = ALONE * len(keys)
        return Code([block for block, _ in code_a], [block for block, _ in code_b])

    def alone(self, side: Literal["a", "b"], function: int) -> Code:
        listing = self.a if side == "a" else self.b
        blocks = [block for block, _ in _function(listing, function, {})]
        return Code(blocks, []) if side == "a" else Code([], blocks)


def _function(
    listing: Listing, function: int, partners: dict[int, int]
) -> list[tuple[Block, list[str]]]:
    inside = listing.blocks(function)
    addresses = listing.graph.block_address[inside.start : inside.stop].tolist()
    places = {address: number for number, address in enumerate(addresses)}
    return [
        listing.block(number, places, partners.get(place, -1))
        for place, number in enumerate(inside)
    ]


def _jump(key: str, partners: dict[int, int]) -> str:
    mnemonic, mark, rest = key.partition(BLOCK)
    number, *other = rest.split(" ", 1)
    return " ".join([f"{mnemonic}{BLOCK}{partners.get(int(number), -1)}", *other]) if mark else key


def _matches(functions: int, matched: Array) -> Array:
    result = np.full(functions, -1, np.int64)
    result[matched] = np.arange(len(matched))
    return result


def marks(a: list[str], b: list[str]) -> tuple[str, str]:
    """Return a mark for each instruction of two blocks, given by their keys.

    Instructions that are `SAME` or `CHANGED` have their counterparts on the other side in the same
    order. Both texts are "" if all instructions are the same.
    """
    if a == b:
        return "", ""
    one, other = [ALONE] * len(a), [ALONE] * len(b)
    short = len(a) + len(b) <= EXACT
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=not short)
    for what, low_a, high_a, low_b, high_b in matcher.get_opcodes():
        if what == "equal":
            one[low_a:high_a] = other[low_b:high_b] = SAME * (high_a - low_a)
        elif what == "replace":
            _operands(a, b, range(low_a, high_a), range(low_b, high_b), one, other)
    return "".join(one), "".join(other)


def _operands(
    a: list[str], b: list[str], in_a: range, in_b: range, one: list[str], other: list[str]
) -> None:
    verbs_a = [a[i].partition(" ")[0] for i in in_a]
    verbs_b = [b[i].partition(" ")[0] for i in in_b]
    matcher = difflib.SequenceMatcher(None, verbs_a, verbs_b, autojunk=len(in_a) > EXACT)
    for place_a, place_b, size in matcher.get_matching_blocks():
        for step in range(size):
            one[in_a[place_a + step]] = other[in_b[place_b + step]] = CHANGED
