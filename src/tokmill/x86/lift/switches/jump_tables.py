"""Jump tables: their places and the targets of their entries.

A switch becomes a table of addresses (`jmp [8 * index + table]`) or of distances from a base (`add
base, [4 * index + table]; jmp base`). The code before the jump is executed symbolically. This gives
the target of the jump as a sum, and limits of the index. The entries must lead into the function.
"""

from collections.abc import Iterator
from typing import NamedTuple

import iced_x86 as iced
import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, distinct, numbers_at
from tokmill.x86.lift.code import overwrites, retpolines
from tokmill.x86.lift.decode import Instructions
from tokmill.x86.lift.reach import Ways
from tokmill.x86.lift.switches.symbolic import Limits, Load, Path, Start, Unknown, Value

MOST_ENTRIES = 1 << 14
SHORT, LONG, LAST = 16, 64, 8
"""Instructions before the jump that are followed: at first; if these are not enough; at last."""
MOST_PATHS = 8
MOST_BASES = 32
MOST_LABELS = 4
SCALES = (2, 4, 8)
DISTANCES = (4, 2)
"""Possible sizes of entries that are distances, in bytes."""
FAR = 1 << 12
"""A constant in the index moves the address of a table by less than this."""
NO_OFFSETS = np.zeros(0, np.int64)


class Table(NamedTuple):
    """A jump table that was read."""

    address: int
    targets: Array
    """i8, offsets, each once, ascending."""
    sure: bool
    """Whether a comparison gives the number of entries, and all of them lead into the function."""
    size: int = 0
    """Bytes of the entries that were read."""
    entries: Array = NO_OFFSETS
    """i8, the offset in each entry, in order."""


class _Form(NamedTuple):
    """The place of a table, and how an entry becomes an address."""

    address: int
    scale: int
    size: int
    base: int
    """Added to each entry; 0 for entries that are addresses."""
    unknown: Unknown | None
    """The index, if it is a single unknown, whose limits may be known."""
    guessed: bool
    """Whether the base is a guess, which the entries have to confirm."""


