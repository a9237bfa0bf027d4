"""SentencePiece `.model` files, turned into a tokenizer.json.

A file is a protobuf message `ModelProto` (google/sentencepiece, `sentencepiece_model.proto`), whose
reader comes with the package. BPE with byte fallback is known; Unigram and others are refused by
name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.text.tokenizers.tokenizer_json import OUTER_SPACES, SPACE, added_token

_KINDS = {1: "Unigram", 2: "BPE", 3: "Word", 4: "Char"}
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


class Piece(NamedTuple):
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


def to_tokenizer_json(raw: bytes, where: str) -> dict[str, Any]:
    """Turn the bytes of a `.model` file into the content of a tokenizer.json with equal ids.

    Raises `TokmillError` for bytes that are no SentencePiece model, and for models that this reader
    does not know or a tokenizer.json cannot express.
    """
    library = plugins.require("sentencepiece.sentencepiece_model_pb2")
    broken = plugins.require("google.protobuf.message").DecodeError
    model = library.ModelProto()
    try:
        model.ParseFromString(raw)
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        pieces = [Piece(piece.piece, piece.score, piece.type) for piece in model.pieces]
        texts = [trainer.unk_piece, normalizer.name, *(piece.text for piece in pieces)]
        if not all(isinstance(text, str) for text in texts):
            # protobuf gives text that is not UTF-8 as bytes.
            raise ValueError
    except (broken, ValueError):
        raise TokmillError(
            "this is no SentencePiece model", where=where, hint="the file may be cut short"
        ) from None
    if not pieces:
        raise TokmillError(
            "this is no SentencePiece model: it has no pieces",
            where=where,
            hint="name the .model file that SentencePiece wrote",
        )
    kind = _KINDS.get(trainer.model_type, "unknown")
    if kind != "BPE":
        raise TokmillError(
            f"this is a SentencePiece {kind} model; only BPE can be read",
            where=where,
            hint="convert it to tokenizer.json with Hugging Face transformers",
        )
    for refused, what in (
        (not trainer.byte_fallback, "without byte_fallback"),
        (trainer.treat_whitespace_as_suffix, "with treat_whitespace_as_suffix"),
    ):
        if refused:
            raise TokmillError(
                f"a SentencePiece model {what} cannot be read",
                where=where,
                hint="train it with --byte_fallback=true and the usual white space",
            )
    if not normalizer.escape_whitespaces:
        raise TokmillError(
            "a SentencePiece model without escape_whitespaces cannot be read",
            where=where,
            hint="take the tokenizer.json of the same model",
        )
    if normalizer.precompiled_charsmap:
        raise TokmillError(
            f"the SentencePiece normalization {normalizer.name!r} cannot be read: a "
            "tokenizer.json says it only nearly (Hugging Face normalizes by grapheme)",
            where=where,
            hint="train it with --normalization_rule_name=identity, as Llama and Gemma are",
        )
    if normalizer.add_dummy_prefix and any(piece.kind == _USER for piece in pieces):
        raise TokmillError(
            "user-defined symbols together with add_dummy_prefix cannot be read: Hugging Face puts "
            "the prefix after each of them",
            where=where,
            hint="train it with --add_dummy_prefix=false",
        )
    if normalizer.remove_extra_whitespaces and any(
        piece.kind == _USER and (" " in piece.text or piece.text.endswith(SPACE))
        for piece in pieces
    ):
        raise TokmillError(
            "user-defined symbols with spaces together with remove_extra_whitespaces cannot be "
            "read: a tokenizer.json cannot say which spaces are left",
            where=where,
            hint="train it with --remove_extra_whitespaces=false, as Gemma is",
        )
    if any(piece.kind == _UNUSED for piece in pieces):
        raise TokmillError(
            "a SentencePiece model with unused pieces cannot be read",
            where=where,
            hint="take the tokenizer.json of the same model",
        )
    return _tokenizer_json(pieces, trainer, normalizer)


def _tokenizer_json(pieces: list[Piece], trainer: Any, normalizer: Any) -> dict[str, Any]:
    vocab = {piece.text: number for number, piece in enumerate(pieces)}
    steps: list[dict[str, Any]] = []
    if normalizer.remove_extra_whitespaces:
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
        steps.append({"type": "Replace", "pattern": {"Regex": OUTER_SPACES}, "content": ""})
    dummy_prefix = normalizer.add_dummy_prefix
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
        # User-defined symbols are found in the normalized text, in which no space is left.
        "added_tokens": [
            added_token(number, piece.text, special=piece.kind != _USER)
            | {"normalized": piece.kind == _USER}
            for number, piece in enumerate(pieces)
            if piece.kind in (_CONTROL, _UNKNOWN) or (piece.kind == _USER and " " not in piece.text)
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": trainer.unk_piece,
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
    # SentencePiece merges any two neighbours that form a piece, best score first. A merge list with
    # every split of every piece in this order has the same effect.
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
