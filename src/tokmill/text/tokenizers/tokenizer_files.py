"""Read tokenizers in the common formats, each as the content of a tokenizer.json.

WordPiece with BERT's words is a `vocab.txt`. Text is cleaned of control characters, put into lower
case and stripped of accents (of vocabularies without capital letters), and cut at white space,
punctuation and around each CJK character. Each word becomes the longest tokens that fit, from the
left; those inside of a word begin with `##`. A word without such tokens, or of more than 100
characters, is `[UNK]`. Source: `tokenization.py` of google-research/bert; format of tokenizer.json:
Hugging Face `tokenizers`.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokmill.base.bounds import bounded_reader
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import machine_errors, read_file
from tokmill.base.headers import loads_json, refused
from tokmill.text.tokenizers import tokenizer_json

INSIDE = "##"
"""Prefix of tokens inside of a word."""
LONGEST = 100
"""Characters of a word at most; a longer one is `[UNK]`."""
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of BERT, in the order of their ids in a vocabulary that is trained."""


def vocab_lines(raw: bytes, path: Path) -> list[str]:
    """Return the lines of a `vocab.txt`, stripped of white space as in BERT's own reader."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokmillError(
            f"a vocab.txt is text in UTF-8: {error.reason}",
            where=f"{path}: byte {error.start}",
            hint="copy the file again",
        ) from None
    return [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


def read_vocab_txt(raw: bytes, path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a tokenizer.json for a `vocab.txt`: a token per line, the line its id.

    The file does not state whether text is converted to lower case. A `tokenizer_config.json`
    beside it does (`settings`); without it, capital letters are kept if the vocabulary has some.
    If a token occurs twice, its last line is its id, as in BERT's own reader.
    """
    vocab = {token: number for number, token in enumerate(vocab_lines(raw, path)) if token}
    if "[UNK]" not in vocab:
        raise TokmillError(
            "the file has no token [UNK], which stands for words that have no tokens",
            where=str(path),
            hint="a vocab.txt of WordPiece has a token per line, [UNK] among them",
        )
    capital = any(t != t.lower() for t in vocab if not re.fullmatch(r"\[.*\]", t))
    if (kind := str(settings.get("tokenizer_class") or "").removesuffix("Fast")) not in CLASSES:
        raise _unlike(path, f"the tokenizer_class {kind}")
    lower = settings.get("do_lower_case")
    return tokenizer_data(
        vocab,
        lower=lower if isinstance(lower, bool) else not capital,
        chinese=settings.get("tokenize_chinese_chars") is not False,
        accents=settings.get("strip_accents"),
    )


def tokenizer_data(
    vocab: Mapping[str, int],
    *,
    lower: bool,
    chinese: bool = True,
    accents: object = None,
    more: Collection[str] = (),
) -> dict[str, Any]:
    """Return the content of a tokenizer.json.

    Args:
        vocab: token → id; those of `SPECIALS` become special tokens.
        lower: whether text is put into lower case.
        chinese: whether each CJK character is a word.
        accents: whether accents are taken off; None: where text is put into lower case.
        more: further special tokens.
    """
    added = [
        tokenizer_json.added_token(number, token)
        for token, number in sorted(vocab.items(), key=lambda item: item[1])
        if token in SPECIALS or token in more
    ]
    return tokenizer_json.content(
        added,
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": chinese,
            "strip_accents": accents if isinstance(accents, bool) else None,
            "lowercase": lower,
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=tokenizer_json.template(["[CLS]"], ["[SEP]"], vocab)
        if "[CLS]" in vocab and "[SEP]" in vocab
        else None,
        decoder={"type": "WordPiece", "prefix": INSIDE, "cleanup": True},
        model={
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": INSIDE,
            "max_input_chars_per_word": LONGEST,
            "vocab": dict(vocab),
        },
    )


MOST_WORDS = 1 << 20
"""Words of a vocabulary; each has a vector in a model."""


WORD = re.compile(r"(?:\S|[\x1c-\x1f])+")
"""What stands between white space of Unicode, which U+001C to U+001F are not (`tokenizers`)."""


class WordList(NamedTuple):
    """The words of a file, and what was not as it should be."""

    ids: dict[str, int]
    repeated: int
    """Lines whose word stands in a later line too; that one is its id, as in BERT's own reader."""
    missing: list[str]
    """Special tokens that the file lacks; they got the ids after its last line."""
    empty: int = 0
    """Lines without a word, the end of the file apart."""


