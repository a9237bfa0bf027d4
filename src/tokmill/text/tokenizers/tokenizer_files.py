"""Read tokenizers in the common formats, each as the content of a tokenizer.json."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokmill.base.bounds import bounded_reader
from tokmill.base.errors import TokmillError
from tokmill.base.files import read_file
from tokmill.base.headers import loads_json, refused
from tokmill.text.tokenizers import sentencepiece_model, tokenizer_json
from tokmill.text.tokenizers import tokenizer_files as tekken
from tokmill.text.tokenizers import word_lists as wordpiece
from tokmill.text.tokenizers.patterns import (
    CL100K_TIKTOKEN,
    GPT2,
    O200K,
    PATTERNS,
    QWEN2,
    resolve_pattern,
)

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


RANKS = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
"""The first line of a rank file; Llama 3's is called tokenizer.model."""
SENTENCEPIECE = re.compile(r"\.model(?:\.v[0-9]\w*)?$")
"""What names of SentencePiece files end in; Mistral's say a version, as `tokenizer.model.v3`."""


PAIRS = {"": GPT2, "GPT2Tokenizer": GPT2, "CodeGenTokenizer": GPT2, "Qwen2Tokenizer": QWEN2}
"""Class in a tokenizer_config.json → how vocab.json and merges.txt cut words; "": it says none."""
MODELS = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    "codegen": "CodeGenTokenizer",
}
"""`model_type` in a config.json → the class, where no tokenizer_config.json says it."""
CLASSES = {
    "merges.txt": tuple(PAIRS),
    "vocab.txt": ("", "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"),
    "tokenizer.model": ("", "LlamaTokenizer", "GemmaTokenizer"),
}
"""File of an older layout → the classes of transformers that read it as it is read here."""
NAMED = {
    "eos_token": "eot",
    "bos_token": "bos",
    "pad_token": "pad",
    "unk_token": "unk",
    "mask_token": "mask",
    "cls_token": "cls",
    "sep_token": "sep",
}
"""Key of a tokenizer_config.json → role."""


