"""Read pickle files as plain values: whole, or one entry at a time.

Memory is bounded by the size of the file (about a hundredfold, as for any reader of nested values),
whatever lengths it states. There are two passes. The first finds the objects that are used again;
the second keeps only these, so `entries` can free each entry.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors, reading
from tokmill.base.unpickle.inert import Budget, type_name
from tokmill.base.unpickle.opcodes import CLOSING, OTHER, SIGNED, UNSIGNED, Operations
from tokmill.base.unpickle.survey import Survey

ROOTS = (dict, list)
"""Types that have entries."""
NONE: array[int] = array("Q")
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
        """Yield (key, value) of a dict or (number, value) of a list, with few in memory.

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
        self.batch, self.taken = NONE, 0
        """For the outermost run of entries: where each object is complete, and how many were
        taken."""

    def run(self, *, streaming: bool) -> Iterator[tuple[Any, Any]]:
        """Yield (None, the value), or with `streaming` the entries of the outermost container.

        The most frequent operations are implemented here, as a method for each would double the
        time. The others are in `operations.py`.
        """
        data, place, number = self.data, 0, 0
        survey = Survey(self, levels=streaming)
        self.pickle.stop = survey.stop
        if self.pickle.names is not None:
            self.pickle.check_end(len(data))
        uses, shared = survey.uses, len(survey.uses)
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
                        if not marks:
                            self.batch, self.taken = survey.batches.get(place, NONE), 0
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
                    case 0x75 | 0x65:  # SETITEMS, APPENDS
                        items, stack = stack, marks.pop()
                        put = self.update if code == 0x75 else self.extend
                        if streaming and len(marks) < 2:
                            self.pickle.position = place
                            yield from self._outer(put, items, stack, marks)
                        else:
                            put(stack[-1], items)
                        place += 1
                    case 0x73 | 0x61:  # SETITEM, APPEND
                        first = len(stack) - (2 if code == 0x73 else 1)
                        items = stack[first:]
                        del stack[first:]
                        put = self.update if code == 0x73 else self.extend
                        if streaming and len(marks) < 2:
                            self.pickle.position = place
                            yield from self._outer(put, items, stack, marks)
                        else:
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

    def _outer(
        self,
        put: Callable[[Any, list[Any]], None],
        items: list[Any],
        stack: list[Any],
        marks: list[list[Any]],
    ) -> Iterator[tuple[Any, Any]]:
        if not marks and len(stack) == 1 and type(stack[0]) in ROOTS:
            yield from self._entries(stack[0], items)
            return
        put(stack[-1], items)
        if marks and len(marks[0]) == 1 and type(root := marks[0][0]) in ROOTS:
            whole = bisect.bisect_right(self.batch, self.pickle.position) - self.taken
            whole -= whole % 2 if type(root) is dict else 0
            items = stack[:whole]
            del stack[:whole]
            self.taken += whole
            yield from self._entries(root, items)

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
