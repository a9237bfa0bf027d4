"""Which instructions can be reached, and from which control can return.

A *run* is a sequence of instructions, each of which falls through to the next. If an instruction is
reached, the rest of its run is reached; if control can return from an instruction, it can return
from all earlier ones of its run. So both questions are answered in a few steps over runs.
"""

from __future__ import annotations

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import distinct, expand, member
from tokmill.x86.lift.decode import FALLS, Flow, Instructions


class Ways:
    """All ways (control flow edges) between decoded instructions; calls are kept separately.

    `no_return`: rows of calls that do not return. `tables`: resolved indirect jumps as pairs of
    offsets, a jump and one of its targets. R runs, W ways.
    """

    def __init__(
        self, instructions: Instructions, no_return: Array, tables: tuple[Array, Array]
    ) -> None:
        self.instructions, self.no_return = instructions, no_return
        code, start = instructions.code, instructions.start
        count = len(start)
        falls = FALLS[instructions.flow]
        falls[no_return] = False
        end = start + instructions.length
        follows = np.zeros(count, bool)
        follows[:-1] = end[:-1] == start[1:]
        # Offsets continue from one section to the next, addresses do not.
        if len(code.edge) > 2:
            follows &= ~np.isin(end, code.edge[1:-1])
        self.last = np.flatnonzero(~(falls & follows))
        """(R,) i8, the last row of each run."""
        odd = np.flatnonzero(falls & ~follows)
        at = end[odd].astype(np.int64)
        odd_target = np.where(member(at, code.edge), -1, at)
        flow = instructions.flow[instructions.transfer]
        jumps = np.isin(flow, (Flow.JUMP, Flow.BRANCH, Flow.CALL_LOCAL))
        calls = flow == Flow.CALL
        sources = [instructions.transfer[jumps], odd]
        targets = [code.offset(instructions.target[jumps]), odd_target]
        table = instructions.row(tables[0])
        sources.append(table[table >= 0])
        targets.append(tables[1][table >= 0])
        source, offset = np.concatenate(sources), np.concatenate(targets)
        order = np.argsort(source, kind="stable")
        source, offset = source[order], offset[order]
        target = instructions.row(offset)
        found = target >= 0
        self.source = source[found]
        """(W,) i8, ascending: rows with a way other than falling through."""
        self.target = target[found]
        """(W,) i8, the rows to which these ways lead."""
        self._into = np.argsort(self.target, kind="stable")
        self._ordered_target = self.target[self._into]
        self.missing_source, self.missing = source[~found], offset[~found]
        """Ways to places without an instruction: row, and offset (-1: not in code)."""
        self.call = instructions.transfer[calls]
        """(C,) i8, ascending: rows of direct calls."""
        self.callee = code.offset(code.behind_stubs(instructions.target[calls]))
        """(C,) i8, the offsets of their callees; -1: not in code."""
        # A `call` of the next instruction pushes its address and calls nothing.
        self.callee[self.callee == end[self.call]] = -1
        self.callee_row = instructions.row(self.callee)
        self.first = np.full(len(self.last), count, np.int64)
        """(R,) i8, the first reached row of each run; the number of all rows if none is reached."""
        self.called = np.zeros(0, np.int64)
        """i8, ascending: offsets of the callees of reached code."""

    def run(self, rows: Array) -> Array:
        return np.searchsorted(self.last, rows)

    def begin(self, row: int) -> int:
        """Return the first row of a row's run."""
        run = int(self.run(np.asarray(row)))
        return int(self.last[run - 1]) + 1 if run else 0

    def into(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the ways (source, target) to rows from low to high, the last target first."""
        target = self._ordered_target
        first, last = np.searchsorted(target, low), np.searchsorted(target, high, side="right")
        rows = self._into[first:last][::-1]
        return list(zip(self.source[rows].tolist(), self.target[rows].tolist(), strict=True))

    def reach(self, rows: Array) -> None:
        """Mark everything that can be reached from some rows, also through calls."""
        called = [self.called]
        while len(rows):
            rows = distinct(rows)
            run = self.run(rows)
            lowest = np.ones(len(rows), bool)
            lowest[1:] = run[1:] != run[:-1]
            lowest &= rows < self.first[run]
            rows, run = rows[lowest], run[lowest]
            before = np.minimum(self.first[run], self.last[run] + 1)
            self.first[run] = rows
            low = np.searchsorted(self.source, rows)
            ways = expand(low, np.searchsorted(self.source, before) - low)
            low = np.searchsorted(self.call, rows)
            calls = expand(low, np.searchsorted(self.call, before) - low)
            called.append(self.callee[calls])
            callee = self.callee_row[calls]
            rows = np.concatenate([self.target[ways], callee[callee >= 0]])
        found = distinct(*called)
        self.called = found[found >= 0]

    def lacking(self) -> Array:
        """Return the offsets to which reached code leads, but at which there is no instruction."""
        offsets = self.missing[self.reached(self.missing_source)]
        called = self.called[self.instructions.row(self.called) < 0]
        return distinct(offsets[offsets >= 0], called)

    def reached(self, rows: Array) -> Array:
        """Return which rows were reached: bool."""
        result: Array = rows >= self.first[self.run(rows)] if len(rows) else np.zeros(0, bool)
        return result

    def all_reached(self) -> Array:
        """Return for each row whether it was reached: (I,) bool."""
        before = np.minimum(self.first, self.last + 1)
        counts = np.empty(2 * len(self.last), np.int64)
        counts[0::2] = before
        counts[2::2] -= self.last[:-1] + 1
        counts[1::2] = self.last + 1 - before
        return np.repeat(np.arange(len(counts)) % 2 == 1, counts)

    def returning(self, rows: Array) -> Array:
        """Return which calls return, given the rows at which functions return.

        Bool, one for each of `call`. A call returns if one of `rows` can be reached from its callee
        without passing a call that does not return. A function that only returns after calling
        itself never returns.
        """
        known = np.flatnonzero((self.callee_row >= 0) & ~member(self.call, self.no_return))
        call, callee = self.call[known], self.callee_row[known]
        heads = distinct(callee)
        own = np.searchsorted(heads, call, side="right") - 1
        doubtful = (own >= 0) & (callee == heads[own]) if len(heads) else np.zeros(0, bool)
        while True:
            last, found = self._leading(rows, call[doubtful], callee[doubtful])
            lost = callee > found[np.searchsorted(last, callee)]
            if not (lost & ~doubtful).any():
                break
            doubtful |= lost
        answer = np.ones(len(self.call), bool)
        answer[known] = ~lost
        return answer

    def _leading(self, rows: Array, call: Array, callee: Array) -> tuple[Array, Array]:
        """Return from where one of `rows` can be reached, searching backwards.

        Code before one of the calls `call` counts only if the callee leads to `rows` too. The
        result is the last row of each part (runs, cut after these calls), and the last row of the
        part that leads to one of `rows`, or -1.
        """
        last = distinct(self.last, call)
        begin = np.concatenate([[0], last[:-1] + 1])
        goes_on = np.ones(len(last), bool)
        goes_on[np.searchsorted(last, self.last)] = False
        found = np.full(len(last), -1, np.int64)
        by_callee = np.argsort(callee, kind="stable")
        ordered = callee[by_callee]
        comes_back, left_behind = np.zeros(len(call), bool), np.zeros(len(call), bool)
        while len(rows):
            rows = distinct(rows)
            part = np.searchsorted(last, rows)
            highest = np.ones(len(rows), bool)
            highest[:-1] = part[1:] != part[:-1]
            highest &= rows > found[part]
            rows, part = rows[highest], part[highest]
            fresh = part[(found[part] < 0) & (part > 0)] - 1
            low = np.maximum(found[part] + 1, begin[part])
            found[part] = rows
            first = np.searchsorted(self._ordered_target, low)
            count = np.searchsorted(self._ordered_target, rows, side="right") - first
            before = self.source[self._into[expand(first, count)]]
            # The part before it, which ends in a call, falls through to it.
            before = np.concatenate([before, last[fresh[goes_on[fresh]]]])
            if len(call):
                first = np.searchsorted(ordered, low)
                count = np.searchsorted(ordered, rows, side="right") - first
                now = by_callee[expand(first, count)]
                comes_back[now] = True
                at = np.minimum(np.searchsorted(call, before), len(call) - 1)
                is_call = call[at] == before
                left_behind[at[is_call]] = True
                is_call[is_call] = ~comes_back[at[is_call]]
                before = np.concatenate([before[~is_call], call[now[left_behind[now]]]])
            rows = before
        return last, found
