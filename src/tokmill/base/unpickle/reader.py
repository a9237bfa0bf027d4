"""Read pickle files as plain values: whole, or one entry at a time.

Memory is bounded by the size of the file (about a hundredfold, as for any reader of nested values),
whatever lengths it states. There are two passes. The first finds the objects that are used again;
the second keeps only these, so `entries` can free the entries that a pickler has written together
(Python's: 1,000). The second is Python's own reader in Python, in which every operation that looks
up, calls or changes an object is replaced.
"""

import contextlib
import functools
import mmap
import pickle
import pickletools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors, reading
from tokmill.base.unpickle.inert import (
    OLD_MODULES,
    PLAIN,
    Budget,
    Instance,
    Name,
    call,
    check_key,
    type_name,
)

ROOTS = (dict, list)
"""Types that have entries."""
MALFORMED = (
    IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError, struct.error,
    pickle.UnpicklingError,
)  # fmt: skip
"""Errors that an invalid program can cause."""
EMPTY_SET = 240
"""Bytes of memory of a set, for one byte of a file."""
MAX_NAME = 512
MAX_INTEGER = 1024
"""Bytes of an integer: Python writes out no more than 4,300 digits."""

CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
"""Name of an operation → its byte."""
NAMES = {code: name for name, code in CODES.items()}
SHORT_TEXT, MEMOIZE, STOP = CODES["SHORT_BINUNICODE"], CODES["MEMOIZE"], CODES["STOP"]
UNKNOWN, LINE, LINES, FETCH, END = 0, -10, -11, -12, -13


def _sizes() -> list[int]:
    """Return byte → size of its operation; below 0: minus the width of a length, or a code."""
    sizes = [UNKNOWN] * 256
    widths = {
        pickletools.TAKEN_FROM_ARGUMENT1: -1,
        pickletools.TAKEN_FROM_ARGUMENT4: -4,
        pickletools.TAKEN_FROM_ARGUMENT4U: -4,
        pickletools.TAKEN_FROM_ARGUMENT8U: -8,
        pickletools.UP_TO_NEWLINE: LINE,
    }
    for opcode in pickletools.opcodes:
        width = opcode.arg.n if opcode.arg else 0
        sizes[ord(opcode.code)] = 1 + width if width >= 0 else widths[width]
    for names, size in {"GLOBAL INST": LINES, "BINGET LONG_BINGET GET": FETCH, "STOP": END}.items():
        for name in names.split():
            sizes[CODES[name]] = size
    return sizes


SIZES = _sizes()


PythonReader: Any = pickle._Unpickler
"""The reader of `pickle` that is written in Python: each operation is a method of its own."""


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


