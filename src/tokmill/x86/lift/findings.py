"""What is known of one program's code while it is searched: the columns that all searches read."""

from __future__ import annotations

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program
from tokmill.x86.image.ranges import distinct
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.data_uses import DataUses
from tokmill.x86.lift.decode import Instructions
from tokmill.x86.lift.gaps import Ranges
from tokmill.x86.lift.info_tables import find_info_tables
from tokmill.x86.lift.jump_tables import Tables, scaled_tables
from tokmill.x86.lift.reach import Ways


class Findings:
    """The code of one program and what was found in it; `cfg.Lifter` adds until all is found."""

    ways: Ways
    """All ways between instructions, as far as they are known."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.code = Code(program)
        self.info_tables = find_info_tables(program, self.code)
        self.code.data_begin, self.code.data_end = self.info_tables[:2]
        self.instructions = Instructions(self.code)
        self.instructions.sweep()
        self.data_uses = DataUses(self.code)
        self.ranges = Ranges(program, self.instructions)
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
        self.jumps: list[Array] = [np.zeros(0, np.int64)]
        """i8 each: offsets of resolved indirect jumps, one a target."""
        self.targets: list[Array] = [np.zeros(0, np.int64)]
        """i8 each: offsets that these jumps lead to."""
        self.computed: set[int] = set()
        """Offsets of jumps that stay in their function, though nobody knows where they lead."""
        self.pointed = (-1, np.zeros(0, np.uint64))
        """Instructions that were known, and what (u8) pointers in memory lead to with these."""
        self.cut_short: list[str] = []
        """What was not done to the end."""

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
        return np.concatenate(self.jumps), np.concatenate(self.targets)

    def functions(self) -> Array:
        """Return the offsets (i8, ascending) that are known to begin functions or their parts."""
        called = self.ways.called
        return distinct(self.starts, called[~self.ranges.inside(called)])

    def used_as_data(self) -> Array:
        """Return the offsets (i8, ascending) of unknown code that reached code uses as data."""
        return self.data_uses.find(self.code, self.ways, self.tables)

    def release(self) -> None:
        """Let go of all that only the search needs: a graph takes room, too."""
        del self.ways, self.tables, self.ranges, self.instructions
