"""Vocabularies of stores: the file that maps tokens to ids, the number of ids, ids with a role."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from tokmill.base.errors import TokmillError, UsageError, nearest

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
    """The vocabulary of a column, as plan and manifest describe it; `file` holds the tokens."""

    file: Annotated[str, msgspec.Meta(pattern=r"\A(?!\.)[^/\x00]+\Z")]
    """Name in `vocab/`, never a path."""
    sha256: str
    size: int
    """Largest id + 1, including added tokens."""
    roles: dict[str, int] = {}

    @property
    def coder(self) -> str:
        """Kind of the class that turns text into ids and back (`plugins.CODERS`): a tokenizer of
        text, or "x86" for lists of tokens.
        """
        return "tokenizer" if self.file.startswith("tokenizer") else "x86"

    def role(self, name: str) -> int:
        """Return the id of a role; raises `TokmillError` if no token has it."""
        if name not in self.roles:
            roles = ", ".join(f"{role}={number}" for role, number in self.roles.items())
            raise TokmillError(
                f"the vocabulary has no {name!r} token (roles: {roles or 'none'})",
                where=self.file,
                hint=f"add one when training the tokenizer, or name it: --set roles.{name}='TOKEN'",
            )
        return self.roles[name]


LEARNED = "learned.json"
"""File beside a tokenizer that a build has learned; holds `Learned`."""


class Learned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a tokenizer was learned, and name → sha256 of the files beside it."""

    vocab_size: int
    specials: tuple[str, ...] = ("<|endoftext|>",)
    pattern: str = "gpt2"
    tie_break: str = "first"
    sha256: str = ""
    """sha256 of the tokenizer.json, to notice a different one."""
    files: dict[str, str] = {}


def find_roles(
    specials: Mapping[str, int], overrides: Mapping[str, str] | None = None, where: str = ""
) -> dict[str, int]:
    """Return role → id, from the names of special tokens; `overrides` (role → token) win."""
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
                hint=nearest(token, [*specials][:200]),
            )
        roles[role] = specials[token]
    return dict(sorted(roles.items()))
