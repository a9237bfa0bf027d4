"""The operations of a pickle's program: their sizes, and the implementation of the rarer ones."""

from __future__ import annotations

import codecs
import mmap
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tokmill.base.errors import TokmillError
from tokmill.base.unpickle.inert import (
    OLD_MODULES,
    PLAIN,
    Budget,
    Instance,
    Name,
    call,
    check_key,
)

EMPTY_SET = 240
"""Bytes of memory of a set, for one byte of a file."""
MAX_NAME = 512
MAX_INTEGER = 1024
"""Bytes of an integer, or digits of its text: Python writes out no more than 4,300 digits."""

CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
"""Name of an operation → its byte."""
NAMES = {code: name for name, code in CODES.items()}
UNSIGNED, SIGNED = struct.Struct("<I"), struct.Struct("<i")

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


class Operations:
    """The operations on the bytes of one file, except those in `reader.Machine.run`.

    Args:
        path: the file, for messages.
        data: its bytes.
        names: names that may occur in addition to those of plain values; None: any.
    """

    def __init__(self, path: Path, data: mmap.mmap, names: frozenset[str] | None) -> None:
        self.path, self.data, self.names = path, data, names
        self.budget = Budget(path, len(data))
        self.named: set[str] = set()
        """Names that occurred, except those of plain values."""

    def extend(self, target: Any, items: list[Any]) -> None:
        """APPEND, APPENDS: put values into a list."""
        (target.items if type(target) is Instance else _only(target, list)).extend(items)

    def update(self, target: Any, items: list[Any]) -> None:
        """SETITEM, SETITEMS: put keys and values, in turn, into a dict."""
        both = iter(items)
        if len(items) % 2:
            raise ValueError("a key without a value")
        if type(target) is dict:
            for key, value in zip(both, both, strict=True):
                if type(key) is not str:
                    check_key(key, self.budget)
                target[key] = value
        else:
            _only(target, Instance).items.extend(zip(both, both, strict=True))

    def line(self, start: int) -> tuple[bytes, int]:
        """Return the line that begins at a byte, and the byte after it."""
        stop = self.data.find(b"\n", start)
        if stop < 0:
            raise IndexError("a line without an end")
        return self.data[start:stop], stop + 1

    def memo_number(self, place: int) -> tuple[int, int]:
        """Return the memo number of a PUT or GET (-1: invalid), and the byte after it."""
        code, data = self.data[place], self.data
        if code in (0x6A, 0x72):  # LONG_BINGET, LONG_BINPUT
            return UNSIGNED.unpack_from(data, place + 1)[0], place + 5
        if code in (0x68, 0x71):  # BINGET, BINPUT
            return data[place + 1], place + 2
        line, after = self.line(place + 1)
        return int(line) if line.isdigit() and len(line) < 20 else -1, after

    def broken(self, place: int, why: str = "") -> TokmillError:
        """Return the error for an invalid operation at a byte."""
        code = self.data[place] if place < len(self.data) else -1
        reason = f" ({why})" if why else ""
        what = f"{NAMES[code]} does not fit here" if code in NAMES else "no operation of pickles"
        return TokmillError(
            f"this is no sound pickle: {what}{reason}",
            where=f"{self.path}, byte {place:,}",
            hint="it is damaged, of another format, or made to harm its readers",
        )

    def _refuse(self, what: str, place: int) -> NoReturn:
        raise TokmillError(
            f"the pickle {what}, which is no data",
            where=f"{self.path}, byte {place:,}",
            hint="it is of another kind, or made to run code in its readers: no code was run here, "
            "and `tokmill inspect` shows what it holds",
        )

    def _counted(self, place: int) -> tuple[bytes, int]:
        """Return the bytes after a length, and the byte after them."""
        start = place + 1 - SIZES[self.data[place]]
        stop = start + int.from_bytes(self.data[place + 1 : start], "little")
        return self.data[start:stop], stop

    def _name(self, module: str, name: str, place: int) -> Name:
        if len(module) + len(name) > MAX_NAME:
            raise ValueError("a name that is no name")
        result = Name(OLD_MODULES.get(module, module), name)
        text = str(result)
        if text in PLAIN:
            return result
        self.named.add(text)
        if self.names is not None:
            parts = result.module.split(".")
            prefixes = {".".join(parts[:n]) + "." for n in range(1, len(parts) + 1)} | {text}
            if not name.isidentifier() or not prefixes & self.names:
                self._refuse(f"names {text if text.isprintable() else repr(text)}", place)
        return result

    def _call(self, called: Any, args: Any) -> Any:
        return call(called, args, self.budget)

    # Operations that end at a mark: (place, items above it, stack below it) → next place.

    def _list(self, place: int, items: list[Any], stack: list[Any]) -> int:
        stack.append(items)
        return place + 1

    def _dict(self, place: int, items: list[Any], stack: list[Any]) -> int:
        stack.append({})
        self.update(stack[-1], items)
        return place + 1

    def _frozenset(self, place: int, items: list[Any], stack: list[Any]) -> int:
        for item in items:
            check_key(item, self.budget)
        self.budget.take(EMPTY_SET)
        stack.append(frozenset(items))
        return place + 1

    def _additems(self, place: int, items: list[Any], stack: list[Any]) -> int:
        for item in items:
            check_key(item, self.budget)
        _only(stack[-1], set).update(items)
        return place + 1

    def _obj(self, place: int, items: list[Any], stack: list[Any]) -> int:
        stack.append(self._call(items[0], tuple(items[1:])))
        return place + 1

    def _inst(self, place: int, items: list[Any], stack: list[Any]) -> int:
        module, after = self.line(place + 1)
        name, after = self.line(after)
        called = self._name(module.decode(), name.decode(), place)
        stack.append(self._call(called, tuple(items)))
        return after

    def _pop_mark(self, place: int, items: list[Any], stack: list[Any]) -> int:
        return place + 1

    # All others: (place, stack) → next place.

    def _proto(self, place: int, stack: list[Any]) -> int:
        if self.data[place + 1] > pickle.HIGHEST_PROTOCOL:
            raise ValueError(f"protocol {self.data[place + 1]}")
        return place + 2

    def _frame(self, place: int, stack: list[Any]) -> int:
        return place + 9

    def _pop(self, place: int, stack: list[Any]) -> int:
        stack.pop()
        return place + 1

    def _dup(self, place: int, stack: list[Any]) -> int:
        stack.append(stack[-1])
        return place + 1

    def _bool(self, place: int, stack: list[Any]) -> int:
        stack.append(self.data[place] == CODES["NEWTRUE"])
        return place + 1

    def _empty_set(self, place: int, stack: list[Any]) -> int:
        self.budget.take(EMPTY_SET)
        stack.append(set())
        return place + 1

    def _global(self, place: int, stack: list[Any]) -> int:
        module, after = self.line(place + 1)
        name, after = self.line(after)
        stack.append(self._name(module.decode(), name.decode(), place))
        return after

    def _stack_global(self, place: int, stack: list[Any]) -> int:
        name, module = _only(stack.pop(), str), _only(stack.pop(), str)
        stack.append(self._name(module, name, place))
        return place + 1

    def _reduce(self, place: int, stack: list[Any]) -> int:
        args = stack.pop()
        stack[-1] = self._call(stack[-1], args)
        return place + 1

    def _newobj(self, place: int, stack: list[Any]) -> int:
        args = stack.pop()
        stack[-1] = Instance(str(_only(stack[-1], Name)), _only(args, tuple))
        return place + 1

    def _newobj_ex(self, place: int, stack: list[Any]) -> int:
        named, args = stack.pop(), stack.pop()
        stack[-1] = Instance(str(_only(stack[-1], Name)), (args, named))
        return place + 1

    def _build(self, place: int, stack: list[Any]) -> int:
        state = stack.pop()
        _only(stack[-1], Instance).state = state
        return place + 1

    def _ext(self, place: int, stack: list[Any]) -> int:
        after = place + SIZES[self.data[place]]
        number = int.from_bytes(self.data[place + 1 : after], "little")
        if self.names is not None:
            self._refuse(f"takes the registered extension {number}", place)
        stack.append(Name("copyreg", f"extension {number}"))
        return after

    def _persid(self, place: int, stack: list[Any]) -> int:
        if self.data[place] == CODES["BINPERSID"]:
            held, after = stack.pop(), place + 1
        else:
            held, after = self.line(place + 1)
        if self.names is not None:
            self._refuse("refers to an object outside of it", place)
        stack.append(Instance("an object outside of the pickle", (held,)))
        return after

    def _binfloat(self, place: int, stack: list[Any]) -> int:
        stack.append(struct.unpack_from(">d", self.data, place + 1)[0])
        return place + 9

    def _number(self, place: int, stack: list[Any]) -> int:
        """INT, LONG and FLOAT: text up to a newline."""
        line, after = self.line(place + 1)
        if len(line) > MAX_INTEGER:
            raise ValueError(f"a number of {len(line):,} digits")
        code = self.data[place]
        if code == CODES["FLOAT"]:
            stack.append(float(line))
        elif code == CODES["INT"] and line in (b"00", b"01"):
            stack.append(line == b"01")
        else:
            stack.append(int(line.removesuffix(b"L"), 0))
        return after

    def _long(self, place: int, stack: list[Any]) -> int:
        held, after = self._counted(place)
        if len(held) > MAX_INTEGER:
            raise ValueError(f"an integer of {len(held):,} bytes")
        stack.append(int.from_bytes(held, "little", signed=True))
        return after

    def _text(self, place: int, stack: list[Any]) -> int:
        """STRING and UNICODE: escaped text up to a newline."""
        line, after = self.line(place + 1)
        if self.data[place] == CODES["UNICODE"]:
            stack.append(line.decode("raw-unicode-escape"))
            return after
        line = line.strip()
        if len(line) < 2 or line[0] != line[-1] or line[0] not in b"'\"":
            raise ValueError("a string without quotes")
        stack.append(_old_text(codecs.escape_decode(line[1:-1])[0]))
        return after

    def _old_string(self, place: int, stack: list[Any]) -> int:
        held, after = self._counted(place)
        stack.append(_old_text(held))
        return after

    def _long_value(self, place: int, stack: list[Any]) -> int:
        """BINUNICODE8, BINBYTES8 and BYTEARRAY8."""
        held, after = self._counted(place)
        name = NAMES[self.data[place]]
        if name == "BINUNICODE8":
            stack.append(held.decode("utf-8", "surrogatepass"))
        else:
            stack.append(bytearray(held) if name == "BYTEARRAY8" else held)
        return after