def read_words(path: Path) -> WordList:
    """Read a `vocab.txt`; raises `TokmillError` for one that is not text, or holds no word."""
    with machine_errors("read", path):
        raw = path.read_bytes()
    lines = vocab_lines(raw, path)
    ids = {word: number for number, word in enumerate(lines) if word}
    if not ids:
        raise TokmillError("the file lists no word", where=str(path), hint="a word per line")
    words = len(lines) - lines.count("")
    missing = [token for token in SPECIALS if token not in ids]
    first = max(ids.values()) + 1
    ids |= {token: first + number for number, token in enumerate(missing)}
    # What stands after the last word are ends of lines.
    empty = lines[:first].count("")
    return WordList(ids, words - (len(ids) - len(missing)), missing, empty)


def count_words(lines: Iterable[Sequence[str]], min_count: int) -> dict[str, int]:
    """Return the ids of the words of lines, the special tokens first, then the most frequent.

    Words that stand less often than `min_count` are left out. Raises `UsageError` for more than a
    million words, of which most are addresses and numbers.
    """
    counts: Counter[str] = Counter()
    for some in lines:
        for line in some:
            counts.update(WORD.findall(line))
        if len(counts) > 4 * MOST_WORDS:
            raise _too_many(len(counts))
    kept = [(-n, word) for word, n in counts.items() if n >= min_count and word not in SPECIALS]
    if len(kept) > MOST_WORDS:
        raise _too_many(len(kept))
    return {word: number for number, word in enumerate((*SPECIALS, *(w for _, w in sorted(kept))))}


def _too_many(count: int) -> UsageError:
    return UsageError(
        f"there are {count:,} different words, and {MOST_WORDS:,} is the most",
        hint="--min-count 5 leaves rare ones out; or learn parts of words: tokmill tokenizer train "
        "… --model wordpiece, then --tokenizer",
    )


