"""The first pass over a pickle: which objects are used again, and where entries are complete."""

from __future__ import annotations

import contextlib
import pickletools
import struct
from array import array

from tokmill.base.errors import TokmillError
from tokmill.base.unpickle.opcodes import (
    CODES,
    END,
    FETCH,
    LINE,
    LINES,
    SIZES,
    UNKNOWN,
    UNSIGNED,
    Operations,
)

MARK = CODES["MARK"]
CLOSERS = {
    CODES[name]: pushes
    for names, pushes in {
        "TUPLE LIST DICT FROZENSET OBJ INST": True,
        "APPENDS SETITEMS ADDITEMS POP_MARK": False,
    }.items()
    for name in names.split()
}
"""Operation that ends at a mark → whether it makes an object (else it adds items to one)."""
BATCHES = {CODES["APPENDS"], CODES["SETITEMS"]}
EFFECTS = {
    ord(opcode.code): (len(opcode.stack_before), len(opcode.stack_after))
    for opcode in pickletools.opcodes
}
"""Operation → number of objects that it takes from the stack, and puts on it."""

LEVEL = -20
DEEP = [LEVEL if code in {MARK, CODES["POP"], *CLOSERS} else SIZES[code] for code in range(256)]
"""Sizes inside of entries, where only marks and the operations that end at them matter."""
SHALLOW = [size if size in (END, UNKNOWN) else LEVEL for size in SIZES]
"""Sizes in the outermost container itself, where every operation matters."""


class Survey:
    """The result of reading a pickle's operations without executing them.

    Attributes:
        uses: memo number → number of uses (255: that or more).
        stop: the byte after the pickle.
        batches: for each outermost run of entries, the byte of its mark → for each object in it
            the byte of the last operation on it, ascending. Empty without `levels`.

    Raises:
        TokmillError: an operation is unknown, or the end is missing.
    """

    def __init__(self, operations: Operations, *, levels: bool) -> None:
        self.operations, self.data = operations, operations.data
        self.uses = bytearray()
        self.batches: dict[int, array[int]] = {}
        self.stop = 0
        self._depth, self._mark = 0, 0
        self._objects: array[int] = array("Q")
        self._levels = levels
        with contextlib.suppress(IndexError, struct.error):
            self._run()
        if not self.stop:
            raise TokmillError(
                f"the pickle is cut off: it has no end in {len(self.data):,} bytes",
                where=str(operations.path),
                hint="its writer was killed or its copy cut off: make or fetch it again",
            )

    def _run(self) -> None:
        data, place = self.data, 0
        sizes = SHALLOW if self._levels else SIZES
        while True:
            size = sizes[data[place]]
            if size > 0:
                place += size
            elif size == -1:
                place += 2 + data[place + 1]
            elif size == FETCH:
                place = self._fetch(place)
            elif size == LEVEL:
                after = self._behind(place)
                self._level(place)
                sizes = SHALLOW if self._depth < 2 and self._levels else DEEP
                place = after
            elif size == END:
                self.stop = place + 1
                return
            elif size == UNKNOWN:
                raise self.operations.broken(place)
            else:
                place = self._behind(place)

    def _behind(self, place: int) -> int:
        """Return the byte after an operation, and count the memo number that it uses."""
        data, size = self.data, SIZES[self.data[place]]
        if size > 0:
            return place + size
        if size == FETCH:
            return self._fetch(place)
        if size in (LINE, LINES):
            after = self.operations.line(place + 1)[1]
            return after if size == LINE else self.operations.line(after)[1]
        start = place + 1 - size
        return start + int.from_bytes(data[place + 1 : start], "little")

    def _fetch(self, place: int) -> int:
        data, uses = self.data, self.uses
        if data[place] == 0x6A:  # LONG_BINGET
            key, after = UNSIGNED.unpack_from(data, place + 1)[0], place + 5
        else:
            key, after = self.operations.memo_number(place)
        # There are fewer objects than bytes.
        if not 0 <= key < len(data):
            raise self.operations.broken(place)
        if key >= len(uses):
            more = min(len(uses), len(data) - len(uses))
            uses.extend(bytes(max(key + 1 - len(uses), more)))
        uses[key] += uses[key] < 255
        return after

    def _level(self, place: int) -> None:
        """Track the depth, and in the outermost container the objects on the stack."""
        code, objects = self.data[place], self._objects
        if code == MARK:
            self._depth += 1
            if self._depth == 1:
                self._mark, self._objects = place, array("Q")
        elif code in CLOSERS:
            self._depth -= 1
            if self._depth == 0 and code in BATCHES:
                self.batches[self._mark] = objects
            elif self._depth == 1 and CLOSERS[code]:
                objects.append(place)
            elif self._depth == 1 and objects:
                objects[-1] = place
        elif self._depth == 1:
            takes, puts = EFFECTS[code]
            del objects[len(objects) - min(takes, len(objects)) :]
            objects.extend([place] * puts)
        if code == CODES["POP"]:
            # It may remove a mark, which only the second pass can follow. No pickler writes this.
            self._levels, self._depth = False, 2
            self.batches.clear()
