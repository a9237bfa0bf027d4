"""Other formats of the same instructions, for models of other projects: kTrans and Asm2Vec.

Both have the form of those projects' files, but iced-x86's names: kTrans' own streams have numbers
of IDA, and Asm2Vec's text comes from IDA or radare2, which are not used here. Formats:
https://github.com/Learner0x5a/kTrans-release and https://github.com/oalieno/asm2vec-pytorch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokmill import plugins
from tokmill.x86.lift.enumerations import names
from tokmill.x86.tokens.names import flags

if TYPE_CHECKING:
    from iced_x86 import Formatter, Instruction, InstructionInfoFactory

KTRANS = ("token", "itype", "opnd_type", "reg_id", "reg_r", "reg_w", "eflags")
"""The seven streams of kTrans."""
NOTHING = "[PAD]"
READS = ("READ", "COND_READ", "READ_WRITE", "READ_COND_WRITE")
WRITES = ("WRITE", "COND_WRITE", "READ_WRITE", "READ_COND_WRITE")

_HEXADECIMAL = re.compile(r"0x[0-9a-f]+")
_NUMBER = re.compile(r"(?<!\()\b(?:0x[0-9a-f]+|[0-9]+)\b")
"""A number, but not the one in `st(1)`, which is part of a name."""
_DIFFERENCE = re.compile(r"-(?=CONST)")


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


def asm2vec(instructions: Sequence[Instruction]) -> list[str]:
    """Return the lines of a function in the text that asm2vec-pytorch reads.

    The line of an instruction begins with a blank; its numbers become `CONST` and differences
    become sums. A branch within the function goes to a label: the line `LABEL7:` is before
    instruction 7.
    """
    formatter = intel()
    places = {instruction.ip: place for place, instruction in enumerate(instructions)}
    targets = [places.get(_target(instruction)) for instruction in instructions]
    labelled = set(targets)
    lines = []
    for place, (instruction, target) in enumerate(zip(instructions, targets, strict=True)):
        if place in labelled:
            lines.append(f"LABEL{place}:")
        mnemonic = formatter.format_mnemonic(instruction)
        operands = formatter.format_all_operands(instruction)
        if target is not None:
            operands = f"LABEL{target}"
        else:
            operands = _DIFFERENCE.sub("+", _NUMBER.sub("CONST", operands))
        lines.append(f" {mnemonic} {operands}".rstrip())
    return lines


def _target(instruction: Instruction) -> int:
    """Return the target of a direct jump or branch; -1 for other instructions."""
    if not instruction.op_count or instruction.is_call_near:
        return -1
    near = names("OpKind")[instruction.op_kind(0)].startswith("NEAR_BRANCH")
    return instruction.near_branch_target if near else -1
