"""Read tokenizers in the common formats, each as the content of a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokmill.base.bounds import bounded_reader
from tokmill.base.errors import TokmillError
from tokmill.base.files import read_file
from tokmill.base.headers import loads_json, refused
from tokmill.text.tokenizers import tokenizer_json
from tokmill.text.tokenizers import word_lists as wordpiece

MODELS = ("gpt2", "gpt_neo", "gptj", "codegen")
"""`model_type` of a config.json whose vocab.json and merges.txt are GPT-2's kind."""
CLASSES = {
    "merges.txt": ("", "GPT2Tokenizer", "CodeGenTokenizer"),
    "vocab.txt": ("", "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"),
}
"""File of an older layout → the classes of transformers that read it as it is read here; "": no
tokenizer_config.json says one."""
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
def read(path: Path | str) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a tokenizer; the file name determines its format, and its content is checked.

    What lies beside it is read too: tokenizer_config.json, special_tokens_map.json and
    added_tokens.json of transformers.

    Args:
        path: a tokenizer.json or vocab.json beside merges.txt, or a folder with one of them, or
            a store or run that carries one; a `vocab.txt` of WordPiece.

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
    settings = _beside(path)
    if path.name.endswith(("vocab.json", "merges.txt")):
        data = read_pair(path)
        _add_named(data, settings, path, "merges.txt")
    elif path.name.endswith("vocab.txt"):
        data = wordpiece.read_vocab_txt(raw, path, settings)
        _add_named(data, settings, path, "vocab.txt")
    else:
        data = tokenizer_json.parse(raw, str(path))
    return data, _roles(data, settings)


def _beside(path: Path) -> dict[str, Any]:
    """Return what the files of transformers beside a tokenizer say, as one object."""
    settings: dict[str, Any] = {}
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
            content = loads_json(raw)
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
        if name == "added_tokens.json":
            content = {"added_tokens": content}
        elif name == "config.json":
            content = {"model_type": content.get("model_type")}
        settings |= content
    return settings


def _class(said: Mapping[str, Any], layout: str) -> str:
    result = str(said.get("tokenizer_class") or "").removesuffix("Fast")
    if result in ("", "PreTrainedTokenizer", "TokenizersBackend"):
        model = said.get("model_type") if layout == "merges.txt" else ""
        return "" if not model or model in MODELS else f"of {model}"
    return result


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


def _add_named(data: dict[str, Any], said: Mapping[str, Any], path: Path, layout: str) -> None:
    """Make the tokens special that the files beside a tokenizer name; refuse any that it lacks."""
    named, vocab = _names(said), data["model"]["vocab"]
    odd = [key for key in ("add_prefix_space", "add_bos_token", "add_eos_token") if said.get(key)]
    if (kind := _class(said, layout)) not in CLASSES[layout] or odd:
        raise _unlike(path, f"{odd[0]}: true" if odd else f"the tokenizer_class {kind}")
    added = {token["id"]: token for token in data["added_tokens"]}
    try:
        for number, token in (said.get("added_tokens_decoder") or {}).items():
            entry = tokenizer_json.added_token(int(number), str(token["content"]))
            added[int(number)] = {key: token.get(key, value) for key, value in entry.items()}
        for name, number in (said.get("added_tokens") or {}).items():
            entry = tokenizer_json.added_token(int(number), name, special=name in named.values())
            added.setdefault(int(number), entry)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _unlike(path, "added tokens without ids") from None
    for key, name in named.items():
        if name not in vocab:
            raise _unlike(path, f"{key} {name!r}, which has no id")
        added.setdefault(vocab[name], tokenizer_json.added_token(vocab[name], name))
    for number, token in added.items():
        if vocab.get(token["content"]) != number:
            raise _unlike(path, f"{token['content']!r} with an id that its vocabulary lacks")
    data["added_tokens"] = [token for _, token in sorted(added.items())]


def _unlike(path: Path, what: str) -> TokmillError:
    return TokmillError(
        f"the files beside the {path.name} say {what}: its ids are not known here",
        where=str(path.parent),
        hint="let transformers write a tokenizer.json: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW)",
    )


def read_pair(path: Path) -> dict[str, Any]:
    """Read the two files of GPT-2's BPE, `[PREFIX]vocab.json` and `[PREFIX]merges.txt`."""
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
    return tokenizer_json.byte_level(vocab, merges, specials)


def _in_folder(folder: Path) -> Path:
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    raise TokmillError(
        "this folder holds no tokenizer",
        where=str(folder),
        hint=f"it needs {tokenizer_json.FORMATS}; `save_pretrained` of transformers writes a "
        "tokenizer.json",
    )
