"""Vocabularies of x86 columns: lists of tokens, closed or counted, and their frozen files."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from tokmill.base.errors import TokmillError
from tokmill.base.headers import loads_json
from tokmill.store.vocab import Vocabulary, find_roles
from tokmill.x86.tokens.rules import COLUMNS

SPECIALS = ("[PAD]", "[SEP]", "[CLS]", "[UNK]", "[MASK]")
"""The ids 0 to 4 of every column."""
UNKNOWN = SPECIALS.index("[UNK]")


class TokenList:
    """The vocabulary of one column: the five special tokens, then all others, sorted.

    Attributes:
        column: which of the six streams.
        rules: the rules that made the tokens.
        tokens: by id.
        counts: occurrences of each token; None for a closed list.
    """

    def __init__(
        self, column: str, rules: str, tokens: Sequence[str], counts: Sequence[int] | None = None
    ) -> None:
        self.column, self.rules = column, rules
        self.tokens = list(tokens)
        self.counts = None if counts is None else list(counts)

    @classmethod
    def of(cls, column: str, rules: str, tokens: Iterable[str]) -> Self:
        return cls(column, rules, [*SPECIALS, *sorted(set(tokens) - set(SPECIALS))])

    @classmethod
    def counted(
        cls, column: str, rules: str, counts: Mapping[str, int], min_count: int = 1
    ) -> Self:
        """Make a list of the tokens that occur at least `min_count` times."""
        kept = (token for token, count in counts.items() if count >= min_count)
        result = cls.of(column, rules, kept)
        result.counts = [counts.get(token, 0) for token in result.tokens]
        return result

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def file(self) -> str:
        return f"{self.column}.json"

    def to_json(self) -> bytes:
        """Return the content of the frozen file; equal lists give equal bytes."""
        data: dict[str, Any] = {"column": self.column, "rules": self.rules, "tokens": self.tokens}
        if self.counts is not None:
            data["counts"] = self.counts
        return (json.dumps(data, ensure_ascii=False, indent=0) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes, where: str = "") -> Self:
        """Read a frozen file; raises `TokmillError` if it is not valid."""
        try:
            data = loads_json(raw)
            result = cls(data["column"], data["rules"], data["tokens"], data.get("counts"))
            good = (
                result.column in COLUMNS
                and isinstance(result.rules, str)
                and all(isinstance(token, str) for token in result.tokens)
                and tuple(result.tokens[: len(SPECIALS)]) == SPECIALS
                and len(result.ids) == len(result.tokens)
                and (result.counts is None or len(result.counts) == len(result.tokens))
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            good = False
        if not good:
            raise TokmillError(
                "not a vocabulary of an x86 column, which is an object with column, rules and "
                f"tokens, the first of which are {' '.join(SPECIALS)}",
                where=where,
                hint="`tokmill vocab import` reads lists of other forms",
            )
        return result

    def vocabulary(self) -> tuple[Vocabulary, bytes]:
        """Return the record of this vocabulary for a store, and the content of its file."""
        raw = self.to_json()
        roles = find_roles({token: self.ids[token] for token in SPECIALS}, where=self.file)
        digest = hashlib.sha256(raw).hexdigest()
        return Vocabulary(file=self.file, sha256=digest, size=len(self), roles=roles), raw


Vocabularies = dict[str, TokenList]
"""Column → its vocabulary."""


@functools.cache
def closed() -> Vocabularies:
    """Return the closed vocabularies of the `tokmill` rules.

    They have every token that the rules can make from instructions that iced-x86 1.21 decodes. The
    list is a file of this package, so it does not depend on the installed version.
    """
    raw = (
        importlib.resources.files("tokmill.x86.tokens.vocabularies")
        .joinpath("closed_tokens.json")
        .read_bytes()
    )
    lists = json.loads(raw)
    return {column: TokenList.of(column, "tokmill", lists[column]) for column in COLUMNS}


def counted(
    parts: Iterable[Mapping[str, Mapping[str, int]]], rules: str, min_count: int = 1
) -> Vocabularies:
    """Return vocabularies of counted tokens.

    Args:
        parts: for each program, column → token → count, as from `Templates.counts`, in any order.
        rules: the rules that made the tokens.
        min_count: tokens that occur less often are left out.
    """
    sums: dict[str, Counter[str]] = {column: Counter() for column in COLUMNS}
    for part in parts:
        for column, counts in part.items():
            sums[column].update(counts)
    return {
        column: TokenList.counted(column, rules, counts, min_count)
        for column, counts in sums.items()
    }
