"""The native lifter: functions, blocks and edges of a program, from its bytes.

All code is decoded once, from the beginning of each section to its end; then control is followed
from what is known to be a function, in columns. What is reached at places that the first pass did
not see as instructions is decoded too. Then calls that do not come back are taken out, jump tables
read, and code that nothing leads to is looked for, until nothing new is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import Program
from tokmill.x86.image.program import open_program
from tokmill.x86.image.ranges import distinct, member
from tokmill.x86.lift import noreturn
from tokmill.x86.lift.blocks import Blocks
from tokmill.x86.lift.data_uses import DataUses
from tokmill.x86.lift.decode import Code, Instructions
from tokmill.x86.lift.functions import assemble
from tokmill.x86.lift.gaps import Ranges, range_gaps
from tokmill.x86.lift.info_tables import (
    find_info_tables,
    in_haskell,
    through_registers,
    through_tables,
)
from tokmill.x86.lift.jump_tables import Tables, indirect_jumps, scaled_tables
from tokmill.x86.lift.reach import Ways
from tokmill.x86.lift.starts import (
    gap_starts,
    hidden_starts,
    pointed_starts,
    silent_gaps,
    tail_starts,
    taken_starts,
    trapped_starts,
)
from tokmill.x86.lift.windows import WINDOWED, called, is_cut, joined, windows

VERSION = 6
"""Raised when the graph of some program changes."""
ROUNDS = 4096
"""Each round finds something new, and programs need less than 100; one that was made to be
searched for ever must not be."""


def packages() -> list[str]:
    """Return the packages that decide what is found beside `VERSION`, each with its version."""
    # Imported here, as it takes a tenth of the memory that lifting a small program does.
    import importlib.metadata

    return [f"{name} {importlib.metadata.version(name)}" for name in ("iced-x86", "lief")]


def lift(program: Program | Path | str) -> Graph:
    """Return the control flow of a program.

    Raises `TokmillError` for what is no x86 program (see `open_program`).
    """
    return joined(list(lift_windows(program)))


def lift_windows(program: Program | Path | str) -> Iterator[Graph]:
    """Yield the graphs of a program's windows, by address: of one that is not very large, its own.

    Raises as `lift`.
    """
    if not isinstance(program, Program):
        program = open_program(program)
    known = program.starts
    for window in windows(program):
        window.starts = known
        graph = Lifter(window).lift()
        if is_cut(program):
            graph.cut_short = (*graph.cut_short, WINDOWED)
        known = distinct(known, called(graph))
        yield graph
        # The next window takes the room of this one.
        del graph


class Lifter:
    """Finds the code of one program; `lift` does it all."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.code = Code(program)
        self.info_tables = find_info_tables(program, self.code)
        self.code.data_begin, self.code.data_end = self.info_tables[:2]
        self.instructions = Instructions(self.code)
        self.instructions.sweep()
        self.data_uses = DataUses(self.code)
        self.ranges = Ranges(program, self.instructions)
        self.no_return = noreturn.NoReturn(program)
        self.tables = Tables(program, self.instructions)
        if len(self.info_tables.end):
            # Jump tables of GHC lie side by side, and have no limit where all cases are there.
            self.tables.note(scaled_tables(self.instructions))
        self.starts = self._known_starts()
        """i8, ascending: offsets of functions (and of their parts) that tables name."""
        self.roots = distinct(self.code.offset(program.unwind.pad), self.info_tables.inner)
        """i8, ascending: offsets of further code that is part of a function: landing pads."""
        self.found = self.info_tables.function
        """i8, ascending: those of `starts` that no table named."""
        self.no_entries = np.zeros(0, np.int64)
        """i8, ascending: offsets that looked like a beginning, and code behind them more so."""
        self.quiet = np.zeros(0, np.int64)
        """i8, ascending: offsets of calls that were found not to come back by following them."""
        self._jumps: list[Array] = [np.zeros(0, np.int64)]
        self._targets: list[Array] = [np.zeros(0, np.int64)]
        self._read: set[int] = set()
        self.computed: set[int] = set()
        """Offsets of jumps that stay in their function, though nobody knows where they lead."""
        self.pointed = (-1, np.zeros(0, np.uint64))
        """Instructions that were known, and what (u8) pointers in memory lead to with these."""
        self.cut_short: list[str] = []
        """What was not done to the end."""
        self._renew()

    def lift(self) -> Graph:
        """Return the graph."""
        self._follow()
        for search in (self._range_gaps, self._unnamed):
            for _ in range(ROUNDS):
                if not search():
                    break
                self._follow()
            else:
                self.cut_short.append(f"the search for functions ended after {ROUNDS:,} rounds")
        return assemble(self, Blocks(self))

    def release(self) -> None:
        """Let go of all that only the search needs: a graph takes room, too."""
        del self.ways, self.tables, self.ranges, self.instructions

    def _known_starts(self) -> Array:
        program = self.program
        found = [program.function_address, program.fragments, program.starts]
        found.append(np.asarray([program.entry], np.uint64))
        offsets = self.code.offset(np.concatenate(found))
        named = [self.ranges.unwind_start, self.info_tables.function]
        offsets = np.concatenate([offsets, *named])
        return distinct(offsets[offsets >= 0])

    def jump_tables(self) -> tuple[Array, Array]:
        """Return the offsets of resolved indirect jumps and of their targets, a pair a target."""
        return np.concatenate(self._jumps), np.concatenate(self._targets)

    def _renew(self) -> None:
        """Find all ways, again after an instruction or a jump table was found."""
        self._find_ways()
        fresh = noreturn.follow(self.ways, self.no_return)
        if len(fresh):
            self.quiet = distinct(self.quiet, self.instructions.start[fresh].astype(np.int64))
            self._find_ways()

    def _find_ways(self) -> None:
        # In a large program there is no room for the old ones beside the new.
        vars(self).pop("ways", None)
        no_return = self.no_return.calls(self.instructions)
        no_return = distinct(no_return, self.instructions.row(self.quiet))
        self.ways = Ways(self.instructions, no_return, self.jump_tables())

    def _follow(self) -> None:
        """Follow control flow from all starts, until nothing is missing and all tables are read."""
        while self._decode_missing() or self._read_tables():
            self._renew()

    def _decode_missing(self) -> bool:
        """Reach what can be reached, and decode where that is more than was decoded."""
        offsets = distinct(self.starts, self.roots)
        offsets = offsets[offsets >= 0]
        rows = self.instructions.row(offsets)
        self.ways.reach(rows[rows >= 0])
        missing = distinct(offsets[rows < 0], self.ways.lacking())
        if not len(missing):
            return False
        while len(missing):
            # What is found may lead on to known code that was not reached before.
            joined = self.instructions.decode(missing)
            self.ways.reach(self.instructions.row(joined))
            missing = self.ways.lacking()
            missing = missing[~self.instructions.waits(missing)]
        self._settle()
        return True

    def _settle(self) -> None:
        self.instructions.settle()
        self.tables.prepare()

    def functions(self) -> Array:
        """Return the offsets (i8, ascending) that are known to begin functions or their parts."""
        called = self.ways.called
        return distinct(self.starts, called[~self.ranges.inside(called)])

    def _read_tables(self) -> bool:
        """Read the tables of all indirect jumps that can be reached and were not read before."""
        found = False
        targets = self._new_targets()
        while targets is not None:
            found = True
            # What one table leads to may go through another.
            rows = self.instructions.row(targets)
            self.ways.reach(rows[rows >= 0])
            targets = self._new_targets()
        return found

    def _new_targets(self) -> Array | None:
        """Read the tables of jumps that were reached, and return where they lead; None if none."""
        rows = indirect_jumps(self.instructions)
        rows = rows[self.ways.reached(rows)]
        offsets = self.instructions.start[rows].astype(np.int64)
        read = np.sort(np.fromiter(self._read, np.int64, len(self._read)))
        fresh = ~member(offsets, read)
        rows, offsets = rows[fresh], offsets[fresh]
        functions = self.functions()
        mine = in_haskell(self.info_tables, functions, offsets)
        plain = mine & through_registers(self.code, offsets)
        self._read.update(offsets[plain].tolist())
        tabled = set(offsets[mine & through_tables(self.code, offsets)].tolist())
        rows, offsets = rows[~plain], offsets[~plain]
        low, high = self.ranges.around(offsets, functions)
        found = [np.zeros(0, np.int64)]
        for row, offset, first, end in zip(
            rows.tolist(), offsets.tolist(), low.tolist(), high.tolist(), strict=True
        ):
            self._read.add(offset)
            table = self.tables.read(self.ways, row, first, end)
            if table is not None:
                self._jumps.append(np.full(len(table.targets), offset))
                self._targets.append(table.targets)
                found.append(table.targets)
                self._add_roots(table.others)
                self._note_data(table.address, table.size)
            elif self.tables.computed or offset in tabled:
                self.computed.add(offset)
        return np.concatenate(found) if len(found) > 1 else None

    def _note_data(self, address: int, size: int) -> None:
        """Take a table that lies between code for data."""
        begin = self.code.offset(np.asarray([address], np.uint64))
        if size and begin[0] >= 0:
            self.code.add_data(begin, begin + size)

    def _range_gaps(self) -> bool:
        """Take code of known ranges that nothing leads to: it is there for a reason."""
        return self._add_roots(range_gaps(self.ways, self.ranges))

    def _unnamed(self) -> bool:
        """Look for functions outside the ranges that tables describe."""
        hidden = hidden_starts(self)
        if len(hidden):
            self.instructions.decode(hidden)
            self._settle()
            self._renew()
            return True
        functions = self.functions()
        for search in (trapped_starts, taken_starts, tail_starts, pointed_starts):
            if self._add_starts(search(self, functions)):
                return True
        while self._add_roots(silent_gaps(self, functions)):
            self._follow()
        return self._add_starts(gap_starts(self, functions)) or self._add_starts(
            pointed_starts(self, functions, doubtful=True)
        )

    def _add_starts(self, offsets: Array) -> bool:
        more = distinct(self.starts, offsets)
        grown = len(more) > len(self.starts)
        self.starts = more
        self.found = distinct(self.found, offsets)
        return grown

    def _add_roots(self, offsets: Array) -> bool:
        more = distinct(self.roots, offsets)
        grown = len(more) > len(self.roots)
        self.roots = more
        return grown
