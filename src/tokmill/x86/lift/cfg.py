"""The native lifter: functions, blocks and edges of a program, from its bytes.

First all code is decoded linearly, from the beginning of each section to its end. Then control flow
is followed from known functions, in columns. If it reaches places at which the linear pass found no
instruction, these are decoded too. Then calls that do not return are removed from the control flow,
jump tables are read, and unreached code is searched for functions, until nothing new is found.
"""

from pathlib import Path

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import Program, distinct, member
from tokmill.x86.image.program import open_program
from tokmill.x86.lift import reach
from tokmill.x86.lift.assign_functions import assemble
from tokmill.x86.lift.blocks import Blocks
from tokmill.x86.lift.findings import Findings
from tokmill.x86.lift.reach import Ways
from tokmill.x86.lift.starts import (
    gap_starts,
    hidden_starts,
    pointed_starts,
    range_gaps,
    silent_gaps,
    tail_starts,
    taken_starts,
    trapped_starts,
)

VERSION = 12
"""Raised when the graph of some program changes."""
ROUNDS = 4096
"""Largest number of rounds. Each round finds something new, and programs need less than 100; the
limit is for programs that are made to be searched for ever."""


def packages() -> list[str]:
    """Return the packages, with versions, on which the result depends beside `VERSION`."""
    # Imported here, because it takes a tenth of the memory for lifting a small program.
    import importlib.metadata

    return [f"{name} {importlib.metadata.version(name)}" for name in ("iced-x86", "lief")]


def lift(program: Program | Path | str, *, facts: bool = False) -> Graph:
    """Return the control flow of a program; with `facts` also imports, strings and constants.

    Raises `TokmillError` for a file that is no x86 program (see `open_program`).
    """
    if not isinstance(program, Program):
        program = open_program(program)
    graph = Lifter(program).lift()
    if facts:
        from tokmill.x86.lift.data.block_facts import add_facts

        add_facts(graph, program)
    return graph


class Lifter:
    """Finds the code of one program with `lift`."""

    def __init__(self, program: Program) -> None:
        self.known = Findings(program)
        self.no_return = reach.NoReturn(program)
        self._read: set[int] = set()
        self._renew()

    def lift(self) -> Graph:
        known = self.known
        self._follow()
        for search in (self._range_gaps, self._unnamed):
            for _ in range(ROUNDS):
                if not search():
                    break
                self._follow()
            else:
                known.cut_short.append(f"the search for functions ended after {ROUNDS:,} rounds")
        return assemble(known, Blocks(known))

    def _renew(self) -> None:
        """Find all ways again, after instructions or jump tables were found."""
        known = self.known
        self._find_ways()
        fresh = reach.follow(known.ways, self.no_return)
        if len(fresh):
            known.quiet = distinct(known.quiet, known.instructions.start[fresh].astype(np.int64))
            self._find_ways()

    def _find_ways(self) -> None:
        known = self.known
        # In a large program there is not enough memory for the old and the new ways.
        vars(known).pop("ways", None)
        no_return = self.no_return.calls(known.instructions)
        no_return = distinct(no_return, known.instructions.row(known.quiet))
        known.ways = Ways(known.instructions, no_return, known.jump_tables())

    def _follow(self) -> None:
        """Follow control flow from all starts; decode what is missing, and read all tables."""
        while self._decode_missing() or self._read_tables():
            self._renew()

    def _decode_missing(self) -> bool:
        """Follow control flow, and decode code that it reaches; return whether there was some."""
        known = self.known
        offsets = distinct(known.starts, known.roots)
        offsets = offsets[offsets >= 0]
        rows = known.instructions.row(offsets)
        known.ways.reach(rows[rows >= 0])
        missing = distinct(offsets[rows < 0], known.ways.lacking())
        if not len(missing):
            return False
        while len(missing):
            # New instructions may lead to known code that was not reached before.
            joined = known.instructions.decode(missing)
            known.ways.reach(known.instructions.row(joined))
            missing = known.ways.lacking()
            missing = missing[~known.instructions.waits(missing)]
        self._settle()
        return True

    def _settle(self) -> None:
        known = self.known
        known.instructions.settle()
        known.tables.prepare()

    def _read_tables(self) -> bool:
        known = self.known
        result = False
        targets = self._new_targets()
        while targets is not None:
            result = True
            # The targets of a table may reach a jump with another table.
            rows = known.instructions.row(targets)
            known.ways.reach(rows[rows >= 0])
            targets = self._new_targets()
        return result

    def _new_targets(self) -> Array | None:
        """Read the tables of reached jumps, and return their targets; None: there was no table."""
        known = self.known
        rows = known.instructions.indirect_jumps()
        rows = rows[known.ways.reached(rows)]
        offsets = known.instructions.start[rows].astype(np.int64)
        read = np.sort(np.fromiter(self._read, np.int64, len(self._read)))
        fresh = ~member(offsets, read)
        rows, offsets = rows[fresh], offsets[fresh]
        low, high = known.ranges.around(offsets, known.functions())
        found = [np.zeros(0, np.int64)]
        for row, offset, first, end in zip(
            rows.tolist(), offsets.tolist(), low.tolist(), high.tolist(), strict=True
        ):
            self._read.add(offset)
            table = known.tables.read(known.ways, row, first, end)
            if table is not None:
                known.note_table(offset, table)
                found.append(table.targets)
            elif known.tables.computed:
                known.computed.add(offset)
        return np.concatenate(found) if len(found) > 1 else None

    def _range_gaps(self) -> bool:
        """Add unreached code in known ranges: it belongs to their functions."""
        known = self.known
        return self._add_roots(range_gaps(known.ways, known.ranges))

    def _unnamed(self) -> bool:
        """Search for functions outside of the ranges that tables describe."""
        known = self.known
        hidden = hidden_starts(known)
        if len(hidden):
            known.instructions.decode(hidden)
            self._settle()
            self._renew()
            return True
        functions = known.functions()
        for search in (trapped_starts, taken_starts, tail_starts, pointed_starts):
            if self._add_starts(search(known, functions)):
                return True
        while self._add_roots(silent_gaps(known, functions)):
            self._follow()
        return self._add_starts(gap_starts(known, functions)) or self._add_starts(
            pointed_starts(known, functions, doubtful=True)
        )

    def _add_starts(self, offsets: Array) -> bool:
        known = self.known
        more = distinct(known.starts, offsets)
        grown = len(more) > len(known.starts)
        known.starts = more
        known.found = distinct(known.found, offsets)
        return grown

    def _add_roots(self, offsets: Array) -> bool:
        known = self.known
        more = distinct(known.roots, offsets)
        grown = len(more) > len(known.roots)
        known.roots = more
        return grown
