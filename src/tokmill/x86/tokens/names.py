"""What iced-x86 calls things: enumerations as tuples of names, registers, operands, flags."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tokmill import plugins

if TYPE_CHECKING:
    from iced_x86 import Instruction

FLAG_GROUPS = ("read", "written", "cleared", "set", "undefined")
FLAGS = ("OF", "SF", "ZF", "AF", "PF", "CF", "DF", "IF", "AC", "UIF", "C0", "C1", "C2", "C3")


@functools.cache
def names(enumeration: str) -> tuple[str, ...]:
    """Return the names of an enumeration of iced-x86 (such as `Register`), by value."""
    members = vars(getattr(plugins.require("iced_x86"), enumeration))
    values = {value: name for name, value in members.items() if name.isupper()}
    return tuple(values[value] for value in range(len(values)))


@functools.cache
def full_registers() -> tuple[int, ...]:
    """Return for each register the widest one that contains it (for AL and EAX: RAX), by value."""
    info = plugins.require("iced_x86").RegisterInfo
    return tuple(info(number).full_register for number in range(len(names("Register"))))


@functools.cache
def operand_kinds(code: int) -> tuple[str, ...]:
    """Return the `OpCodeOperandKind` names of the five operands of a `Code` (`NONE`: absent)."""
    info = plugins.require("iced_x86").OpCodeInfo(code)
    return tuple(names("OpCodeOperandKind")[info.op_kind(place)] for place in range(5))


def flags(instruction: Instruction) -> str:
    """Return the flags that an instruction reads and changes, such as `READ_CF,WRITTEN_ZF`.

    Groups are in the order of `FLAG_GROUPS`, flags within a group in that of `FLAGS`.
    """
    return _flags(
        instruction.rflags_read,
        instruction.rflags_written,
        instruction.rflags_cleared,
        instruction.rflags_set,
        instruction.rflags_undefined,
    )


@functools.cache
def _flags(*groups: int) -> str:
    bits = plugins.require("iced_x86").RflagsBits
    return ",".join(
        f"{group.upper()}_{flag}"
        for group, value in zip(FLAG_GROUPS, groups, strict=True)
        for flag in FLAGS
        if value & getattr(bits, flag)
    )
