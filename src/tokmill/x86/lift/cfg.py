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

VERSION = 15
"""Raised when the graph of some program changes."""
ROUNDS = 4096
"""Largest number of rounds. Each round finds something new, and programs need less than 100; the
limit is for programs that are made to be searched for ever."""


def packages() -> list[str]:
    """Return the packages, with versions, on which the result depends besides `VERSION`."""
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
        self.findings = Findings(program)
        self.no_return = reach.NoReturn(program)
        self._read: set[int] = set()
        self._renew()

    def lift(self) -> Graph:
        findings = self.findings
        self._follow()
        for search in (self._range_gaps, self._unnamed):
            for _ in range(ROUNDS):
                if not search():
                    break
                self._follow()
            else:
                findings.cut_short.append(f"the search for functions ended after {ROUNDS:,} rounds")
        # Only the search needs these, and blocks need memory.
        for name in ("_into", "_ordered_target", "call", "callee", "callee_row"):
            delattr(findings.ways, name)
        return assemble(findings, Blocks(findings))

    def _renew(self) -> None:
        findings, instructions = self.findings, self.findings.instructions
        # In a large program there is not enough memory for the old and the new ways.
        vars(findings).pop("ways", None)
        no_return = distinct(self.no_return.calls(instructions), instructions.row(findings.quiet))
        findings.ways = Ways(instructions, no_return, findings.jump_tables())
        fresh = reach.follow(findings.ways, self.no_return)
        if len(fresh):
            findings.quiet = distinct(findings.quiet, instructions.start[fresh].astype(np.int64))
            findings.ways.end_at(fresh)

    def _follow(self) -> None:
        while self._decode_missing() or self._read_tables():
            self._renew()

    def _decode_missing(self) -> bool:
        findings = self.findings
        offsets = distinct(findings.starts, findings.roots)
        offsets = offsets[offsets >= 0]
        rows = findings.instructions.row(offsets)
        findings.ways.reach(rows[rows >= 0])
        missing = distinct(offsets[rows < 0], findings.ways.lacking())
        if not len(missing):
            return False
        while len(missing):
            # New instructions may lead to known code that was not reached before.
            joined = findings.instructions.decode(missing)
            findings.ways.reach(findings.instructions.row(joined))
            missing = findings.ways.lacking()
            missing = missing[~findings.instructions.waits(missing)]
        self._settle()
        return True

    def _settle(self) -> None:
        findings = self.findings
        findings.instructions.settle()
        findings.tables.prepare()

    def _read_tables(self) -> bool:
        findings = self.findings
        result = False
        while (targets := self._new_targets()) is not None:
            result = True
            # The targets of a table may reach a jump with another table.
            rows = findings.instructions.row(targets)
            findings.ways.reach(rows[rows >= 0])
        return result

    def _new_targets(self) -> Array | None:
        """Read the tables of reached jumps, and return their targets; None: there was no table."""
        findings = self.findings
        rows = findings.instructions.indirect_jumps()
        rows = rows[findings.ways.reached(rows)]
        offsets = findings.instructions.start[rows].astype(np.int64)
        read = np.sort(np.fromiter(self._read, np.int64, len(self._read)))
        fresh = ~member(offsets, read)
        rows, offsets = rows[fresh], offsets[fresh]
        low, high = findings.ranges.around(offsets, findings.functions())
        targets = [np.zeros(0, np.int64)]
        for row, offset, first, end in zip(
            rows.tolist(), offsets.tolist(), low.tolist(), high.tolist(), strict=True
        ):
            self._read.add(offset)
            table = findings.tables.read(findings.ways, row, first, end)
            if table is not None:
                findings.note_table(offset, table)
                targets.append(table.targets)
            elif findings.tables.computed:
                findings.computed.add(offset)
        return np.concatenate(targets) if len(targets) > 1 else None

    def _range_gaps(self) -> bool:
        """Add unreached code in known ranges: it belongs to their functions."""
        return self._add_roots(range_gaps(self.findings.ways, self.findings.ranges))

    def _unnamed(self) -> bool:
        findings = self.findings
        hidden = hidden_starts(findings)
        if len(hidden):
            findings.instructions.decode(hidden)
            self._settle()
            self._renew()
            return True
        functions = findings.functions()
        for search in (trapped_starts, taken_starts, tail_starts, pointed_starts):
            if self._add_starts(search(findings, functions)):
                return True
        while self._add_roots(silent_gaps(findings, functions)):
            self._follow()
        return self._add_starts(gap_starts(findings, functions)) or self._add_starts(
            pointed_starts(findings, functions, doubtful=True)
        )

    def _add_starts(self, offsets: Array) -> bool:
        findings = self.findings
        more = distinct(findings.starts, offsets)
        grown = len(more) > len(findings.starts)
        findings.starts = more
        findings.discovered = distinct(findings.discovered, offsets)
        return grown

    def _add_roots(self, offsets: Array) -> bool:
        findings = self.findings
        more = distinct(findings.roots, offsets)
        grown = len(more) > len(findings.roots)
        findings.roots = more
        return grown
