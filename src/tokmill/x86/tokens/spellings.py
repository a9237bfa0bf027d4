"""The functions of programs as kTrans has them: seven streams, and files of them.

They have the form of its files, but iced-x86's names: kTrans' own streams have numbers of IDA.
Format: https://github.com/Learner0x5a/kTrans-release.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.base.files import inside, machine_errors, new_folder, remove_leftovers, write_file
from tokmill.builds.scan import FolderOptions
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.lifting import Seen, find_inputs, look_at
from tokmill.x86.tokens.canonical import flags, names
from tokmill.x86.tokens.vocabularies.count import nothing_read

if TYPE_CHECKING:
    from iced_x86 import Formatter, Instruction, InstructionInfoFactory

KTRANS = ("token", "itype", "opnd_type", "reg_id", "reg_r", "reg_w", "eflags")
"""The seven streams of kTrans."""
NOTHING = "[PAD]"
READS = ("READ", "COND_READ", "READ_WRITE", "READ_COND_WRITE")
WRITES = ("WRITE", "COND_WRITE", "READ_WRITE", "READ_COND_WRITE")

_HEXADECIMAL = re.compile(r"0x[0-9a-f]+")


@functools.cache
def intel() -> Formatter:
    """Return a formatter whose text is like that of capstone, which kTrans reads."""
    iced = plugins.require("iced_x86")
    formatter: Formatter = iced.Formatter(iced.FormatterSyntax.INTEL)
    formatter.hex_prefix, formatter.hex_suffix = "0x", ""
    formatter.uppercase_hex = formatter.add_leading_zero_to_hex_numbers = False
    formatter.rip_relative_addresses = True
    formatter.branch_leading_zeros = False
    formatter.memory_size_options = iced.MemorySizeOptions.ALWAYS
    formatter.show_branch_size = False
    return formatter


@functools.cache
def _infos() -> InstructionInfoFactory:
    factory: InstructionInfoFactory = plugins.require("iced_x86").InstructionInfoFactory()
    return factory


def ktrans(instruction: Instruction) -> dict[str, list[str]]:
    """Return the seven streams of kTrans, each with an entry a token.

    `token` is the text; a memory operand is one token after its size words, and hexadecimal numbers
    are `const`. `itype` is the `Mnemonic`, `opnd_type` the `OpKind`, `reg_id` the `Register` of a
    register operand or `NONE`. `reg_r` and `reg_w` are `1` if the operand is read or written.
    `eflags` is as in the rules, `NULL` for nothing. The mnemonic and commas have `[PAD]`.
    """
    formatter = intel()
    streams: dict[str, list[str]] = {name: [] for name in KTRANS}
    _extend(streams, formatter.format_mnemonic(instruction), (NOTHING,) * 4)
    for printed in range(formatter.operand_count(instruction)):
        if printed:
            _extend(streams, ",", (NOTHING,) * 4)
        text = _HEXADECIMAL.sub("const", formatter.format_operand(instruction, printed))
        _extend(streams, text, _operand(instruction, printed))
    count = len(streams["token"])
    streams["itype"] = [names("Mnemonic")[instruction.mnemonic]] * count
    streams["eflags"] = [flags(instruction) or "NULL"] * count
    return streams


def _operand(instruction: Instruction, printed: int) -> tuple[str, str, str, str]:
    """Return (kind, register, whether read, whether written) of a printed operand."""
    place = intel().get_instruction_operand(instruction, printed)
    if place is None:
        return (NOTHING,) * 4
    kind = names("OpKind")[instruction.op_kind(place)]
    register = instruction.op_register(place) if kind == "REGISTER" else 0
    access = names("OpAccess")[_infos().info(instruction).op_access(place)]
    return (
        kind,
        names("Register")[register],
        str(int(access in READS)),
        str(int(access in WRITES)),
    )


def _extend(streams: dict[str, list[str]], text: str, operand: tuple[str, ...]) -> None:
    tokens = text.split()
    streams["token"] += tokens
    for name, value in zip(("opnd_type", "reg_id", "reg_r", "reg_w"), operand, strict=True):
        streams[name] += [value] * len(tokens)


class Spelled(msgspec.Struct, frozen=True):
    """The result of `spell`."""

    programs: int
    functions: int
    refused: dict[str, str]
    """Program → why it was not read."""
    left_out: dict[str, int] = {}
    """Reason → number of files in folders that were not read."""


def spell(
    inputs: Sequence[str],
    out: Path,
    *,
    least: int = 1,
    levels: Sequence[str] | None = None,
    workers: int = 0,
    choice: FolderOptions | None = None,
    quiet: bool = True,
) -> Spelled:
    """Write the functions of programs, pickles and graph files into a folder.

    Of each program there is a PROGRAM.jsonl with a line a function: `function` (raw symbol, or
    `sub_401000`), `address` and the seven streams. Slashes in the name of a program become `_`.
    Functions with fewer than `least` instructions are left out. Raises `UsageError` if two programs
    would go to one file, `TokmillError` if nothing can be read.
    """
    files, left_out = find_inputs(inputs, choice)
    written_to: dict[str, str] = {}
    for file in files:
        other = written_to.setdefault(_plain(file.name), file.name)
        if other != file.name:
            raise UsageError(
                f"{other} and {file.name} would be written to the same file",
                hint="spell them into different folders",
            )
    write = functools.partial(_write, out, least)
    written: list[int] = []
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
    return Spelled(len(written), sum(written), why, left_out)


def functions_of(graph: Graph, least: int) -> Iterator[tuple[str, int, list[Instruction]]]:
    decoder = plugins.require("iced_x86").Decoder
    code = graph.code.tobytes()
    for number, address in enumerate(graph.function_address.tolist()):
        first, last = graph.function_blocks[number : number + 2].tolist()
        instructions: list[Instruction] = []
        for block in range(first, last):
            place = slice(*graph.block_bytes[block : block + 2].tolist())
            instructions += decoder(graph.bits, code[place], ip=int(graph.block_address[block]))
        if len(instructions) >= max(least, 1):
            yield graph.function_name[number] or f"sub_{address:x}", address, instructions


def _write(out: Path, least: int, graph: Graph) -> int:
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
    _check_ours(path)
    write_file(path, lines())
    return count


def _check_ours(path: Path) -> None:
    """Refuse to replace a file that does not begin like one of functions."""
    begin = b'{"function":'
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
