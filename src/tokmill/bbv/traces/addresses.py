"""Where blocks lie in memory (pc files), and what was mapped there (maps).

The pc file of valgrind's exp-bbv has a line `F:ID:HEX:FUNCTION` a block, the address at which its
first instruction ran. A map is what Linux shows as `/proc/PID/maps`, or lines `HEX PATH`.
"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokmill.base.bounds import bounded_reader
from tokmill.base.errors import TokmillError, plain
from tokmill.base.files import machine_errors, write_file
from tokmill.base.inflate import inflate, packing
from tokmill.store.schema import Array

BLOCK = re.compile(rb"F:(?P<id>[0-9]{1,18}):(?:0x)?(?P<hex>[0-9a-fA-F]{1,16})(?::(?P<name>.*))?")
MAPS = re.compile(
    r"(?P<low>[0-9a-f]{1,16})-(?P<high>[0-9a-f]{1,16}) \S{4} [0-9a-f]+ \S+ \d+(?: +(?P<path>.*))?"
)
PLACED = re.compile(r"(?:0x)?(?P<low>[0-9a-fA-F]{1,16})\s+(?P<path>\S.*)")
PAGE = 4096
APART = b"# blocks do not overlap"
"""First line of a pc file of `tokmill bbv profile`; others leave it out as a comment."""


class Addresses(NamedTuple):
    """The blocks of a pc file, by id."""

    ids: Array
    """int64, ascending."""
    at: Array
    """uint64, where each begins in memory."""
    functions: dict[int, str]
    """Id → name, of blocks where a function begins."""
    overlap: bool = True
    """Whether a block may go on into another one of the file, as those of valgrind do."""

    def find(self, ids: Array) -> Array:
        """Return the number of each id's row, -1 where there is none (int64)."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64)
        rows = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
        return np.where(self.ids[rows] == ids, rows, -1)


class Mapped(NamedTuple):
    """A file that was mapped for a program that ran."""

    low: int
    """The lowest address at which it was mapped."""
    high: int
    """Where the last part of it ended; 0 where the map does not say."""
    path: str


def content(path: Path | str) -> bytes:
    """Return the whole content of a small text file, which may be compressed."""
    with machine_errors("read", path), open(path, "rb") as file:
        data = file.read()
    kind = packing(data)
    return b"".join(inflate(str(path), kind=kind)) if kind else data


@bounded_reader
def read_addresses(path: Path | str) -> Addresses:
    """Read a pc file, whose lines that do not begin with `F` are left out."""
    data = content(path)
    addresses: dict[int, int] = {}
    functions: dict[int, str] = {}
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.startswith(b"F"):
            continue
        match = BLOCK.fullmatch(line.strip())
        if match is None:
            raise TokmillError(
                f"{plain(line[:40].decode('utf-8', 'replace'))!r} is not a block",
                where=f"{path}, line {number}",
                hint="a line is F:ID:ADDRESS:FUNCTION, the address hexadecimal",
            )
        block, address = int(match["id"]), int(match["hex"], 16)
        if addresses.setdefault(block, address) != address:
            raise TokmillError(
                f"the block {block} has two addresses, {addresses[block]:#x} and {address:#x}",
                where=f"{path}, line {number}",
                hint="is it of several runs? A trace and its pc file are of one run",
            )
        if match["name"]:
            functions[block] = match["name"].decode("utf-8", "replace")
    if not addresses:
        raise TokmillError(
            "the file names no block",
            where=str(path),
            hint="valgrind --tool=exp-bbv --pc-out-file=FILE writes one",
        )
    ids = np.fromiter(addresses, np.int64, len(addresses))
    at = np.fromiter(addresses.values(), np.uint64, len(addresses))
    order = np.argsort(ids)
    return Addresses(ids[order], at[order], functions, not data.startswith(APART))


@bounded_reader
def read_maps(path: Path | str) -> list[Mapped]:
    """Read a map: the mapped files and where each begins, in the order of their addresses."""
    low: dict[str, int] = {}
    high: dict[str, int] = {}
    for number, line in enumerate(content(path).decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = MAPS.fullmatch(text) or PLACED.fullmatch(text)
        if match is None:
            raise TokmillError(
                f"{plain(text[:60])!r} is not a line of a map",
                where=f"{path}, line {number}",
                hint="a copy of /proc/PID/maps, or lines: ADDRESS PATH",
            )
        name = (match["path"] or "").removesuffix(" (deleted)")
        if not name.startswith(("/", "./", "[")) and "high" in match.groupdict():
            continue
        if name and not name.startswith("["):
            begin, end = int(match["low"], 16), int(match.groupdict().get("high") or "0", 16)
            low[name] = min(low.get(name, begin), begin)
            high[name] = max(high.get(name, end), end)
    if not low:
        raise TokmillError(
            "the map names no file", where=str(path), hint="a copy of /proc/PID/maps is one"
        )
    return sorted(Mapped(low[name], high[name], name) for name in low)


def write_addresses(path: Path, addresses: Addresses) -> None:
    """Write a pc file as valgrind's exp-bbv does."""
    names = addresses.functions
    write_file(
        path,
        ("" if addresses.overlap else f"{APART.decode()}\n")
        + "".join(
            f"F:{block}:{at:x}:{names.get(block, '')}\n"
            for block, at in zip(addresses.ids.tolist(), addresses.at.tolist(), strict=True)
        ),
    )


def write_maps(path: Path, mapped: list[Mapped]) -> None:
    write_file(path, "".join(f"{one.low:x} {one.path}\n" for one in mapped))
