"""The rules `numbers`: those of `tokmill`, and a seventh stream with the values of numbers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

from tokmill.x86.tokens.rules import COLUMNS, NUMBER, Tokens
from tokmill.x86.tokens.tokmill_rules import NOTHING, TokmillRules
from tokmill.x86.tokens.vocabulary import TokenList, Vocabularies, closed

if TYPE_CHECKING:
    from iced_x86 import Instruction

LOWEST, HIGHEST = -256, 1023
"""Numbers that have a token of their own."""
BUCKETS = 1 << 12
"""Tokens of all other numbers, `#000` to `#fff`."""
_MASK = (1 << 64) - 1


class NumberRules(TokmillRules):
    """Numbers stand beside their classes, the large ones hashed.

    Without a number are branches, addresses relative to RIP, offsets in the stack (from RSP, and
    negative ones from RBP), and what is added to RSP: they say where something lies, not what is
    computed.
    """

    name: ClassVar[str] = "numbers"
    version: ClassVar[int] = 1
    columns: ClassVar[tuple[str, ...]] = (*COLUMNS, NUMBER)
    values: ClassVar[bool] = True

    def tokens(self, instruction: Instruction) -> Tokens:
        """Return the tokens of an instruction."""
        line, found = self.line(instruction)
        numbers = [NOTHING] * len(line.asm)
        for place, value in line.values.items():
            numbers[place] = word(value)
        return {**found, "number": numbers}


def word(value: int) -> str:
    """Return the token of a number: itself, or `#` and a hash of its 64 bits (splitmix64)."""
    if LOWEST <= value <= HIGHEST:
        return str(value)
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    value ^= value >> 31
    return f"#{value % BUCKETS:03x}"


@functools.cache
def number_lists() -> Vocabularies:
    """Return the closed vocabularies: those of `tokmill`, and that of the numbers."""
    exact = [str(value) for value in range(LOWEST, HIGHEST + 1)]
    hashed = [f"#{value:03x}" for value in range(BUCKETS)]
    six = {name: TokenList(name, NumberRules.name, one.tokens) for name, one in closed().items()}
    return {**six, NUMBER: TokenList.of(NUMBER, NumberRules.name, [NOTHING, *exact, *hashed])}