def tokenizer_of_words(ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of a tokenizer.json for words; `[UNK]` stands for all others."""
    added = [
        tokenizer_json.added_token(number, token)
        for token, number in ids.items()
        if token in SPECIALS
    ]
    return tokenizer_json.content(
        sorted(added, key=lambda token: token["id"]),
        pre_tokenizer={"type": "WhitespaceSplit"},
        # It writes a blank between words.
        decoder={"type": "WordPiece", "prefix": INSIDE, "cleanup": False},
        model={"type": "WordLevel", "vocab": dict(ids), "unk_token": "[UNK]"},
    )


CLASSES = (
    "", "PreTrainedTokenizer", "TokenizersBackend", "BertTokenizer", "DistilBertTokenizer",
    "ElectraTokenizer",
)  # fmt: skip
"""Classes of transformers that read a vocab.txt as it is read here, or none in particular."""
NAMED = {
    "bos_token": "bos",
    "eos_token": "eot",
    "unk_token": "unk",
    "sep_token": "sep",
    "pad_token": "pad",
    "cls_token": "cls",
    "mask_token": "mask",
}
"""Key of a tokenizer_config.json → role. Of keys for one token, the flags of the last count."""
MORE = ("additional_special_tokens", "extra_special_tokens")
"""Keys of special tokens without a role: a list, or a dict of attribute → token."""


@bounded_reader
def read(path: Path | str) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a tokenizer; the file name determines its format, and its content is checked.

    What lies beside it is read too: tokenizer_config.json, special_tokens_map.json and
    added_tokens.json of transformers.

    Args:
        path: a tokenizer.json or a `vocab.txt` of WordPiece, or a folder with one of them, or a
            store or run that carries one.

    Returns:
        The content of a tokenizer.json, and role → special token as the files beside it say.
    """
    path = Path(path)
    if path.is_dir():
        # For a store or a run, its vocabulary.
        carried = path / "vocab" / "tokenizer.json"
        path = carried if carried.exists() else _in_folder(path)
    if not path.exists():
        near = path.with_name("tokenizer.json")
        raise TokmillError(
            "there is no such tokenizer file",
            where=str(path),
            hint=f"did you mean {near}?"
            if near.is_file()
            else f"give {tokenizer_json.FORMATS} file; one of the Hugging Face Hub is fetched by "
            "`hf download ORGANISATION/MODEL tokenizer.json --local-dir FOLDER`",
        )
    raw = read_file(path)
    if not raw:
        raise TokmillError("the file is empty", where=str(path), hint="give a tokenizer.json")
    settings = _sibling_files(path)
    if path.name.endswith("vocab.txt"):
        data = read_vocab_txt(raw, path, settings)
    else:
        data = tokenizer_json.parse(raw, str(path))
    # Beside a file of another name they may be those of another tokenizer.
    if settings and (path.name == "tokenizer.json" or path.name.endswith("vocab.txt")):
        _add_named(data, settings, path)
    return data, _roles(data, settings)


def _sibling_files(path: Path) -> dict[str, Any]:
    """Return what the files of transformers beside a tokenizer say, as one object.

    As there, the others count only beside a configuration that lists no added tokens, and win.
    """
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        file = path.with_name(name)
        if not file.is_file() or "added_tokens_decoder" in settings:
            continue
        raw = read_file(file)
        with refused(
            f"the file beside the {path.name} cannot be read",
            file,
            hint="fetch it again, or take it away: it names classes and special tokens",
        ):
            content = loads_json(raw)
            if not isinstance(content, dict):
                raise ValueError("it is not a JSON object")
        if name == "added_tokens.json":
            content = {"added_tokens": content}
        settings |= content
    return settings


def _named(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return key → the token that it names: its `content`, and the flags that are given."""
    values = {key: settings.get(key) for key in NAMED}
    for key in MORE:
        listed = settings.get(key)
        tokens = [*listed.values()] if isinstance(listed, dict) else listed
        for place, token in enumerate(tokens if isinstance(tokens, list) else ()):
            values[f"{key}[{place}]"] = token
    named = {k: v if isinstance(v, dict) else {"content": v} for k, v in values.items()}
    return {k: v for k, v in named.items() if isinstance(v.get("content"), str) and v["content"]}


def _roles(data: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    there = tokenizer_json.added_tokens(data)
    named = {key: token["content"] for key, token in _named(settings).items()}
    end = named.get("eos_token")
    # A token that ends records is not padding or unknown text too, as GPT-2's file says.
    return {
        NAMED[key]: name
        for key, name in named.items()
        if key in NAMED and name in there and (key == "eos_token" or name != end)
    }


def _entry(number: int, token: Mapping[str, Any]) -> dict[str, Any]:
    entry = tokenizer_json.added_token(number, str(token["content"]))
    return {key: token.get(key, value) for key, value in entry.items()}


def _add_named(data: dict[str, Any], settings: Mapping[str, Any], path: Path) -> None:
    """Make the tokens special that the files beside a tokenizer name.

    Those that a vocab.txt lacks are refused; of a tokenizer.json only the end of documents.
    """
    ids = {token: number for number, token in tokenizer_json.spelled_tokens(data).items()}
    added = {token["content"]: token for token in data.get("added_tokens") or []}
    named, lines = _named(settings), path.name.endswith("vocab.txt")
    special = {token["content"] for token in named.values()}
    try:
        for number, token in (settings.get("added_tokens_decoder") or {}).items():
            added[str(token["content"])] = _entry(int(number), token)
        for name, number in (settings.get("added_tokens") or {}).items():
            entry = tokenizer_json.added_token(int(number), name, special=name in special)
            entry["normalized"] = not entry["special"]
            added[name] = added.get(name, entry) | {"id": int(number)}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _unlike(path, "added tokens without ids") from None
    listed = set(added)
    for key, token in named.items():
        name = token["content"]
        if name not in ids and (lines or key == "eos_token"):
            raise _unlike(path, f"{key} {name!r}, which it lacks")
        # Texts are made of single characters, whatever else a configuration uses them for.
        if name in ids and (name in listed or len(name) > 1 or key == "eos_token"):
            entry = added[name] if name in listed else _entry(ids[name], token)
            added[name] = entry | {"special": True}
    for name in added if lines else ():
        if ids.get(name) != added[name]["id"]:
            raise _unlike(path, f"{name!r} with an id that its vocabulary lacks")
    known = [token | {"id": ids[name]} for name, token in added.items() if name in ids]
    data["added_tokens"] = sorted(known, key=lambda token: token["id"])


def _unlike(path: Path, what: str) -> TokmillError:
    return TokmillError(
        f"the files beside the {path.name} say {what}: its ids are not known here",
        where=str(path.parent),
        hint="let transformers write a tokenizer.json: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW)",
    )


def _in_folder(folder: Path) -> Path:
    for name in ("tokenizer.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    raise tokenizer_json.no_tokenizer("this folder holds no tokenizer", str(folder))
