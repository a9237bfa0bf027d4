"""Read pickle files as plain values: whole, or one entry at a time.

Memory is bounded by the size of the file (about a hundredfold, as for any reader of nested values),
whatever lengths it states. There are two passes. The first finds the objects that are used again;
the second keeps only these, so `entries` can free the entries that a pickler has written together
(Python's: 1,000).
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors, reading
from tokmill.base.unpickle.inert import Budget, type_name
from tokmill.base.unpickle.opcodes import (
    CLOSING,
    END,
    FETCH,
    LINE,
    LINES,
    OTHER,
    SIGNED,
    SIZES,
    UNKNOWN,
    UNSIGNED,
    Operations,
)

ROOTS = (dict, list)
"""Types that have entries."""
MALFORMED = (
    IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError, struct.error,
)  # fmt: skip
"""Errors that an invalid program can cause."""


class Pickle:
    """A pickle file, read without running it.

    `names`: the names that it may contain in addition to those of plain values: full names, or
    modules with a dot at the end, for all names in and below them. None: any name, to inspect it.

    `load` and `entries` raise `TokmillError` if the file is damaged, cut off, or has a name that is
    not allowed, and `MachineError` if it cannot be read. `stop` is the byte after the pickle. Bytes
    that follow are refused too; with `names` None only by `check_end`.
    """

    def __init__(self, path: Path | str, names: Sequence[str] | None = ()) -> None:
        self.path = Path(path)
        self.names = None if names is None else frozenset(names)
        self.position = 0
        """Byte up to which `entries` has read."""
        self.stop = 0
        self.holds: type[Any] | None = None
        """Type of the outermost value, as far as `entries` has seen."""
        self.named: set[str] = set()
        """Names that occurred, except those of plain values."""

    def budget(self) -> Budget:
        """Return the budget of the file, for code that copies or counts its content."""
        with machine_errors("read", self.path):
            return Budget(self.path, self.path.stat().st_size)

    def check_end(self, size: int) -> None:
        """Refuse bytes after the pickle, such as another one, which would be lost."""
        if self.stop != size:
            raise TokmillError(
                f"{size - self.stop:,} bytes follow the pickle, perhaps another one",
                where=f"{self.path}, byte {self.stop:,}",
                hint="write each into a file of its own",
            )

    def load(self) -> Any:
        """Return the whole value."""
        with self._mapped() as data:
            [(_, value)] = Machine(self, data).run(streaming=False)
        return value

    def entries(self) -> Iterator[tuple[Any, Any]]:
        """Yield (key, value) of a dict or (number, value) of a list, with few at a time in memory.

        Other files are refused, perhaps only at their end.
        """
        with self._mapped() as data:
            yield from Machine(self, data).run(streaming=True)

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[mmap.mmap]:
        with reading(self.path) as handle:
            if not handle.seek(0, 2):
                raise TokmillError(
                    "the file is empty, which no pickle is",
                    where=str(self.path),
                    hint="copy the file again",
                )
            with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data


class Machine(Operations):
    """The stack machine that runs a pickle's program, over the bytes of one file."""

    def __init__(self, pickle: Pickle, data: mmap.mmap) -> None:
        super().__init__(pickle.path, data, pickle.names)
        self.pickle = pickle
        pickle.named = self.named
        self.yielded = 0

    def run(self, *, streaming: bool) -> Iterator[tuple[Any, Any]]:
        """Yield (None, the value), or with `streaming` the entries of the outermost container.

        The most frequent operations are implemented here, as a method for each would double the
        time. The others are in `operations.py`.
        """
        data, place, number = self.data, 0, 0
        uses, self.pickle.stop = self._survey()
        if self.pickle.names is not None:
            self.pickle.check_end(len(data))
        shared = len(uses)
        memo: dict[int, Any] = {}
        stack: list[Any] = []
        marks: list[list[Any]] = []
        unsigned, signed = UNSIGNED.unpack_from, SIGNED.unpack_from
        try:
            while True:
                match code := data[place]:
                    case 0x94:  # MEMOIZE
                        if number < shared and uses[number]:
                            memo[number] = stack[-1]
                        number += 1
                        place += 1
                    case 0x8C:  # SHORT_BINUNICODE
                        stop = place + 2 + data[place + 1]
                        stack.append(data[place + 2 : stop].decode("utf-8", "surrogatepass"))
                        place = stop
                    case 0x6A | 0x68:  # LONG_BINGET, BINGET
                        key = unsigned(data, place + 1)[0] if code == 0x6A else data[place + 1]
                        stack.append(memo[key])
                        # Its last use: free it.
                        if uses[key] == 1:
                            del memo[key]
                        elif uses[key] < 255:
                            uses[key] -= 1
                        place += 5 if code == 0x6A else 2
                    case 0x4A:  # BININT
                        stack.append(signed(data, place + 1)[0])
                        place += 5
                    case 0x4B:  # BININT1
                        stack.append(data[place + 1])
                        place += 2
                    case 0x28:  # MARK
                        marks.append(stack)
                        stack = []
                        place += 1
                    case 0x7D:  # EMPTY_DICT
                        stack.append({})
                        place += 1
                    case 0x86:  # TUPLE2
                        last = stack.pop()
                        stack[-1] = (stack[-1], last)
                        place += 1
                    case 0x75 | 0x65 | 0x73 | 0x61:  # SETITEMS, APPENDS, SETITEM, APPEND
                        if code in (0x75, 0x65):
                            items, stack = stack, marks.pop()
                        else:
                            first = len(stack) - (2 if code == 0x73 else 1)
                            items, stack = stack[first:], stack[:first]
                        if streaming and not marks and len(stack) == 1 and type(stack[0]) in ROOTS:
                            self.pickle.position = place
                            yield from self._entries(stack[0], items)
                        else:
                            put = self.update if code in (0x75, 0x73) else self.extend
                            put(stack[-1], items)
                        place += 1
                    case 0x5D:  # EMPTY_LIST
                        stack.append([])
                        place += 1
                    case 0x43:  # SHORT_BINBYTES
                        stop = place + 2 + data[place + 1]
                        stack.append(data[place + 2 : stop])
                        place = stop
                    case 0x4D:  # BININT2
                        stack.append(data[place + 1] | data[place + 2] << 8)
                        place += 3
                    case 0x58 | 0x42:  # BINUNICODE, BINBYTES
                        start = place + 5
                        stop = start + unsigned(data, place + 1)[0]
                        value = data[start:stop]
                        text = code == 0x58
                        stack.append(value.decode("utf-8", "surrogatepass") if text else value)
                        place = stop
                    case 0x74:  # TUPLE
                        items, stack = stack, marks.pop()
                        stack.append(tuple(items))
                        place += 1
                    case 0x85:  # TUPLE1
                        stack[-1] = (stack[-1],)
                        place += 1
                    case 0x87:  # TUPLE3
                        stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
                        place += 1
                    case 0x4E | 0x29:  # NONE, EMPTY_TUPLE
                        stack.append(None if code == 0x4E else ())
                        place += 1
                    case 0x71 | 0x72 | 0x70:  # BINPUT, LONG_BINPUT, PUT
                        key, after = self.memo_number(place)
                        if 0 <= key < shared and uses[key]:
                            memo[key] = stack[-1]
                        place = after
                    case 0x67:  # GET
                        key, place = self.memo_number(place)
                        stack.append(memo[key])
                    case 0x2E:  # STOP
                        break
                    case 0x30 if not stack:  # POP, which takes the mark where nothing lies above it
                        stack = marks.pop()
                        place += 1
                    case _ if code in CLOSING:
                        items, stack = stack, marks.pop()
                        place = CLOSING[code](self, place, items, stack)
                    case _:
                        place = OTHER[code](self, place, stack)
            value = stack.pop()
            self.pickle.holds = type(value)
            if not streaming:
                yield None, value
            elif type(value) in ROOTS:
                # Entries that were added before it was known to be the outermost container.
                yield from value.items() if type(value) is dict else enumerate(value)
            else:
                raise TokmillError(
                    f"the pickle holds a {type_name(value)}, not a dict or a list",
                    where=str(self.path),
                    hint="`tokmill inspect` shows what it holds",
                )
        except MALFORMED as error:
            why = str(error) if isinstance(error, ValueError | TypeError) else ""
            raise self.broken(place, why) from None

    def _survey(self) -> tuple[bytearray, int]:
        """Return memo number → number of uses (255: that or more), and the byte after the pickle.

        Raises `TokmillError`: an operation is unknown, or the end is missing.
        """
        data, uses, place = self.data, bytearray(), 0
        with contextlib.suppress(IndexError, struct.error):
            while True:
                size = SIZES[data[place]]
                if size > 0:
                    place += size
                elif size == FETCH:
                    key, after = self.memo_number(place)
                    # There are fewer objects than bytes.
                    if not 0 <= key < len(data):
                        raise self.broken(place)
                    if key >= len(uses):
                        more = min(len(uses), len(data) - len(uses))
                        uses.extend(bytes(max(key + 1 - len(uses), more)))
                    uses[key] += uses[key] < 255
                    place = after
                elif size in (LINE, LINES):
                    place = self.line(place + 1)[1]
                    place = place if size == LINE else self.line(place)[1]
                elif size == END:
                    return uses, place + 1
                elif size == UNKNOWN:
                    raise self.broken(place)
                else:
                    start = place + 1 - size
                    place = start + int.from_bytes(data[place + 1 : start], "little")
        raise TokmillError(
            f"the pickle is cut off: it has no end in {len(data):,} bytes",
            where=str(self.path),
            hint="its writer was killed or its copy cut off: make or fetch it again",
        )

    def _entries(self, root: Any, items: list[Any]) -> Iterator[tuple[Any, Any]]:
        self.pickle.holds = type(root)
        if type(root) is dict:
            pairs: dict[Any, Any] = {}
            self.update(pairs, items)
            yield from pairs.items()
        else:
            first = self.yielded
            self.yielded += len(items)
            yield from enumerate(items, first)
