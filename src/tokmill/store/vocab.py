"""Frozen vocabularies: which file maps tokens to ids, how many ids there are, which have a role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from tokmill.errors import TokmillError, UsageError, nearest

ROLES = ("eot", "bos", "pad", "unk", "mask", "cls", "sep")

ROLE_NAMES: dict[str, str] = {
    "<|endoftext|>": "eot",
    "<|end_of_text|>": "eot",
    "</s>": "eot",
    "<eos>": "eot",
    "<|startoftext|>": "bos",
    "<|begin_of_text|>": "bos",
    "<s>": "bos",
    "<bos>": "bos",
    "<|pad|>": "pad",
    "[PAD]": "pad",
    "<pad>": "pad",
    "[UNK]": "unk",
    "<unk>": "unk",
    "<|unk|>": "unk",
    "[MASK]": "mask",
    "<mask>": "mask",
    "[CLS]": "cls",
    "[SEP]": "sep",
}
"""Special tokens whose role follows from their name."""


class Vocabulary(msgspec.Struct, frozen=True):
    """What a store says of a column's vocabulary; the tokens themselves stand in `file`."""

    file: Annotated[str, msgspec.Meta(pattern=r"\A(?!\.)[^/\x00]+\Z")]
    """Name below `vocab/`, never a path."""
    sha256: str
    size: int
    """Largest id + 1, added tokens counted."""
    roles: dict[str, int] = {}

    @property
    def coder(self) -> str:
        """Who turns text into its ids and back: a line of `plugins.CODERS`.

        A tokenizer of text, or "x86", whose vocabulary is a list of tokens.
        """
        return "tokenizer" if self.file.startswith("tokenizer") else "x86"

    def role(self, name: str) -> int:
        """Return the id of a role; an absent role is an error (id 0 is an id like any other)."""
        if name not in self.roles:
            known = ", ".join(f"{role}={number}" for role, number in self.roles.items())
            raise TokmillError(
                f"the vocabulary has no {name!r} token (roles: {known or 'none'})",
                where=self.file,
                hint=f"add one when training the tokenizer, or name it: --set roles.{name}='TOKEN'",
            )
        return self.roles[name]


LEARNED = "learned.json"
"""Beside a tokenizer that was learned for a build: how."""


class Learned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a tokenizer was learned, and the sha256 of the files beside it (by name)."""

    vocab_size: int
    specials: tuple[str, ...] = ("<|endoftext|>",)
    pattern: str = "gpt2"
    tie_break: str = "first"
    sha256: str = ""
    """Of the tokenizer.json, so that another one is never taken for it; "": an old note."""
    files: dict[str, str] = {}


def find_roles(
    specials: Mapping[str, int], overrides: Mapping[str, str] | None = None, where: str = ""
) -> dict[str, int]:
    """Return role → id from the names of special tokens, overruled by role → token.

    Raises `TokmillError` when two tokens claim one role, `UsageError` for an unknown role or token.
    """
    overrides = overrides or {}
    roles: dict[str, int] = {}
    claims: dict[str, list[str]] = {}
    for token in specials:
        if token in ROLE_NAMES:
            claims.setdefault(ROLE_NAMES[token], []).append(token)
    for role, tokens in claims.items():
        if role in overrides:
            continue
        if len(tokens) > 1:
            raise TokmillError(
                f"the tokens {' and '.join(map(repr, tokens))} both look like the {role!r} token",
                where=where,
                hint=f"choose one: --set roles.{role}={tokens[0]!r}",
            )
        roles[role] = specials[tokens[0]]
    for role, token in overrides.items():
        if role not in ROLES:
            raise UsageError(f"no role is called {role!r}", hint=nearest(role, ROLES))
        if token not in specials:
            raise UsageError(
                f"the vocabulary has no special token {token!r} for the role {role!r}",
                where=where,
                hint=nearest(token, _first(specials)),
            )
        roles[role] = specials[token]
    return dict(sorted(roles.items()))


def _first(names: Iterable[str], most: int = 200) -> list[str]:
    return [name for _, name in zip(range(most), names, strict=False)]
