"""Files with the functions of programs in the formats of other projects."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokmill import plugins
from tokmill.builds.scan import FolderOptions
from tokmill.errors import UsageError, nearest
from tokmill.files import inside, machine_errors, new_folder, remove_leftovers, write_file
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.inputs import Seen, find_inputs, look_at
from tokmill.x86.tokens.count import nothing_read
from tokmill.x86.tokens.spellings import KTRANS, asm2vec, ktrans

if TYPE_CHECKING:
    from iced_x86 import Instruction

SPELLINGS = {
    "ktrans": "the seven streams of kTrans, a line of JSON per function, a file per program",
    "asm2vec": "the text that asm2vec-pytorch reads, a file per function",
}


class Spelled(msgspec.Struct, frozen=True):
    """The result of `spell`."""

    programs: int
    functions: int
    files: int
    refused: dict[str, str]
    """Program → why it was not read."""
    left_out: dict[str, int] = {}
    """Reason → number of files in folders that were not read."""


def spell(
    inputs: Sequence[str],
    out: Path,
    spelling: str,
    *,
    least: int = 1,
    levels: Sequence[str] | None = None,
    workers: int = 0,
    choice: FolderOptions | None = None,
    quiet: bool = True,
) -> Spelled:
    """Write the functions of programs, pickles and graph files into a folder.

    `ktrans` makes PROGRAM.jsonl: `function` (raw symbol, or `sub_401000`), `address` and the seven
    streams. `asm2vec` makes PROGRAM-401000: name, address and program, then the lines. Slashes in
    the name of a program become `_`. Functions with fewer than `least` instructions are left out.
    Raises `UsageError` for an unknown spelling, `TokmillError` if nothing can be read.
    """
    if spelling not in SPELLINGS:
        raise UsageError(f"no spelling is called {spelling!r}", hint=nearest(spelling, SPELLINGS))
    files, left_out = find_inputs(inputs, choice)
    names: dict[str, str] = {}
    for file in files:
        other = names.setdefault(_plain(file.name), file.name)
        if other != file.name:
            raise UsageError(
                f"{other} and {file.name} would be written to the same file",
                hint="spell them into different folders",
            )
    write = functools.partial(_ktrans if spelling == "ktrans" else _asm2vec, out, least)
    written: list[tuple[int, int]] = []
    refused: dict[str, Seen] = {}
    with new_folder(out):
        remove_leftovers(out)
        for seen in look_at(
            write, files, levels=levels, workers=workers, title="spell", quiet=quiet
        ):
            if seen.refused:
                refused[seen.program] = seen
            else:
                written.append(seen.value)
    if not written:
        raise nothing_read(inputs, refused)
    why = {name: refused[name].refused for name in sorted(refused)}
    functions, made = (sum(column) for column in zip(*written, strict=True))
    return Spelled(len(written), functions, made, why, left_out)


def functions_of(graph: Graph, least: int) -> Iterator[tuple[str, int, list[Instruction]]]:
    """Yield name, address and instructions of each function, its blocks by address."""
    decoder = plugins.require("iced_x86").Decoder
    code = graph.code.tobytes()
    for number, address in enumerate(graph.function_address.tolist()):
        first, last = graph.function_blocks[number : number + 2].tolist()
        found: list[Instruction] = []
        for block in range(first, last):
            place = slice(*graph.block_bytes[block : block + 2].tolist())
            found += decoder(graph.bits, code[place], ip=int(graph.block_address[block]))
        if len(found) >= max(least, 1):
            yield graph.function_name[number] or f"sub_{address:x}", address, found


def _ktrans(out: Path, least: int, graph: Graph) -> tuple[int, int]:
    """Return how many functions and files were written."""
    encode = msgspec.json.Encoder().encode
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        for name, address, instructions in functions_of(graph, least):
            streams: dict[str, list[str]] = {stream: [] for stream in KTRANS}
            for instruction in instructions:
                for stream, tokens in ktrans(instruction).items():
                    streams[stream] += tokens
            yield encode({"function": name, "address": address} | streams) + b"\n"
            count += 1

    path = inside(out, f"{_plain(graph.program)}.jsonl")
    _check_ours(path, b'{"function":')
    write_file(path, lines())
    return count, 1


def _asm2vec(out: Path, least: int, graph: Graph) -> tuple[int, int]:
    count = 0
    for name, address, instructions in functions_of(graph, least):
        head = [f" .name {name}", f" .offset {address:016x}", f" .file {graph.program}"]
        text = "\n".join([*head, *asm2vec(instructions), ""])
        path = inside(out, f"{_plain(graph.program)}-{address:x}")
        _check_ours(path, b" .name ")
        write_file(path, text.encode("utf-8", "replace"), sync=False)
        count += 1
    return count, count


def _check_ours(path: Path, begin: bytes) -> None:
    """Refuse to replace a file that does not begin like one of this spelling."""
    if not os.path.lexists(path):
        return
    with machine_errors("read", path):
        data = b""
        if path.is_file():
            with open(path, "rb") as handle:
                data = handle.read(len(begin))
    # A program without functions gives an empty file.
    if not path.is_file() or data not in (begin, b""):
        raise UsageError(
            "the file is not of this spelling, and would be replaced",
            where=str(path),
            hint="choose another folder",
        )


def _plain(program: str) -> str:
    return program.replace("/", "_")
