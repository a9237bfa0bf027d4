"""The `semanticbbv` rules: the same six streams as SemanticBBV's tokenizer.

Tokens are made from NASM text: prefixes and most implicit registers are lost, and every number is
`IMM`. docs/x86-tokens.md has the rules and their oddities, which `tokmill_rules` does not have.
Source: the behaviour of the public tokenizer.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

import iced_x86 as iced

from tokmill.x86.tokens.canonical import flags, full_registers, names, operand_kinds
from tokmill.x86.tokens.rules import DecodeError, Runs, Tokens

NOTHING = "[PAD]"
IMM = "IMM"
TOKEN = re.compile(
    r"0X[0-9A-F]+H(?![A-Z0-9_])|[0-9A-F]+H(?![A-Z0-9_])|[0-9]+|[A-Z_][A-Z0-9_]*|[-+*/:{}]"
)
"""A token in the text of an operand; blanks and brackets are skipped."""
NUMBER = re.compile(r"(?:0X)?[0-9A-F]+H|[0-9]+")
BARE = {"NOP_RM16", "NOP_RM32", "NOPW"}
"""Codes whose text is only NOP."""


class SemanticbbvRules:
    """The rules of SemanticBBV."""

    name: ClassVar[str] = "semanticbbv"
    version: ClassVar[int] = 1

    def __init__(self, bits: int = 64) -> None:
        self.bits = bits
        self.formatter = iced.Formatter(iced.FormatterSyntax.NASM)
        self.no_prefixes = iced.FormatMnemonicOptions.NO_PREFIXES
        self.info = iced.InstructionInfoFactory().info
        registers = names("Register")
        self.registers = {name: number for number, name in enumerate(registers) if number}
        # NASM's R8B is R8L in the enumeration.
        self.registers |= {f"R{n}B": self.registers[f"R{n}L"] for n in range(8, 16)}

    def tokens(self, instruction: iced.Instruction) -> Tokens:
        """Return the tokens of an instruction.

        Raises `DecodeError` if the printed operands cannot be assigned to the instruction's.
        """
        info: iced.InstructionInfo = self.info(instruction)
        access, kinds = names("OpAccess"), operand_kinds(instruction.code)
        mnemonic, operands = self._text(instruction)
        places = self._places(instruction, len(operands))
        used = [(register.register, register.access) for register in info.used_registers()]
        asm, reg, matched = [mnemonic], [NOTHING], set[int]()
        types: Runs = [(NOTHING, 1)]
        accesses: Runs = [(NOTHING, 1)]
        for place, operand in zip(places, operands, strict=True):
            for token in TOKEN.findall(operand):
                number = self.registers.get(token, 0)
                if number:
                    matched.add(full_registers()[number])
                asm.append(IMM if not number and NUMBER.fullmatch(token) else token)
                reg.append(_shown(number, used))
            count = len(asm) - sum(run for _, run in types)
            types.append((_or_nothing(kinds[place]), count))
            accesses.append((_or_nothing(access[info.op_access(place)]), count))
        implicit = [pair for pair in used if full_registers()[pair[0]] not in matched]
        if len(implicit) == 1:
            reg[0] = names("Register")[implicit[0][0]]
            accesses[0] = (_or_nothing(access[implicit[0][1]]), 1)
        return {
            "asm": asm,
            "mne": names("Mnemonic")[instruction.mnemonic],
            "type": types,
            "reg": reg,
            "rw": accesses,
            "eflag": flags(instruction) or NOTHING,
        }

    def _text(self, instruction: iced.Instruction) -> tuple[str, list[str]]:
        mnemonic = self.formatter.format_mnemonic(instruction, self.no_prefixes).upper()
        if mnemonic == "NOP" or names("Code")[instruction.code] in BARE:
            return "NOP", []
        if not mnemonic.isidentifier():
            raise self._unclear(instruction, f"the mnemonic {mnemonic!r} is not a single token")
        text = self.formatter.format_all_operands(instruction).upper()
        return mnemonic, text.split(",") if text else []

    def _places(self, instruction: iced.Instruction, printed: int) -> range | tuple[int, int]:
        own = instruction.op_count
        if (printed, own) == (2, 3):
            return 0, 2
        if (printed, own) == (3, 4):
            fits = names("Code")[instruction.code].endswith(("IMM8", "IMM8_SAE"))
        else:
            fits = printed in (0, own) or printed > own or (printed, own) == (1, 2)
        if not fits:
            raise self._unclear(instruction, f"{printed} operands are printed of {own}")
        return range(printed)

    def _unclear(self, instruction: iced.Instruction, what: str) -> DecodeError:
        encoder = iced.Encoder(self.bits)
        encoder.encode(instruction, instruction.ip)
        return DecodeError(
            f"{instruction} ({encoder.take_buffer().hex(' ')}): {what}",
            where=f"{instruction.ip:#x}",
            hint='rules="tokmill" read every instruction',
        )


def _shown(number: int, used: Sequence[tuple[int, int]]) -> str:
    """Return the entry of `reg` for a register: the first used part of the same full register."""
    if not number:
        return NOTHING
    for register, _ in used:
        if full_registers()[register] == full_registers()[number]:
            return names("Register")[register]
    return names("Register")[_parent(number)]


def _parent(number: int) -> int:
    """Return the 16-bit register of an 8-bit one (for AL and AH: AX); others stay as they are."""
    name, registers = names("Register"), full_registers()
    if number > name.index("R15L"):
        return number
    words = range(name.index("AX"), name.index("EAX"))
    return next(word for word in words if registers[word] == registers[number])


def _or_nothing(name: str) -> str:
    return NOTHING if name == "NONE" else name
