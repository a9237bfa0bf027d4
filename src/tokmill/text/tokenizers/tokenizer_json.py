"""The `tokenizer.json` format: read with checks, write in one canonical form.

Format: Hugging Face `tokenizers`. Byte-level files spell each byte as one printable character
(GPT-2's `bytes_to_unicode`).
"""

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.base.headers import loads_json
from tokmill.text.tokenizers.patterns import GPT2

# Printable characters first, then the others: the order of Hugging Face's alphabet, so that ids
# (and with them the tie-break "first") are the same.
BYTE_ORDER = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_ORDER += [byte for byte in range(256) if byte not in BYTE_ORDER]
"""The 256 bytes in the order in which they get ids."""
_SAME = 188
ALIASES = {
    byte: chr(byte) if place < _SAME else chr(256 + place - _SAME)
    for place, byte in enumerate(BYTE_ORDER)
}
"""Byte → the character that stands for it: itself where printable, else one from U+0100 on."""

_BYTES = {alias: byte for byte, alias in ALIASES.items()}

SPACE = "\u2581"
"""SentencePiece's sign for a space."""

_HELD = f"\ufdd0{secrets.token_hex(8)} "
"""Begins names that no text has."""
FORMATS = "a tokenizer.json or its folder, or a vocab.txt"
"""All files that are read as tokenizers, for hints."""


def alias(token: bytes) -> str:
    """Spell bytes as a byte-level file does."""
    return "".join(map(ALIASES.__getitem__, token))


def unalias(spelled: str) -> bytes | None:
    """Return the bytes of a byte-level spelling; None where a character stands for no byte."""
    try:
        return bytes(map(_BYTES.__getitem__, spelled))
    except KeyError:
        return None


