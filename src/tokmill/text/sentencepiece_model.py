"""SentencePiece `.model` files: read without a library, turned into a tokenizer.json.

Format: a protobuf message `ModelProto` (google/sentencepiece, `sentencepiece_model.proto`); only
the fields that decide ids are read. BPE with byte fallback is known; Unigram and others are refused
by name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokmill.errors import TokmillError
from tokmill.text.tokenizer_json import OUTER_SPACES, SPACE

_KINDS = {1: "Unigram", 2: "BPE", 3: "Word", 4: "Char"}
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


class Piece(NamedTuple):
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


def to_tokenizer_json(raw: bytes, where: str) -> dict[str, Any]:
    """Turn the bytes of a `.model` file into the content of a tokenizer.json with equal ids.

    Raises `TokmillError` for bytes that are no SentencePiece model and for kinds of model that a
    tokenizer.json cannot say or this reader does not know.
    """
    try:
        pieces, trainer, normalizer = _read(raw)
    except (IndexError, ValueError, struct.error):
        raise TokmillError(
            "this is no SentencePiece model", where=where, hint="the file may be cut short"
        ) from None
    if not pieces:
        raise TokmillError(
            "this is no SentencePiece model: it has no pieces",
            where=where,
            hint="name the .model file that SentencePiece wrote",
        )
    kind = _KINDS.get(_number(trainer, 3, 1), "unknown")
    if kind != "BPE":
        raise TokmillError(
            f"this is a SentencePiece {kind} model; only BPE can be read",
            where=where,
            hint="convert it to tokenizer.json with Hugging Face transformers",
        )
    for field, default, refused, what in (
        (35, 0, 0, "without byte_fallback"),
        (24, 0, 1, "with treat_whitespace_as_suffix"),
    ):
        if _number(trainer, field, default) == refused:
            raise TokmillError(
                f"a SentencePiece model {what} cannot be read",
                where=where,
                hint="train it with --byte_fallback=true and the usual white space",
            )
    if not _number(normalizer, 5, 1):
        raise TokmillError(
            "a SentencePiece model without escape_whitespaces cannot be read",
            where=where,
            hint="take the tokenizer.json of the same model",
        )
    if normalizer.get(2):
        name = normalizer.get(1, b"")
        raise TokmillError(
            f"the SentencePiece normalization {bytes(name).decode(errors='replace')!r} cannot be "
            "read: a tokenizer.json says it only nearly (Hugging Face normalizes by grapheme)",
            where=where,
            hint="train it with --normalization_rule_name=identity, as Llama and Gemma are",
        )
    if _number(normalizer, 3, 1) and any(piece.kind == _USER for piece in pieces):
        raise TokmillError(
            "user-defined symbols together with add_dummy_prefix cannot be read: Hugging Face puts "
            "the prefix behind each of them",
            where=where,
            hint="train it with --add_dummy_prefix=false",
        )
    if any(piece.kind == _UNUSED for piece in pieces):
        raise TokmillError(
            "a SentencePiece model with unused pieces cannot be read",
            where=where,
            hint="take the tokenizer.json of the same model",
        )
    return _tokenizer_json(pieces, trainer, normalizer)


def _tokenizer_json(
    pieces: list[Piece], trainer: dict[int, int | bytes], normalizer: dict[int, int | bytes]
) -> dict[str, Any]:
    vocab = {piece.text: number for number, piece in enumerate(pieces)}
    unknown = trainer.get(45, b"<unk>")
    steps: list[dict[str, Any]] = []
    if _number(normalizer, 4, 1):
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
        steps.append({"type": "Replace", "pattern": {"Regex": OUTER_SPACES}, "content": ""})
    dummy_prefix = bool(_number(normalizer, 3, 1))
    if dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": piece.text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": piece.kind != _USER,
            }
            for number, piece in enumerate(pieces)
            if piece.kind in (_CONTROL, _UNKNOWN, _USER)
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown.decode() if isinstance(unknown, bytes) else "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(pieces, vocab),
        },
    }


def _merges(pieces: list[Piece], vocab: dict[str, int]) -> list[list[str]]:
    # SentencePiece merges any two neighbours that make a piece, the best score first; a merge list
    # says the same when it has every split of every piece in that order.
    mergeable = {p.text for p in pieces if p.kind == _NORMAL}
    ranked = [
        (-piece.score, vocab[piece.text], cut)
        for piece in pieces
        if piece.kind == _NORMAL
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in mergeable and piece.text[cut:] in mergeable
    ]
    ranked.sort()
    return [[pieces[number].text[:cut], pieces[number].text[cut:]] for _, number, cut in ranked]


def _read(raw: bytes) -> tuple[list[Piece], dict[int, int | bytes], dict[int, int | bytes]]:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(raw):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            fields = dict(_fields(value))
            text, score = fields.get(1, b""), fields.get(2, bytes(4))
            if not isinstance(text, bytes) or not isinstance(score, bytes):
                raise ValueError
            pieces.append(
                Piece(text.decode(), struct.unpack("<f", score)[0], _number(fields, 3, _NORMAL))
            )
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return pieces, trainer, normalizer


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value): integers for varints, bytes for everything else."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        wire = key & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if wire == 2:
            length, place = _varint(message, place)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError
        if place + length > len(message):
            raise ValueError
        yield key >> 3, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError


def _number(fields: dict[int, int | bytes], field: int, default: int) -> int:
    value = fields.get(field, default)
    return value if isinstance(value, int) else default
