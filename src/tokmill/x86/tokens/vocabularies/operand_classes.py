"""Smaller vocabularies of whole operands: tokens that differ in a number or a register become one.

For lists whose tokens are whole operands, such as `dword [rax+0x10]`. The lists of the rules
`tokmill` have no such tokens.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tokmill.x86.tokens.vocabularies.vocabulary import SPECIALS, TokenList, Vocabularies

NUMBER = re.compile(r"(?<![\w*.])(?:0x[0-9a-f]+|[0-9][0-9a-f]*h|[0-9]+)(?![\w.])", re.IGNORECASE)
"""A number that stands alone; the scale in `rax*4` is none."""
REGISTER = re.compile(
    r"(?<!\w)(?:[re]?(?:ax|bx|cx|dx|si|di|bp|sp|ip)|[abcd][hl]|[sd]il|[sb]pl|r[0-9]+[dwb]?"
    r"|[xyz]mm[0-9]+)(?!\w)",
    re.IGNORECASE,
)
MEMORY = re.compile(r"(?<!\w)(?:(\w+)\s+(?:ptr\s+)?)?((?:\w\w:)?)\[([^\[\]]*)\]", re.IGNORECASE)
"""The size in words, a segment before the bracket, and what stands in brackets."""


class Compressed(NamedTuple):
    """Smaller lists, and what became of each token of the old ones."""

    lists: Vocabularies
    became: dict[str, dict[str, str]]
    """Column → old token → new token, of those that changed."""


def operand_class(token: str) -> str:
    """Return a token with its numbers and the registers of its memory operands by class.

    `dword [rax+0x10]` becomes `MEM_dword[REG+IMM]`, `0x401000` becomes `IMM`.
    """

    def memory(match: re.Match[str]) -> str:
        size, segment, place = match.groups()
        place = REGISTER.sub("REG", place.replace(" ", ""))
        return f"MEM_{size or 'any'}{segment and '_' + segment[:-1]}[{place}]"

    return MEMORY.sub(memory, NUMBER.sub("IMM", token))


def compressed(vocabularies: Mapping[str, TokenList]) -> Compressed:
    """Return lists (column → list) in which each token is its `operand_class`.

    Special tokens stay. Counts of tokens that become one are added.
    """
    lists: Vocabularies = {}
    became: dict[str, dict[str, str]] = {}
    for column, tokens in vocabularies.items():
        sums: Counter[str] = Counter()
        changed: dict[str, str] = {}
        for place, token in enumerate(tokens.tokens):
            new = token if token in SPECIALS else operand_class(token)
            if new != token:
                changed[token] = new
            sums[new] += 0 if tokens.counts is None else tokens.counts[place]
        lists[column] = TokenList.counted(column, tokens.rules, sums, min_count=0)
        if tokens.counts is None:
            lists[column].counts = None
        became[column] = changed
    return Compressed(lists, became)