def byte_level(
    vocab: dict[int, bytes],
    merges: Sequence[tuple[bytes, bytes]],
    specials: Mapping[str, int],
    *,
    pattern: str = GPT2,
) -> dict[str, Any]:
    """Make the content of a byte-level BPE tokenizer.json.

    Args:
        vocab: id → bytes; the ids of special tokens may stand here too.
        merges: pairs of tokens, first learned first.
        specials: special token → id; an id in `vocab` must have the token's UTF-8 bytes.
        pattern: how words are cut; GPT-2's is written as the plain `ByteLevel` step.
    """
    special_ids = {number: token for token, number in specials.items()}
    # Special tokens are in the model's vocabulary too, else `tokenizers` gives them other ids.
    by_id = dict(sorted((vocab | {n: t.encode() for n, t in special_ids.items()}).items()))
    spelled = _spelled(by_id, special_ids)
    byte_step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": pattern == GPT2,
    }
    split_step = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return content(
        [added_token(n, token) for n, token in sorted(special_ids.items())],
        pre_tokenizer=byte_step
        if pattern == GPT2
        else {"type": "Sequence", "pretokenizers": [split_step, byte_step]},
        decoder={
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        model={
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": spelled,
            "merges": [[alias(left), alias(right)] for left, right in merges],
        },
    )


def content(added: Sequence[Mapping[str, Any]], **parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json; a part that is not given is null."""
    keys = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [*added]}
    return head | {key: parts.get(key) for key in keys}


def _spelled(by_id: Mapping[int, bytes], special_ids: Mapping[int, str]) -> dict[str, int]:
    """Return each token as a tokenizer.json spells it → its id, the first of equal ones."""
    spelled: dict[str, int] = {}
    for number, token in by_id.items():
        name = special_ids.get(number)
        text = alias(token) if name is None else name
        if text not in spelled:
            spelled[text] = number
        elif spelled[text] in special_ids or name is not None:
            raise TokmillError(
                f"the special token {text!r} is spelled like the learned token {token!r} in a "
                "tokenizer.json",
                hint="give the special token another name: <|name|>",
            )
    return spelled


def added_token(number: int, content: str, *, special: bool = True) -> dict[str, Any]:
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def template(
    before: Sequence[str], after: Sequence[str], vocab: Mapping[str, int]
) -> dict[str, Any]:
    """Return the post-processor that puts tokens around texts, such as [CLS] and [SEP]."""

    def around(letter: str, kind: int, front: Sequence[str]) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": letter, "type_id": kind}}
        one = {name: {"SpecialToken": {"id": name, "type_id": kind}} for name in (*front, *after)}
        return [*(one[name] for name in front), text, *(one[name] for name in after)]

    first = around("A", 0, before)
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + around("B", 1, ()),
        "special_tokens": {
            name: {"id": name, "ids": [vocab[name]], "tokens": [name]} for name in (*before, *after)
        },
    }


def parse(raw: bytes | str, where: str) -> dict[str, Any]:
    """Read and check the content of a tokenizer.json."""
    try:
        data: Any = loads_json(raw)
    except ValueError as error:
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else error
        raise no_tokenizer(f"this is not a tokenizer.json: {why}", where) from None
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        what = "this JSON is not a tokenizer.json: it has no model with a vocabulary"
        raise no_tokenizer(what, where)
    # Files older than tokenizers 0.14 name no type.
    if "type" not in model:
        model["type"] = "BPE" if "merges" in model else "WordPiece"
    if model["type"] == "BPE":
        model["merges"] = _pairs(model.get("merges") or [], where)
    for token in data.get("added_tokens") or []:
        if (
            not isinstance(token, dict)
            or not isinstance(token.get("id"), int)
            or not isinstance(token.get("content"), str)
        ):
            raise _broken(f"an added token has no id or content: {token!r}", where)
    _check_vocabulary(data, where)
    for key, parts in STEPS.items():
        if not _is_step(data.get(key), parts):
            raise _broken(f"its {key} is not a step with a type", where)
        if (longer := math.prod(map(_growth, flatten(data.get(key), parts)))) > MOST_GROWTH:
            raise TokmillError(
                f"the steps `Replace` of its {key} may make a text {longer:.3g} times as long",
                where=where,
                hint=f"usual ones make it up to four times as long; {MOST_GROWTH:,} are allowed",
            )
    return dict(data)


def settings_without_model(raw: bytes) -> dict[str, Any]:
    """Return what a valid tokenizer.json has besides the model, which is nearly all of it."""
    parts = loads_json(raw, dict[str, msgspec.Raw])
    return {key: loads_json(bytes(part)) for key, part in parts.items() if key != "model"}


def no_tokenizer(what: str, where: str) -> TokmillError:
    hint = f"give {FORMATS}; `save_pretrained` of transformers writes a tokenizer.json"
    return TokmillError(what, where=where, hint=hint)


def _broken(what: str, where: str) -> TokmillError:
    return TokmillError(what, where=where, hint="the file is broken: fetch it again")


def _pairs(merges: Any, where: str) -> list[list[str]]:
    if not isinstance(merges, list):
        raise _broken("the merges are no list", where)
    # Sets of types for speed: this takes much of the start of every build.
    pairs = [merge.split(" ") if type(merge) is str else merge for merge in merges]
    if (
        not {*map(type, pairs)} <= {list}
        or not {*map(len, pairs)} <= {2}
        or not {*map(type, chain.from_iterable(pairs))} <= {str}
    ):
        raise _broken("a merge is not a pair", where)
    return pairs


def _growth(step: Mapping[str, Any]) -> float:
    """Return how many times as long a step may make a text, in bytes."""
    content, pattern = step.get("content"), step.get("pattern")
    if step["type"] != "Replace" or not isinstance(content, str) or not isinstance(pattern, dict):
        return 1.0
    size, literal = len(content.encode("utf-8", "replace")), pattern.get("String")
    if literal:
        return max(1.0, size / len(literal.encode("utf-8", "replace")))
    return max(1.0, size + _may_be_empty(str(pattern.get("Regex") or "")))


def _may_be_empty(pattern: str) -> bool:
    """Say whether a regular expression may match between two characters."""
    try:
        return "(?" in pattern or re.search(pattern, "") is not None
    except (re.error, RecursionError, OverflowError):
        return True


STEPS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""Kind of step → key of the list of steps in a `Sequence`."""
MOST_GROWTH = 4096
"""How many times as long a normalizer or decoder may make a text."""
SPARSE, FEW = 16, 1 << 20
"""Largest id / number of tokens that is accepted, and the largest id that is always accepted."""


def _check_vocabulary(data: Mapping[str, Any], where: str) -> None:
    vocab, added = data["model"]["vocab"], data.get("added_tokens") or []
    if isinstance(vocab, dict):
        ids = list(vocab.values())
        if not {*map(type, ids)} <= {int}:
            token = next(token for token, number in vocab.items() if type(number) is not int)
            raise _broken(f"the id of {token[:80]!r} is not a whole number", where)
    else:
        if not all(isinstance(e, list) and len(e) == 2 and isinstance(e[0], str) for e in vocab):
            raise _broken("the vocabulary is not a list of tokens and scores", where)
        ids = list(range(len(vocab)))
    ids += [token["id"] for token in added]
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= max(FEW, SPARSE * len(ids)):
        raise TokmillError(
            f"the id {low if low < 0 else high} does not fit {len(ids):,} tokens",
            where=where,
            hint="ids count from 0 with few gaps, as tables have an entry for each id",
        )


def _is_step(step: Any, parts: str, deep: int = 0) -> bool:
    if step is None and not deep:
        return True
    if not isinstance(step, dict) or not isinstance(step.get("type"), str) or deep > 20:
        return False
    if step["type"] != "Sequence":
        return True
    inside = step.get(parts)
    return isinstance(inside, list) and all(_is_step(part, parts, deep + 1) for part in inside)


def canonical(data: Mapping[str, Any]) -> bytes:
    """Return a tokenizer.json in canonical form: vocabulary and added tokens ordered by id."""
    data = dict(data)
    data["added_tokens"] = sorted(data.get("added_tokens") or [], key=lambda token: token["id"])
    model = dict(data["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = dict(sorted(model["vocab"].items(), key=itemgetter(1, 0)))
    data["model"] = model
    try:
        return msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"
    except UnicodeEncodeError:
        return (json.dumps(data, ensure_ascii=True, indent=1) + "\n").encode()


def added_tokens(data: Mapping[str, Any], *, special_only: bool = False) -> dict[str, int]:
    return {
        token["content"]: token["id"]
        for token in data.get("added_tokens") or []
        if token.get("special") or not special_only
    }


def without_specials(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file with which text never becomes a special token; all other ids stay the same.

    No merge, whole word or piece of the model makes a special token. The unknown token stays, for
    text that the model has no token for.
    """
    special = added_tokens(data, special_only=True)
    data = dict(data)
    data["added_tokens"] = [t for t in data.get("added_tokens") or [] if not t.get("special")]
    data["post_processor"] = None
    model = dict(data["model"])
    if isinstance(model["vocab"], list):
        # Scores keep their places, which are the ids; no text has a piece of no characters.
        model["vocab"] = [
            ["" if special.get(token) == number else token, score]
            for number, (token, score) in enumerate(model["vocab"])
        ]
        return {**data, "model": model}
    hidden = {token for token, number in special.items() if model["vocab"].get(token) == number}
    others = [n for t, n in added_tokens(data).items() if t not in model["vocab"]]
    model["vocab"] = {t: number for t, number in model["vocab"].items() if t not in hidden}
    if (unknown := model.get("unk_token")) in hidden:
        model["vocab"][""], model["unk_token"] = special[unknown], ""
    # `tokenizers` counts the vocabulary to number the added tokens that are left.
    numbers = {n for n in special.values() if n < min(others, default=0)}
    model["vocab"] |= {f"{_HELD}{n}": n for n in numbers - set(model["vocab"].values())}
    if merges := model.get("merges"):
        inside = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [
            pair
            for pair in merges
            if pair[0] not in hidden
            and pair[1] not in hidden
            and pair[0] + pair[1][inside:] not in hidden
        ]
    return {**data, "model": model}


def template_tokens(tokenizer_json: bytes | str | Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids that the file's post-processor puts before and after a single text.

    The encoders never add them; sources add them if asked. Raises `TokmillError` for an unknown
    post-processor.
    """
    data = (
        tokenizer_json
        if isinstance(tokenizer_json, Mapping)
        else parse(tokenizer_json, "tokenizer.json")
    )
    try:
        return _template_tokens(data)
    except (KeyError, TypeError, IndexError, AttributeError):
        raise _template_error("is broken: it names tokens without ids") from None


def _template_error(what: str) -> TokmillError:
    hint = 'set "post_processor" to null to encode without it'
    return TokmillError(f"the post-processor {what}", where="tokenizer.json", hint=hint)


def _template_tokens(data: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    prefix: list[int] = []
    suffix: list[int] = []
    for step in flatten(data.get("post_processor"), "processors"):
        kind = step.get("type")
        before: list[int] = []
        after: list[int] = []
        if kind == "ByteLevel":
            continue
        if kind == "TemplateProcessing":
            specials, texts = step.get("special_tokens") or {}, []
            for piece in step.get("single") or []:
                if "Sequence" in piece:
                    texts.append(piece["Sequence"]["id"])
                else:
                    ids = specials[piece["SpecialToken"]["id"]]["ids"]
                    (after if texts else before).extend(ids)
            if texts != ["A"]:
                written = " ".join(f"${text}" for text in texts) or "nothing"
                raise _template_error(f"writes a text as {written}, not once")
        elif kind in ("RobertaProcessing", "BertProcessing"):
            before, after = [step["cls"][1]], [step["sep"][1]]
        else:
            raise _template_error(f"{kind!r} is not known")
        # A later step puts its tokens around those of the steps before.
        prefix, suffix = before + prefix, suffix + after
    return prefix, suffix


LOSSY = {
    *("Lowercase", "StripAccents", "BertNormalizer", "NFKC", "NFKD", "Nmt", "Precompiled"),
    *("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit", "Strip"),
}
"""Steps after which different texts are the same one, as in lower case or without their blanks."""
BLANK = ({"String": " "}, SPACE)
"""What is replaced, and by what, in tokenizers that spell blanks so."""


def lossy_step(raw: bytes) -> str:
    """Return the first step of a tokenizer.json after which different texts are equal, or ""."""
    data = settings_without_model(raw)
    keys = ("normalizer", "pre_tokenizer")
    steps = [step for key in keys for step in flatten(data.get(key), STEPS[key])]
    for step in steps:
        kept = step["type"] != "Replace" or (step["pattern"], step["content"]) == BLANK
        if step["type"] in LOSSY or step.get("behavior") == "Removed" or not kept:
            return str(step["type"])
    return ""


def flatten(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or post-processor, without sequences."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for part in step[key] for inner in flatten(part, key)]
    return [step]


def is_byte_level(data: Mapping[str, Any]) -> bool:
    """Say whether a file spells bytes as characters (`ALIASES`)."""
    return any(
        step.get("type") == "ByteLevel"
        for step in [
            *flatten(data.get("pre_tokenizer"), "pretokenizers"),
            *flatten(data.get("decoder"), "decoders"),
        ]
    )


def spelling_bytes(spelled: str, *, byte_level: bool) -> bytes:
    """Return the bytes of a part of a merge; in SentencePiece U+2581 is a space."""
    read = unalias(spelled) if byte_level else spelled.replace(SPACE, " ").encode()
    return spelled.encode() if read is None else read


def spelled_tokens(data: Mapping[str, Any]) -> dict[int, str]:
    entries = data["model"]["vocab"]
    if isinstance(entries, dict):
        spelled = {number: token for token, number in entries.items()}
    else:
        spelled = {number: entry[0] for number, entry in enumerate(entries)}
    return spelled | {number: token for token, number in added_tokens(data).items()}


def token_bytes(data: Mapping[str, Any]) -> dict[int, bytes]:
    """Return id → the bytes of the token, including added tokens.

    Byte-level spellings are converted to bytes; with byte fallback `<0x0A>` is one byte and U+2581
    a space; in other models a token stands for its UTF-8.
    """
    spelled_as_bytes = is_byte_level(data)
    fallback = data["model"].get("byte_fallback")
    added = set(added_tokens(data).values())
    result: dict[int, bytes] = {}
    for number, token in spelled_tokens(data).items():
        if spelled_as_bytes and number not in added:
            read = unalias(token)
            result[number] = token.encode() if read is None else read
        elif fallback and not spelled_as_bytes:
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
            result[number] = (
                bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()
            )
        else:
            result[number] = token.encode()
    return dict(sorted(result.items()))
