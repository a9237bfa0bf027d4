"""The rules `bytes`: the raw bytes of instructions, one column, nothing interpreted."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

from tokmill.errors import UsageError
from tokmill.x86.tokens.rules import BYTE, Tokens
from tokmill.x86.tokens.vocabulary import TokenList

if TYPE_CHECKING:
    from iced_x86 import Instruction


class ByteRules:
    """One token a byte, so numbers, registers and opcodes all stand as they are encoded."""

    name: ClassVar[str] = "bytes"
    version: ClassVar[int] = 1
    bad: ClassVar[Tokens | None] = None
    columns: ClassVar[tuple[str, ...]] = (BYTE,)

    def __init__(self, bits: int = 64) -> None:
        self.bits = bits

    def tokens(self, instruction: Instruction) -> Tokens:
        """Refuse: there are no six streams."""
        raise UsageError(
            "the rules bytes make one column, not six streams",
            hint="`tokmill build x86 --rules bytes` makes a store; other rules make streams",
        )


@functools.cache
def byte_list() -> TokenList:
    """Return the vocabulary: special tokens, then `00` to `ff`, so byte b has the id 5 + b."""
    return TokenList.of(BYTE, ByteRules.name, [f"{value:02x}" for value in range(256)])
