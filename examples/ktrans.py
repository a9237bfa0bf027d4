"""The functions of programs in the seven streams of kTrans, a line of JSON a function.

    python examples/ktrans.py PROGRAM… FOLDER

Programs are ELF and PE files, pickles of BinaryCorp, graphs of `tokmill cfg`, and folders of them.
A line has `function`, `address` and the streams, all of one length. The form is that of the files
of kTrans (https://github.com/Learner0x5a/kTrans-release), the names are those of iced-x86: its
vocabularies hold numbers of IDA, so its published weights do not fit.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import iced_x86 as iced
from iced_x86 import Instruction

from tokmill.base.errors import TokmillError
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.lifting import find_inputs, map_graphs
from tokmill.x86.tokens.canonical import flags, names
from tokmill.x86.tokens.instructions import intel

STREAMS = ("token", "itype", "opnd_type", "reg_id", "reg_r", "reg_w", "eflags")
NOTHING = "[PAD]"
READS = ("READ", "COND_READ", "READ_WRITE", "READ_COND_WRITE")
WRITES = ("WRITE", "COND_WRITE", "READ_WRITE", "READ_COND_WRITE")
HEXADECIMAL = re.compile(r"0x[0-9a-f]+")
INFOS = iced.InstructionInfoFactory()


def streams_of(instruction: Instruction) -> dict[str, list[str]]:
    """Return the seven streams, each with an entry a token.

    `token` is the text; a memory operand is one token after its size words, and hexadecimal numbers
    are `const`. `itype` is the `Mnemonic`, `opnd_type` the `OpKind`, `reg_id` the `Register` of a
    register operand or `NONE`. `reg_r` and `reg_w` are `1` if the operand is read or written.
    `eflags` is as in the rules, `NULL` for nothing. The mnemonic and commas have `[PAD]`.
    """
    formatter = intel()
    streams: dict[str, list[str]] = {name: [] for name in STREAMS}
    extend(streams, formatter.format_mnemonic(instruction), (NOTHING,) * 4)
    for printed in range(formatter.operand_count(instruction)):
        if printed:
            extend(streams, ",", (NOTHING,) * 4)
        text = HEXADECIMAL.sub("const", formatter.format_operand(instruction, printed))
        extend(streams, text, operand_of(instruction, printed))
    count = len(streams["token"])
    streams["itype"] = [names("Mnemonic")[instruction.mnemonic]] * count
    streams["eflags"] = [flags(instruction) or "NULL"] * count
    return streams


def operand_of(instruction: Instruction, printed: int) -> tuple[str, str, str, str]:
    """Return (kind, register, whether read, whether written) of a printed operand."""
    place = intel().get_instruction_operand(instruction, printed)
    if place is None:
        return (NOTHING,) * 4
    kind = names("OpKind")[instruction.op_kind(place)]
    register = instruction.op_register(place) if kind == "REGISTER" else 0
    access = names("OpAccess")[INFOS.info(instruction).op_access(place)]
    return (
        kind,
        names("Register")[register],
        str(int(access in READS)),
        str(int(access in WRITES)),
    )


def extend(streams: dict[str, list[str]], text: str, operand: tuple[str, ...]) -> None:
    tokens = text.split()
    streams["token"] += tokens
    for name, value in zip(("opnd_type", "reg_id", "reg_r", "reg_w"), operand, strict=True):
        streams[name] += [value] * len(tokens)


def write(folder: Path, graph: Graph) -> Path:
    """Write the functions of a program; slashes in its name become `_`."""
    code = graph.code.tobytes()
    path = folder / f"{graph.program.replace('/', '_')}.jsonl"
    # A second program of that name, or a file of somebody else, is not replaced.
    with open(path, "x", encoding="utf-8") as file:
        for number, address in enumerate(graph.function_address.tolist()):
            streams: dict[str, list[str]] = {name: [] for name in STREAMS}
            for block in range(*graph.function_blocks[number : number + 2].tolist()):
                place = slice(*graph.block_bytes[block : block + 2].tolist())
                at = int(graph.block_address[block])
                for instruction in iced.Decoder(graph.bits, code[place], ip=at):
                    for name, tokens in streams_of(instruction).items():
                        streams[name] += tokens
            name = graph.function_name[number] or f"sub_{address:x}"
            file.write(json.dumps({"function": name, "address": address} | streams) + "\n")
    return path


def main(arguments: Sequence[str]) -> None:
    *inputs, folder = arguments
    Path(folder).mkdir(parents=True, exist_ok=True)
    for seen in map_graphs(functools.partial(write, Path(folder)), find_inputs(inputs).files):
        print(f"{seen.program}: refused, {seen.refused}" if seen.refused else seen.value)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (TokmillError, FileExistsError) as error:
        sys.exit(f"error: {error}")