@bounded_reader
def read(
    path: Path | str, *, pattern: str | None = None, specials: dict[str, int] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a tokenizer; the file name determines its format, and its content is checked.

    What lies beside it is read too: tokenizer_config.json, special_tokens_map.json and
    added_tokens.json of transformers.

    Args:
        path: a tokenizer.json or vocab.json beside merges.txt, or a folder with one of them, or
            a store or run that carries one; a `.tiktoken` rank file; a SentencePiece `.model`;
            Mistral's tekken.json; a `vocab.txt` of WordPiece.
        pattern: how a rank file cuts words (a name of `PATTERNS` or a pattern), if its name is not
            known.
        specials: special token → id, for a rank file.

    Returns:
        The content of a tokenizer.json, and role → special token as the files beside it say.

    Raises:
        TokmillError: there is no such file, its content is invalid, or what lies beside it says
            that it is of another kind.
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
    raw = read_file(path)
    if not raw:
        raise TokmillError("the file is empty", where=str(path), hint="give a tokenizer.json")
    if path.suffix == ".tiktoken" or RANKS.match(raw[:1000]):
        return read_ranks(raw, path, pattern, specials), {}
    said = _beside(path)
    if SENTENCEPIECE.search(path.name):
        data = sentencepiece_model.to_tokenizer_json(raw, str(path))
        _add_tokens(data, said, path, "tokenizer.model")
    elif path.name.endswith(("vocab.json", "merges.txt")):
        data = read_pair(path, _class(said, "merges.txt"))
        _add_tokens(data, said, path, "merges.txt")
    elif path.name.endswith("vocab.txt"):
        data = wordpiece.read_vocab_txt(raw, path, said)
        _add_tokens(data, said, path, "vocab.txt")
    elif tekken.is_tekken(raw):
        return tekken.to_tokenizer_json(raw, str(path)), {}
    else:
        data = tokenizer_json.parse(raw, str(path))
    return data, _roles(data, said)


def _beside(path: Path) -> dict[str, Any]:
    """Return what the files of transformers beside a tokenizer say, as one object."""
    said: dict[str, Any] = {}
    for name in (
        "special_tokens_map.json", "tokenizer_config.json", "added_tokens.json", "config.json",
    ):  # fmt: skip
        file = path.with_name(name)
        if not file.is_file():
            continue
        raw = read_file(file)
        with refused(
            f"the file beside the {path.name} cannot be read",
            file,
            hint="fetch it again, or take it away: it names classes and special tokens",
        ):
            found = loads_json(raw)
            if not isinstance(found, dict):
                raise ValueError("it is no JSON object")
        if name == "added_tokens.json":
            found = {"added_tokens": found}
        elif name == "config.json":
            found = {"model_type": found.get("model_type")}
        said |= found
    return said


def _class(said: Mapping[str, Any], layout: str) -> str:
    found = str(said.get("tokenizer_class") or "").removesuffix("Fast")
    if found in ("", "PreTrainedTokenizer", "TokenizersBackend"):
        model = said.get("model_type") if layout == "merges.txt" else ""
        return MODELS.get(model, f"of {model}") if model else ""
    return found


def _names(said: Mapping[str, Any]) -> dict[str, str]:
    values = {key: said.get(key) for key in NAMED}
    named = {k: v.get("content") if isinstance(v, dict) else v for k, v in values.items()}
    return {key: name for key, name in named.items() if name and isinstance(name, str)}


def _roles(data: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, str]:
    there, named = tokenizer_json.added_tokens(data), _names(said)
    end = named.get("eos_token")
    # A token that ends records is not padding or unknown text too, as GPT-2's file says.
    return {
        NAMED[key]: name
        for key, name in named.items()
        if name in there and (key == "eos_token" or name != end)
    }


def _add_tokens(data: dict[str, Any], said: Mapping[str, Any], path: Path, layout: str) -> None:
    """Put the tokens that only the files beside a tokenizer name into its tokenizer.json."""
    named = _names(said)
    odd = [key for key in ("add_prefix_space", "add_bos_token", "add_eos_token") if said.get(key)]
    if (kind := _class(said, layout)) not in CLASSES[layout] or (odd and layout == "merges.txt"):
        raise _unlike(path, f"{odd[0]}: true" if odd else f"the tokenizer_class {kind}")
    tokens: dict[int, dict[str, Any]] = {}
    vocab, decoder = data["model"]["vocab"], said.get("added_tokens_decoder") or {}
    try:
        for number, token in decoder.items():
            made = tokenizer_json.added_token(int(number), str(token["content"]))
            tokens[int(number)] = {key: token.get(key, value) for key, value in made.items()}
        for name, number in (said.get("added_tokens") or {}).items():
            special = name in named.values()
            tokens.setdefault(
                int(number), tokenizer_json.added_token(number, name, special=special)
            )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _unlike(path, "added tokens without ids") from None
    there = {token["content"]: token["id"] for token in [*tokens.values(), *data["added_tokens"]]}
    for key, name in named.items():
        if name not in there and name not in vocab:
            raise _unlike(path, f"{key} {name!r}, which has no id")
        number = there.setdefault(name, vocab.get(name))
        tokens.setdefault(number, tokenizer_json.added_token(number, name))
    ids = {number: name for name, number in vocab.items()}
    for number, token in sorted(tokens.items()):
        name = token["content"]
        if number > max(ids) + 1:
            raise _unlike(path, f"{name!r} with the id {number}, with a gap before it")
        if vocab.setdefault(name, number) != number or ids.setdefault(number, name) != name:
            raise _unlike(path, f"{name!r} with the id {number}, which is of another token")
    before = {token["id"]: token for token in data["added_tokens"]}
    if layout == "tokenizer.model":
        if any(not token["special"] for number, token in tokens.items() if number not in before):
            raise _unlike(path, "added tokens that are not special")
        if kind:
            data["post_processor"] = _around(data, said, named)
        tokens |= before
    data["added_tokens"] = [token for _, token in sorted({**before, **tokens}.items())]


def _around(
    data: Mapping[str, Any], said: Mapping[str, Any], named: Mapping[str, str]
) -> dict[str, Any] | None:
    """Return the step that puts Llama's tokens around texts: the first one unless said not to."""
    bos, eos = named.get("bos_token", "<s>"), named.get("eos_token", "</s>")
    vocab = data["model"]["vocab"]
    before = [bos] if said.get("add_bos_token", True) and bos in vocab else []
    after = [eos] if said.get("add_eos_token") and eos in vocab else []
    return tokenizer_json.template(before, after, vocab, again=True) if before + after else None


def _unlike(path: Path, what: str) -> TokmillError:
    return TokmillError(
        f"the files beside the {path.name} say {what}: its ids are not known here",
        where=str(path.parent),
        hint="let transformers write a tokenizer.json: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW)",
    )


def read_pair(path: Path, kind: str) -> dict[str, Any]:
    """Read the two files of a byte-level BPE, `[PREFIX]vocab.json` and `[PREFIX]merges.txt`.

    `kind`: the class of transformers, which says how words are cut.
    """
    stem = path.name.removesuffix("vocab.json").removesuffix("merges.txt")
    vocab_path, merges_path = (path.with_name(stem + name) for name in ("vocab.json", "merges.txt"))
    for part in (vocab_path, merges_path):
        if not part.is_file():
            raise TokmillError(
                "vocab.json and merges.txt belong together; this one is not there",
                where=str(part),
                hint="copy the missing file beside the other",
            )
    raw = read_file(vocab_path)
    lines = read_file(merges_path)
    with refused(
        "this is no vocab.json", vocab_path, hint="vocab.json is one JSON object, token to id"
    ):
        spelled = loads_json(raw)
        if not isinstance(spelled, dict) or not all(
            isinstance(number, int) for number in spelled.values()
        ):
            raise ValueError("it is no map from tokens to ids")
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
    for token in (token for pair in merges[:100] for token in pair):
        if token.endswith((b"</w>", b"@@")) and len(token) > 4:
            raise _unlike(path, f"{token.decode(errors='replace')!r}, a mark of words in merges")
    data = tokenizer_json.byte_level(vocab, merges, specials, pattern=PAIRS.get(kind, GPT2))
    return {**data, "normalizer": {"type": "NFC"}} if kind == "Qwen2Tokenizer" else data


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
            hint=f"take the tokenizer.json of the same model, or name the pattern: "
            f"`tokmill tokenizer encode --pattern {'|'.join(PATTERNS)}`, "
            "`Tokenizer.from_file(FILE, pattern=…).save(FOLDER)` in Python (known file names: "
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