class Machine(PythonReader):  # type: ignore[misc]
    """Python's reader, over the bytes of one file; it makes inert values alone."""

    def __init__(self, pickled: Pickle, data: mmap.mmap) -> None:
        super().__init__(data)
        self.pickle, self.data = pickled, data
        self.path, self.names = pickled.path, pickled.names
        self.budget = Budget(self.path, len(data))
        self.named = pickled.named = set()
        # What `load` of the base class prepares. Lengths are within the file: `_survey` has seen.
        self.read, self.readline, self.proto = data.read, data.readline, 0
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.kept: dict[int, Any] = {}
        """Number of an object → object, until its last use."""
        self.number = self.place = self.count = 0
        """Objects that MEMOIZE has numbered; byte of the operation; entries that were yielded."""
        self.streaming = False
        self.ready: list[tuple[Any, Any]] = []
        """Entries of the outermost container that are to be yielded."""

    def run(self, *, streaming: bool) -> Iterator[tuple[Any, Any]]:
        """Yield (None, the value), or with `streaming` the entries of the outermost container."""
        self.uses, self.pickle.stop = self._survey()
        if self.pickle.names is not None:
            self.pickle.check_end(len(self.data))
        self.streaming = streaming
        try:
            for ready in self._operations():
                self.pickle.position = self.place
                yield from ready
            value = self.stack.pop()
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
            raise self._broken(self.place, str(error)) from None

    def _operations(self) -> Iterator[list[tuple[Any, Any]]]:
        """Run the program; yield entries that are ready. Frequent operations are without a call."""
        data, dispatch, uses, kept = self.data, self.dispatch, self.uses, self.kept
        stack = self.stack
        while (code := data[self.place]) != STOP:
            place = self.place
            if code == SHORT_TEXT:
                after = place + 2 + data[place + 1]
                stack.append(_text(data[place + 2 : after]))
            elif code == MEMOIZE:
                if self.number < len(uses) and uses[self.number]:
                    kept[self.number] = stack[-1]
                self.number += 1
                after = place + 1
            elif SIZES[code] == FETCH:
                key, after = self._fetched(place)
                stack.append(kept[key])
                # Its last use: free it.
                if uses[key] == 1:
                    del kept[key]
                elif uses[key] < 255:
                    uses[key] -= 1
            elif SIZES[code] == 1:
                dispatch[code](self)
                stack, after = self.stack, place + 1
            else:
                data.seek(place + 1)
                dispatch[code](self)
                stack, after = self.stack, data.tell()
            if self.ready:
                yield self.ready
                self.ready = []
            self.place = after

    def _survey(self) -> tuple[bytearray, int]:
        """Return number of an object → its uses (255: that or more), and the byte after the pickle.

        Raises `TokmillError`: an operation is unknown, or the end is missing.
        """
        data, uses, place = self.data, bytearray(), 0
        with contextlib.suppress(IndexError, struct.error):
            while True:
                size = SIZES[data[place]]
                if size > 0:
                    place += size
                elif size == FETCH:
                    key, after = self._fetched(place)
                    # There are fewer objects than bytes.
                    if not 0 <= key < len(data):
                        raise self._broken(place)
                    if key >= len(uses):
                        more = min(len(uses), len(data) - len(uses))
                        uses.extend(bytes(max(key + 1 - len(uses), more)))
                    uses[key] += uses[key] < 255
                    place = after
                elif size in (LINE, LINES):
                    place = self._line(place + 1)[1]
                    place = place if size == LINE else self._line(place)[1]
                elif size == END:
                    return uses, place + 1
                elif size == UNKNOWN:
                    raise self._broken(place)
                else:
                    start = place + 1 - size
                    place = start + int.from_bytes(data[place + 1 : start], "little")
        raise TokmillError(
            f"the pickle is cut off: it has no end in {len(data):,} bytes",
            where=str(self.path),
            hint="its writer was killed or its copy cut off: make or fetch it again",
        )

    def _line(self, start: int) -> tuple[bytes, int]:
        """Return the line that begins at a byte, and the byte after it."""
        stop = self.data.find(b"\n", start)
        if stop < 0:
            raise IndexError("a line without an end")
        return self.data[start:stop], stop + 1

    def _fetched(self, place: int) -> tuple[int, int]:
        """Return the number of the object of a GET (-1: invalid), and the byte after it."""
        code, data = self.data[place], self.data
        if code == CODES["LONG_BINGET"]:
            return struct.unpack_from("<I", data, place + 1)[0], place + 5
        if code == CODES["BINGET"]:
            return data[place + 1], place + 2
        line, after = self._line(place + 1)
        return int(line) if line.isdigit() and len(line) < 20 else -1, after

    def _broken(self, place: int, why: str = "") -> TokmillError:
        code = self.data[place] if place < len(self.data) else -1
        reason = f" ({why})" if why else ""
        what = f"{NAMES[code]} does not fit here" if code in NAMES else "no operation of pickles"
        return TokmillError(
            f"this is not a sound pickle: {what}{reason}",
            where=f"{self.path}, byte {place:,}",
            hint="it is damaged, of another format, or made to harm its readers",
        )

    def _refuse(self, what: str) -> NoReturn:
        raise TokmillError(
            f"the pickle {what}, which is not data",
            where=f"{self.path}, byte {self.place:,}",
            hint="it is of another kind, or made to run code in its readers: no code was run here, "
            "and `tokmill inspect` shows what it holds",
        )

    # What the base class asks for.

    def find_class(self, module: str, name: str) -> Name:
        if len(module) + len(name) > MAX_NAME:
            raise ValueError("a name that is no name")
        named = Name(OLD_MODULES.get(module, module), name)
        text = str(named)
        if text in PLAIN:
            return named
        self.named.add(text)
        if self.names is not None:
            parts = named.module.split(".")
            allowed = {".".join(parts[:n]) + "." for n in range(1, len(parts) + 1)} | {text}
            if not name.isidentifier() or not allowed & self.names:
                self._refuse(f"names {text if text.isprintable() else repr(text)}")
        return named

    def persistent_load(self, pid: Any) -> Instance:
        if self.names is not None:
            self._refuse("refers to an object outside of it")
        return Instance("an object outside of the pickle", (pid,))

    def get_extension(self, code: int) -> None:
        if self.names is not None:
            self._refuse(f"takes the registered extension {code}")
        self.append(Name("copyreg", f"extension {code}"))

    def _instantiate(self, called: Any, args: list[Any]) -> None:
        self.append(call(called, tuple(args), self.budget))

    def _decode_string(self, value: bytes) -> str | bytes:
        """Return a string of Python 2: text where it is ASCII."""
        return value.decode() if value.isascii() else value

    # Operations that are replaced.

    def _long4(self) -> None:
        size = int.from_bytes(self.read(4), "little")
        if size > MAX_INTEGER:
            raise ValueError(f"an integer of {size:,} bytes")
        self.append(int.from_bytes(self.read(size), "little", signed=True))

    def _bytearray8(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    def _keep(self, key: int) -> None:
        if key < len(self.uses) and self.uses[key]:
            self.kept[key] = self.stack[-1]

    def _put(self) -> None:
        line = self.readline()[:-1]
        if line.isdigit() and len(line) < 20:
            self._keep(int(line))

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) <= count:
            raise IndexError("too few values")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Instance:
            target.items.extend(items)
        elif self._is_root(list):
            self.ready = list(enumerate(items, self.count))
            self.count += len(items)
        else:
            _only(target, list).extend(items)

    def _update(self, target: Any, items: list[Any]) -> None:
        both = iter(items)
        if len(items) % 2:
            raise ValueError("a key without a value")
        if type(target) is not dict:
            _only(target, Instance).items.extend(zip(both, both, strict=True))
            return
        for key, value in zip(both, both, strict=True):
            if type(key) is not str:
                check_key(key, self.budget)
            target[key] = value

    def _set_items(self, items: list[Any]) -> None:
        if self._is_root(dict):
            pairs: dict[Any, Any] = {}
            self._update(pairs, items)
            self.ready = list(pairs.items())
        else:
            self._update(self.stack[-1], items)

    def _is_root(self, kind: type[Any]) -> bool:
        """Say whether what entries are added to is the outermost container, of a type."""
        if not self.streaming or self.metastack or len(self.stack) != 1:
            return False
        if type(self.stack[0]) is kind:
            self.pickle.holds = kind
        return type(self.stack[0]) is kind

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._update(self.stack[-1], items)

    def _empty_set(self) -> None:
        self.budget.take(EMPTY_SET)
        self.append(set())

    def _hashed(self) -> list[Any]:
        items: list[Any] = self.pop_mark()
        for item in items:
            check_key(item, self.budget)
        return items

    def _add_items(self) -> None:
        items = self._hashed()
        _only(self.stack[-1], set).update(items)

    def _frozenset(self) -> None:
        items = self._hashed()
        self.budget.take(EMPTY_SET)
        self.append(frozenset(items))

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = call(self.stack[-1], args, self.budget)

    def _newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = Instance(str(_only(self.stack[-1], Name)), _only(args, tuple))

    def _newobj_ex(self) -> None:
        keywords, args = self.stack.pop(), self.stack.pop()
        self.stack[-1] = Instance(str(_only(self.stack[-1], Name)), (args, keywords))

    def _build(self) -> None:
        state = self.stack.pop()
        _only(self.stack[-1], Instance).state = state

    dispatch = PythonReader.dispatch | {
        CODES[name]: method
        for names, method in {
            "FRAME": lambda self: self.read(8), "LONG4": _long4, "BYTEARRAY8": _bytearray8,
            "BINPUT": lambda self: self._keep(self.read(1)[0]),
            "LONG_BINPUT": lambda self: self._keep(int.from_bytes(self.read(4), "little")),
            "PUT": _put, "DICT": _dict, "EMPTY_SET": _empty_set,
            "ADDITEMS": _add_items, "FROZENSET": _frozenset, "REDUCE": _reduce, "NEWOBJ": _newobj,
            "NEWOBJ_EX": _newobj_ex, "BUILD": _build,
            "APPEND": lambda self: self._extend(self._last(1)),
            "APPENDS": lambda self: self._extend(self.pop_mark()),
            "SETITEM": lambda self: self._set_items(self._last(2)),
            "SETITEMS": lambda self: self._set_items(self.pop_mark()),
        }.items()
        for name in names.split()
    }  # fmt: skip
    for _name in ("NEXT_BUFFER", "READONLY_BUFFER"):
        # Buffers outside of the file.
        del dispatch[CODES[_name]]


@functools.lru_cache(1 << 10)
def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _only(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__}, not a {kind.__name__}")
    return value
