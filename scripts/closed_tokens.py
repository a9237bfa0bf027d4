"""Write the closed vocabularies of the `tokmill` rules, out of iced-x86's enumerations.

Usage: python scripts/closed_tokens.py

Writes src/tokmill/x86/tokens/vocabularies/closed_tokens.json: column → every token that the rules
can emit, special tokens left out. The file is frozen: another list is another version of the rules
(`TokmillRules.version`), as ids change with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import iced_x86

from tokmill.x86.tokens import tokmill_rules as rules
from tokmill.x86.tokens.canonical import flags, full_registers, names

COUNTS = (0, 1, 8, 9, 17, 18, 31, 32, 33, 64)
"""Immediates that shifts and rotates of some size tell apart."""


def closed_tokens() -> dict[str, list[str]]:
    """Return column → tokens, sorted."""
    registers = [name for name in names("Register") if name != "NONE"]
    full = {names("Register")[number] for number in full_registers()} - {"NONE"}
    mnemonics = set(names("Mnemonic")) - {"INVALID"}
    kinds = set(names("OpCodeOperandKind")) - {"NONE"}
    lists = {
        "asm": {
            *(*mnemonics, *registers, *rules.PREFIXES, *rules.SIZE_WORDS.values(), rules.ANY_SIZE),
            *(*rules.SCALES.values(), "0", "1", "-1", *rules.NUMBERS),
            *(f"-{word}" for word in rules.NUMBERS),
            *(rules.BROADCAST, rules.ZEROING, rules.SAE),
            *(set(names("RoundingControl")) - {"NONE"}),
        },
        "mne": mnemonics,
        "type": {*kinds, rules.NOTHING, rules.IMPLICIT, rules.DECORATOR},
        "reg": {*full, rules.NOTHING},
        "rw": {*(set(names("OpAccess")) - {"NONE"}), rules.NOTHING},
        "eflag": {*all_flags(), rules.NOTHING},
    }
    return {column: sorted(tokens) for column, tokens in lists.items()}


def all_flags() -> set[str]:
    """Return what `flags` says of any instruction: it reads code, equal registers and a count."""
    found = set()
    for code in range(1, len(names("Code"))):
        kinds = iced_x86.OpCodeInfo(code)
        for other in (iced_x86.Register.EAX, iced_x86.Register.ECX):
            for count in COUNTS:
                instruction = iced_x86.Instruction()
                instruction.code = code
                instruction.op0_register = iced_x86.Register.EAX
                instruction.op1_register = other
                for place in range(kinds.op_count):
                    if names("OpCodeOperandKind")[kinds.op_kind(place)].startswith("IMM"):
                        instruction.set_op_kind(place, iced_x86.OpKind.IMMEDIATE8)
                        instruction.immediate8 = count
                found.add(flags(instruction))
    return found - {""}


def main() -> None:
    """Write the file."""
    path = Path(__file__).parent.parent / "src/tokmill/x86/tokens/vocabularies/closed_tokens.json"
    path.write_text(json.dumps(closed_tokens(), indent=0) + "\n")


if __name__ == "__main__":
    main()
