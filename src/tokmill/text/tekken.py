"""Mistral's `tekken.json`: ranks of tokens as in tiktoken, after a block of special tokens.

Format: mistral-common, `tokens/tokenizers/tekken.py` (versions v3 and later). `config` has the
pattern, the number of ids (`default_vocab_size`) and the number of special tokens
(`default_num_special_tokens`, the first ids). `vocab` lists tokens by rank, more than are used. The
id of a token is its rank plus the number of special tokens.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from tokmill.errors import TokmillError
from tokmill.headers import loads_json
from tokmill.text import tokenizer_json

MOST_SPECIAL = 1 << 16
USUAL_SPECIALS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
"""The first special tokens in files that do not list them."""


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def is_tekken(raw: bytes) -> bool:
    """Say whether a JSON file looks like a tekken.json."""
    return b'"token_bytes"' in raw and b'"default_num_special_tokens"' in raw


def to_tokenizer_json(raw: bytes, where: str) -> dict[str, Any]:
    """Turn the bytes of a tekken.json into the content of a tokenizer.json with equal ids.

    Raises `TokmillError` for another file, or one that contradicts itself.
    """
    try:
        file = loads_json(raw, _File)
    except ValueError as error:
        raise _broken(str(error), where) from None
    special, size = file.config.default_num_special_tokens, file.config.default_vocab_size
    inner = size - special
    if not 0 <= special <= MOST_SPECIAL or not 256 <= inner <= len(file.vocab):
        raise _broken(
            f"{size} ids, {special} of them special, do not fit {len(file.vocab)} tokens", where
        )
    ranks: dict[bytes, int] = {}
    for number, token in enumerate(file.vocab[:inner]):
        try:
            ranks[base64.b64decode(token.token_bytes, validate=True)] = number
        except (ValueError, binascii.Error):
            raise _broken(f"the token of rank {token.rank} is no base64", where) from None
        if token.rank != number:
            raise _broken(f"the token in place {number} has rank {token.rank}", where)
    if len(ranks) != inner:
        raise _broken("two ranks are of one token", where)
    names = {number: f"<SPECIAL_{number}>" for number in range(special)}
    given = file.special_tokens
    if given is None:
        names |= dict(enumerate(USUAL_SPECIALS[:special]))
    for one in given or []:
        if one.rank not in names:
            raise _broken(f"the special token {one.token_str!r} has rank {one.rank}", where)
        names[one.rank] = one.token_str
    if len({*names.values()}) != special:
        raise _broken("two special tokens have one name", where)
    return tokenizer_json.byte_level(
        {special + rank: token for token, rank in ranks.items()},
        tokenizer_json.merges_of_ranks(ranks),
        {name: number for number, name in names.items()},
        pattern=file.config.pattern,
        ignore_merges=True,
    )


def _broken(what: str, where: str) -> TokmillError:
    return TokmillError(
        f"this is no tekken.json: {what}", where=where, hint="fetch it again, or another tokenizer"
    )