def _only(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__}, not a {kind.__name__}")
    return value


def _old_text(held: bytes) -> str | bytes:
    """Return a string of Python 2: text where it is ASCII."""
    return held.decode() if held.isascii() else held


_O = Operations
CLOSING: dict[int, Callable[[Any, int, list[Any], list[Any]], int]] = {
    CODES["LIST"]: _O._list, CODES["DICT"]: _O._dict, CODES["FROZENSET"]: _O._frozenset,
    CODES["ADDITEMS"]: _O._additems, CODES["OBJ"]: _O._obj, CODES["INST"]: _O._inst,
    CODES["POP_MARK"]: _O._pop_mark,
}  # fmt: skip
OTHER: dict[int, Callable[[Any, int, list[Any]], int]] = {
    CODES[name]: method
    for names, method in {
        "PROTO": _O._proto, "FRAME": _O._frame, "POP": _O._pop, "DUP": _O._dup,
        "NEWTRUE NEWFALSE": _O._bool, "EMPTY_SET": _O._empty_set, "GLOBAL": _O._global,
        "STACK_GLOBAL": _O._stack_global, "REDUCE": _O._reduce, "NEWOBJ": _O._newobj,
        "NEWOBJ_EX": _O._newobj_ex, "BUILD": _O._build, "EXT1 EXT2 EXT4": _O._ext,
        "PERSID BINPERSID": _O._persid, "BINFLOAT": _O._binfloat,
        "INT LONG FLOAT": _O._number, "LONG1 LONG4": _O._long, "STRING UNICODE": _O._text,
        "BINSTRING SHORT_BINSTRING": _O._old_string,
        "BINUNICODE8 BINBYTES8 BYTEARRAY8": _O._long_value,
    }.items()
    for name in names.split()
}  # fmt: skip
"""What is in neither table nor in `Machine.run` (buffers outside of the file) is refused."""
