"""The knowledge of a program's code during the search: columns that all searches read."""

from __future__ import annotations

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program
from tokmill.x86.image.ranges import distinct
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.data.data_uses import DataUses
from tokmill.x86.lift.decode import Instructions
from tokmill.x86.lift.gaps import Ranges
from tokmill.x86.lift.reach import Ways
from tokmill.x86.lift.switches.jump_tables import Tables


class Findings:
    """The code of a program and everything found in it so far by `cfg.Lifter`."""

    ways: Ways
    """All known ways between instructions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.code = Code(program)
        self.instructions = Instructions(self.code)
        self.instructions.sweep()
        self.data_uses = DataUses(self.code)
        self.ranges = Ranges(program, self.instructions)
        self.tables = Tables(program, self.instructions)
        self.starts = self._known_starts()
        """i8, ascending: offsets of known functions and parts of functions."""
        self.roots = distinct(self.code.offset(program.unwind.pad))
        """i8, ascending: offsets of further code within functions, such as landing pads."""
        self.found = np.zeros(0, np.int64)
        """i8, ascending: those of `starts` that the search has found."""
        self.quiet = np.zeros(0, np.int64)
        """i8, ascending: offsets of calls whose callee does not return, found by following it."""
        self.jumps: list[Array] = [np.zeros(0, np.int64)]
        """i8 each: offsets of resolved indirect jumps, one a target."""
        self.targets: list[Array] = [np.zeros(0, np.int64)]
        """i8 each: the targets of these jumps."""
        self.entries: dict[int, tuple[int, Array]] = {}
        """Address of a jump table → its bytes, and the offset (i8) in each of its entries."""
        self.computed: set[int] = set()
        """Offsets of jumps that stay in their function, but with unknown targets."""
        self.pointed = (-1, np.zeros(0, np.uint64))
        """Number of instructions, and the targets (u8) of pointers in memory that were computed
        with these."""
        self.cut_short: list[str] = []
        """Searches that were ended early."""

    def _known_starts(self) -> Array:
        program = self.program
        found = [program.function_address, program.fragments, program.starts]
        found.append(np.asarray([program.entry], np.uint64))
        offsets = self.code.offset(np.concatenate(found))
        offsets = np.concatenate([offsets, self.ranges.unwind_start])
        return distinct(offsets[offsets >= 0])

    def jump_tables(self) -> tuple[Array, Array]:
        """Return pairs of offsets: a resolved indirect jump, and one of its targets."""
        return np.concatenate(self.jumps), np.concatenate(self.targets)

    def functions(self) -> Array:
        """Return the offsets (i8, ascending) of known functions and parts of functions."""
        called = self.ways.called
        return distinct(self.starts, called[~self.ranges.inside(called)])

    def used_as_data(self) -> Array:
        """Return the offsets (i8, ascending) of unreached code that reached code uses as data."""
        return self.data_uses.find(self.code, self.ways, self.tables)

    def release(self) -> None:
        """Free everything that only the search needs, because a graph needs memory too."""
        del self.ways, self.tables, self.ranges, self.instructions
