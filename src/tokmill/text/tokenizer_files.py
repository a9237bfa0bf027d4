"""Read tokenizers in the common formats, each as the content of a tokenizer.json."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import Any, NamedTuple

from tokmill.errors import TokmillError
from tokmill.files import machine_errors
from tokmill.headers import loads_json
from tokmill.text import sentencepiece_model, tekken, tokenizer_json, wordpiece
from tokmill.text.patterns import CL100K_TIKTOKEN, GPT2, O200K, PATTERNS, resolve_pattern


class RankFile(NamedTuple):
    """Pattern and special tokens, which a tiktoken rank file does not contain."""

    pattern: str
    specials: dict[str, int]


RANK_FILES = {
    "gpt2": RankFile(GPT2, {"<|endoftext|>": 50256}),
    "r50k_base": RankFile(GPT2, {"<|endoftext|>": 50256}),
    "p50k_base": RankFile(GPT2, {"<|endoftext|>": 50256}),
    "cl100k_base": RankFile(
        CL100K_TIKTOKEN,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": RankFile(O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
"""Known by file name (openai/tiktoken, `tiktoken_ext/openai_public.py`)."""


SENTENCEPIECE = re.compile(r"\.model(?:\.v[0-9]\w*)?$")
"""What names of SentencePiece files end in; Mistral's say a version, as `tokenizer.model.v3`."""


def read(
    path: Path | str, *, pattern: str | None = None, specials: dict[str, int] | None = None
) -> dict[str, Any]:
    """Read a tokenizer; the file name determines its format, and its content is checked.

    Args:
        path: a tokenizer.json or vocab.json beside merges.txt, or a folder with one of them, or
            a store or run that carries one; a `.tiktoken` rank file; a SentencePiece `.model`;
            Mistral's tekken.json; a `vocab.txt` of WordPiece.
        pattern: how a rank file cuts words (a name of `PATTERNS` or a pattern), if its name is not
            known.
        specials: special token → id, for a rank file.

    Raises:
        TokmillError: there is no such file, or its content is invalid.
        MachineError: it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        # For a store or a run, its vocabulary.
        carried = path / "vocab" / "tokenizer.json"
        path = carried if carried.exists() else _in_folder(path)
    if not path.exists():
        raise TokmillError(
            "there is no such tokenizer file",
            where=str(path),
            hint=f"give {tokenizer_json.FORMATS} file",
        )
    with machine_errors("read", path):
        raw = path.read_bytes()
    if not raw:
        raise TokmillError("the file is empty", where=str(path), hint="give a tokenizer.json")
    if path.suffix == ".tiktoken":
        return read_ranks(raw, path, pattern, specials)
    if SENTENCEPIECE.search(path.name):
        return sentencepiece_model.to_tokenizer_json(raw, str(path))
    if path.name.endswith(("vocab.json", "merges.txt")):
        return read_pair(path)
    if path.name.endswith("vocab.txt"):
        return wordpiece.read_vocab_txt(raw, path)
    if tekken.is_tekken(raw):
        return tekken.to_tokenizer_json(raw, str(path))
    return tokenizer_json.parse(raw, str(path))


def read_pair(path: Path) -> dict[str, Any]:
    """Read GPT-2's two files, `[PREFIX]vocab.json` and `[PREFIX]merges.txt` beside it."""
    stem = path.name.removesuffix("vocab.json").removesuffix("merges.txt")
    vocab_path, merges_path = (path.with_name(stem + name) for name in ("vocab.json", "merges.txt"))
    for part in (vocab_path, merges_path):
        if not part.is_file():
            raise TokmillError(
                "vocab.json and merges.txt belong together; this one is not there",
                where=str(part),
                hint="copy the missing file beside the other",
            )
    with machine_errors("read", vocab_path):
        raw = vocab_path.read_bytes()
    with machine_errors("read", merges_path):
        lines = merges_path.read_bytes()
    try:
        spelled = loads_json(raw)
        if not isinstance(spelled, dict) or not all(
            isinstance(number, int) for number in spelled.values()
        ):
            raise ValueError("it is no map from tokens to ids")
    except ValueError as error:
        raise TokmillError(
            f"this is no vocab.json: {error}",
            where=str(vocab_path),
            hint="vocab.json is one JSON object, token to id",
        ) from None
    vocab: dict[int, bytes] = {}
    specials: dict[str, int] = {}
    for token, number in spelled.items():
        read_back = tokenizer_json.unalias(token)
        # Names like <|endoftext|> are valid spellings of bytes too, but no merge makes them.
        if read_back is None or (token.startswith("<|") and token.endswith("|>")):
            specials[token] = number
            read_back = token.encode()
        vocab[number] = read_back
    merges: list[tuple[bytes, bytes]] = []
    for number, line in enumerate(lines.decode("utf-8", errors="replace").split("\n"), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = [tokenizer_json.unalias(part) for part in line.rstrip("\r").split(" ")]
        if len(parts) != 2 or parts[0] is None or parts[1] is None:
            raise TokmillError(
                f"a merge is no pair: {line!r}",
                where=f"{merges_path}:{number}",
                hint="a line of merges.txt is two tokens with a space between them",
            )
        merges.append((parts[0], parts[1]))
    return tokenizer_json.byte_level(vocab, merges, specials)


def read_ranks(
    raw: bytes, path: Path, pattern: str | None = None, specials: dict[str, int] | None = None
) -> dict[str, Any]:
    """Read a tiktoken rank file: on each line the bytes of a token in base64, and its rank = id.

    A whole word that is a token is encoded as this token.
    """
    known = RANK_FILES.get(path.name.removesuffix(".tiktoken"))
    if pattern is None and known is None:
        raise TokmillError(
            "a rank file does not say how words are cut, and this name is not known",
            where=str(path),
            hint=f"name the pattern: --pattern {'|'.join(PATTERNS)} (known file names: "
            f"{', '.join(RANK_FILES)})",
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TokmillError(
                f"a line is no token and rank: {line[:60]!r}",
                where=f"{path}:{number}",
                hint="a line of a .tiktoken file is a token in base64, a space and its rank",
            ) from None
    if len(set(ranks.values())) != len(ranks):
        raise TokmillError("two tokens have one rank", where=str(path), hint="the file is broken")
    if pattern is None and known is not None:
        chosen = known.pattern
        specials = known.specials if specials is None else specials
    else:
        chosen = resolve_pattern(pattern or "gpt2")
    merges = tokenizer_json.merges_of_ranks(ranks)
    vocab = {rank: token for token, rank in ranks.items()}
    return tokenizer_json.byte_level(
        vocab, merges, specials or {}, pattern=chosen, ignore_merges=True
    )


def _in_folder(folder: Path) -> Path:
    for name in ("tokenizer.json", "vocab.json", "tokenizer.model", "tekken.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.tiktoken")) + [
        path for path in sorted(folder.iterdir()) if SENTENCEPIECE.search(path.name)
    ]
    if len(found) == 1:
        return found[0]
    raise TokmillError(
        "this folder holds no tokenizer",
        where=str(folder),
        hint=f"it needs {tokenizer_json.FORMATS} file",
    )