class Tables:
    """Reads the jump tables of one program."""

    def __init__(self, program: Program, instructions: Instructions) -> None:
        self.program, self.instructions = program, instructions
        self._first_register = iced.Register.RAX
        self._mask = (1 << program.bits) - 1
        self._start: dict[int, Value] = {}
        self._table = program.global_offset_table if program.bits == 32 else 0
        if self._table and not program.fixed:
            self._start = {iced.Register.RBX: Value(self._table)}
        code, first = instructions.code, iced.Register.RAX
        registers = (code.thunk_register + first).tolist()
        self._thunks = dict(zip(code.thunk.tolist(), registers, strict=True))
        self._gates: dict[int, int] = {}
        self.computed = False
        """Whether the last jump goes to a sum with an address, so that it stays in the function."""
        self.labels: set[int] = set()
        """The addresses in such sums."""
        self._read: set[int] = set()
        self._tried: dict[tuple[object, ...], Table | None] = {}
        self.prepare()

    def prepare(self) -> None:
        """Find constants that may be addresses of tables, in all decoded instructions."""
        self.at, self.register, self.constant = constants(self.program, self.instructions)
        self._ends = distinct(self.constant)
        instructions = self.instructions
        row = np.searchsorted(instructions.transfer, instructions.gates)
        address = distinct(instructions.target[row])
        target = retpolines(instructions.code, instructions.code.offset(address))
        register = overwrites(instructions.code, target) + self._first_register
        self._gates = dict(zip(address.tolist(), register.tolist(), strict=True))

    def read(self, ways: Ways, row: int, low: int, high: int) -> Table | None:
        """Return the table of the indirect jump in `row`, with targets in low <= offset < high.

        None: the jump has no table, or it cannot be found.
        """
        best: Table | None = None
        self.computed = False
        targets: set[int] = set()
        for rows in _paths(ways, row):
            path = Path(self.program.bits, self._start, self._thunks, self._gates)
            target = path.follow(self.instructions.instructions_in(rows))
            if _no_table(target):
                return None
            if not target.terms:
                targets.add(target.number & self._mask)
            elif self.program.section_at(target.number) is not None:
                self.computed = True
                self.labels.add(target.number)
            for form in self._forms(target, row, low, high):
                result = self._entries(form, path.limits, low, high)
                if result is not None and (result.sure or result.address in self._read):
                    self._read.add(result.address)
                    return result
                if result is not None and (best is None or len(result.targets) > len(best.targets)):
                    best = result
        if best is not None:
            self._read.add(best.address)
            return best
        # There is no table, but the targets are constants before the jump.
        places = self.instructions.code.offset(np.asarray(sorted(targets), np.uint64))
        places = places[places >= 0]
        return Table(0, places, False) if len(places) else None

    def _forms(self, target: Value, row: int, low: int, high: int) -> Iterator[_Form]:
        for load, factor in target.terms:
            if not isinstance(load, Load) or factor != 1:
                continue
            scaled = [(u, f) for u, f in load.address.terms if abs(f) in SCALES]
            near = [u for u, f in load.address.terms if f == 1]
            far = [u for u, f in target.terms if u is not load and f == 1]
            if len({abs(f) for _, f in scaled}) != 1 or len(near) > 1 or len(far) > 1:
                continue
            relative = bool(far) or target.number != 0
            if load.size not in (DISTANCES if relative else (self.program.word,)):
                continue
            count = len(scaled) + len(near)
            if len(load.address.terms) != count or len(target.terms) != 1 + len(far):
                continue
            # No limits are known of an index that is a sum of unknowns or that counts down.
            single = len(scaled) == 1 and scaled[0][1] > 0
            index, scale = scaled[0] if single else (None, abs(scaled[0][1]))
            tables = self._bases(near[0], row, low, high) if near else [0]
            for base in tables:
                for other in self._far_bases(near, far, base, row, low, high):
                    address = (load.address.number + base) & self._mask
                    added = (target.number + other) & self._mask
                    yield _Form(address, scale, load.size, added, index, bool(near or far))

    def _far_bases(
        self, near: list[Unknown], far: list[Unknown], base: int, row: int, low: int, high: int
    ) -> list[int]:
        """Return possible bases of the entries of a table at `base`.

        Most often it is the table itself; if another register is added, this is a label.
        """
        if not far or near == far:
            return [base if far else 0]
        result = self._bases(far[0], row, low, high)
        if not near:
            return result
        offsets = self.instructions.code.offset(np.asarray(result, np.uint64))
        inside = (offsets >= low) & (offsets < high)
        labels = [one for one, label in zip(result, inside.tolist(), strict=True) if label]
        return labels[:MOST_LABELS]

    def _bases(self, unknown: Unknown, row: int, low: int, high: int) -> list[int]:
        """Return possible values of an unknown base, the likeliest first.

        It was loaded far from the jump. So the values are constants of the function: first those of
        the same register, then the nearest before the jump.
        """
        bases = [self._table] if self._table else []
        here = int(self.instructions.start[row])
        first, last = np.searchsorted(self.at, (low, high))
        if last - first > 4 * MOST_BASES:
            # It is a whole section, so only the neighbourhood is used.
            middle = int(np.searchsorted(self.at, here))
            first, last = max(first, middle - 2 * MOST_BASES), min(last, middle + 2 * MOST_BASES)
        rows = np.arange(first, last)
        distance = np.where(self.at[rows] <= here, here - self.at[rows], self.at[rows] - here + 1e9)
        other = np.ones(len(rows), bool)
        if isinstance(unknown, Start):
            other = self.register[rows] != unknown.register - self._first_register
        # Jumps of one function often share a table.
        fresh = np.asarray([value not in self._read for value in self.constant[rows].tolist()])
        for value in self.constant[rows[np.lexsort((distance, fresh, other))]].tolist():
            if value not in bases and self.program.section_at(value) is not None:
                bases.append(value)
        return bases[:MOST_BASES]

    def _entries(
        self, form: _Form, limits: dict[Unknown, Limits], low: int, high: int
    ) -> Table | None:
        """Read the entries of a table; without limits, up to one that leaves the function."""
        limit = _usable(limits, form.unknown)
        rows = self._inner(form.unknown, limits)
        if rows is None and limit is not None:
            rows = np.arange(limit.low, limit.high + 1)
        bounded, address = rows is not None, form.address
        # Distances are mostly relative to the beginning of their table, even if a constant is added
        # to the index.
        own = abs(address - form.base) < FAR and (
            self.program.section_at(address) is self.program.section_at(form.base)
        )
        if rows is None:
            address = form.base if own else address
            end = np.searchsorted(self._ends, np.uint64(address), side="right")
            last = int(self._ends[end]) if end < len(self._ends) else 1 << 63
            rows = np.arange(min(MOST_ENTRIES, max(0, last - address) // form.scale))
        elif own:
            rows = rows[rows * form.scale >= form.base - address]
        if not len(rows):
            return None
        key = (form, address, int(rows[0]), int(rows[-1]), len(rows), bounded, low, high)
        if key not in self._tried:
            self._tried[key] = self._entries_at(form, address, rows, bounded, low, high)
        return self._tried[key]

    def _entries_at(
        self, form: _Form, address: int, rows: Array, bounded: bool, low: int, high: int
    ) -> Table | None:
        first = (address + form.scale * int(rows[0])) & self._mask
        span = form.scale * int(rows[-1] - rows[0] + 1)
        data = self.program.read(first, span)
        places = (rows - rows[0]) * form.scale
        fits = places + form.size <= len(data)
        bounded &= bool(fits.all())
        value = numbers_at(data, places[fits], f"<i{form.size}").astype(np.uint64)
        value += np.uint64(form.base)
        value &= np.uint64(self._mask)
        offset = self.instructions.code.offset(value)
        inside = (offset >= low) & (offset < high)
        synced = self.instructions.row(offset) >= 0
        # A case may be in a part that was moved out of the function.
        likely = inside.all() if form.guessed else (inside | synced).all() and inside.any()
        if bounded and likely:
            return Table(first, distinct(offset), True, span, entries=offset)
        inside &= synced
        length = len(inside) if inside.all() else int(np.argmin(inside))
        size = form.scale * length
        offset = offset[:length]
        return Table(first, distinct(offset), False, size, entries=offset) if length > 1 else None

    def _inner(self, index: Unknown | None, limits: dict[Unknown, Limits]) -> Array | None:
        if not isinstance(index, Load) or index.size > 2 or len(index.address.terms) != 1:
            return None
        inner, scale = index.address.terms[0]
        limit = _usable(limits, inner)
        if scale != index.size or limit is None:
            return None
        count = limit.high - limit.low + 1
        first = index.address.number + scale * limit.low
        data = self.program.read(first, count * scale)
        if len(data) < count * scale:
            return None
        return distinct(data.view(f"<u{scale}")).astype(np.int64)


def _usable(limits: dict[Unknown, Limits], unknown: Unknown | None) -> Limits | None:
    result = limits.get(unknown) if unknown is not None else None
    if result is None or abs(result.low) >> 32 or not 0 <= result.high - result.low < MOST_ENTRIES:
        return None
    return result


def _no_table(target: Value) -> bool:
    """Return whether a jump goes to a pointer in a structure, so that it has no table."""
    if len(target.terms) != 1 or not isinstance(target.terms[0][0], Load):
        return False
    terms = target.terms[0][0].address.terms
    # Without terms the index is known on this path, and another path may tell more.
    return len(terms) == 1 and terms[0][1] == 1 and not isinstance(terms[0][0], Start)


def _paths(ways: Ways, row: int) -> Iterator[list[int]]:
    """Yield paths (rows) to a jump: the instructions directly before it, then over other ways."""
    begin = ways.begin(row)
    for length in (SHORT, LONG):
        yield list(range(max(begin, row - length + 1), row + 1))
    count = 0
    for source, target in ways.into(max(begin, row - LONG), row):
        before, rest = ways.begin(source), list(range(target, row + 1))
        last = list(range(max(before, source - LONG + 1), source + 1))
        yield last + rest
        count += 1
        for further, middle in ways.into(before, source)[:2] if len(last) < SHORT else ():
            start = max(ways.begin(further), further - SHORT + 1)
            yield [*range(start, further + 1), *range(middle, source + 1), *rest]
            count += 1
        if count >= MOST_PATHS:
            break
    # On each way the index may be known; directly before the jump it is not.
    yield list(range(max(begin, row - LAST + 1), row + 1))


def constants(program: Program, instructions: Instructions) -> tuple[Array, Array, Array]:
    """Return the addresses that instructions put into registers: offset (i8), register, value (u8).

    These are `lea register, [rip + distance]` and `movabs register, number`; in a program with a
    fixed address also `mov register, number`. Registers have their numbers in instructions, 0 to
    15.
    """
    data, start = instructions.code.linked, instructions.start
    first, second, third = data[start], data[start + 1], data[start + 2]
    length = instructions.length
    number = np.zeros(0, np.int64)
    rows = np.zeros(0, np.int64)
    if program.bits == 64:
        rows = np.flatnonzero(
            ((first & 0xFB) == 0x48) & (second == 0x8D) & ((third & 0xC7) == 5) & (length == 7)
        )
        number = (third[rows] >> 3 & 7) | (first[rows] & 4) << 1
    at = start[rows].astype(np.int64)
    end = at + length[rows]
    distance = numbers_at(data, end - 4, "<i4").astype(np.uint64)
    value = instructions.code.address(end - 1) + np.uint64(1) + distance
    if program.bits == 64:
        # movabs of the large code model; the loader may have relocated its number.
        wide = np.flatnonzero(((first & 0xFE) == 0x48) & ((second & 0xF8) == 0xB8) & (length == 10))
        more = start[wide].astype(np.int64)
        at = np.concatenate([at, more])
        number = np.concatenate([number, second[wide] & 7 | (first[wide] & 1) << 3])
        value = np.concatenate([value, numbers_at(data, more + 2, "<u8")])
    if program.fixed or program.kind == "relocatable":
        moved = np.flatnonzero(((first & 0xF8) == 0xB8) & (length == 5))
        more = start[moved].astype(np.int64)
        at = np.concatenate([at, more])
        number = np.concatenate([number, first[moved] & 7])
        value = np.concatenate([value, numbers_at(data, more + 1, "<u4").astype(np.uint64)])
    order = np.argsort(at, kind="stable")
    return at[order], number[order].astype(np.int64), value[order]
