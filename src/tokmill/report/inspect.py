"""Say what a file or folder is: one recogniser a kind, in a table."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

from tokmill import plugins
from tokmill.errors import MachineError, MissingExtraError, TokmillError
from tokmill.files import machine_errors
from tokmill.report.foreign import FOREIGN, LOOSE
from tokmill.report.look import Facts, Look, Recogniser, open_look, shorten
from tokmill.report.ours import checkpoint, manifest, plan, receipt, run, shard, store
from tokmill.store.vocab import find_roles


def describe(path: Path | str) -> Facts:
    """Return what a path is: `kind`, `what` in words, and the facts of that kind.

    `problem` is there where something is wrong with it, `next` where a command takes it. Nothing
    is unpickled and nothing is changed.

    Raises:
        TokmillError: there is no such path, or a store or run in it is damaged.
        MachineError: it cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise TokmillError("there is no such file or folder", where=str(path))
    if not path.is_dir() and not path.is_file():
        raise TokmillError("is neither a file nor a folder", where=str(path))
    look = Look(path) if path.is_dir() else open_look(path)
    for recogniser in FOLDERS if path.is_dir() else FILES:
        facts = recogniser(look)
        if facts is not None:
            return {"kind": facts.pop("kind"), "path": str(path), **facts}
    return {
        "kind": "unknown",
        "path": str(path),
        "what": "nothing that tokmill knows: neither text nor one of the token formats",
        "bytes": look.size,
        "first_bytes": look.head[:16].hex(" "),
    }


def tokenizer_folder(look: Look) -> Facts | None:
    """A folder with a tokenizer in it."""
    if (look.path / "tokenizer.json").is_file():
        facts = tokenizer(open_look(look.path / "tokenizer.json"))
        return facts and {**facts, "what": f"{facts['what']}, in its folder"}
    if (look.path / "vocab.json").is_file() and (look.path / "merges.txt").is_file():
        return other_tokenizer(Look(look.path / "vocab.json"))
    return None


def other_folder(look: Look) -> Facts:
    """A folder of something else: what lies in it, by suffix."""
    with machine_errors("read", look.path):
        names = sorted(entry.name for entry in look.path.iterdir())
    suffixes = Counter(Path(name).suffix or "no suffix" for name in names)
    what = "an empty folder" if not names else "a folder that is neither a store nor a run"
    return {
        "kind": "folder",
        "what": what,
        "entries": len(names),
        "suffixes": dict(suffixes.most_common(10)),
        "first": names[:10],
    }


def tokenizer(look: Look) -> Facts | None:
    """A tokenizer.json."""
    if not isinstance(look.json, dict) or not isinstance(look.json.get("model"), dict):
        return None
    model = look.json["model"]
    vocab = model.get("vocab")
    if not isinstance(vocab, dict | list):
        return None
    added = {
        token["content"]: token["id"]
        for token in look.json.get("added_tokens") or []
        if isinstance(token, dict) and isinstance(token.get("id"), int) and "content" in token
    }
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    facts: Facts = {
        "kind": "tokenizer",
        "what": "a tokenizer (tokenizer.json)",
        "model": model.get("type") or "BPE",
        "size": max([*(i for i in ids if isinstance(i, int)), *added.values()], default=-1) + 1,
        "merges": len(model.get("merges") or []),
        "added_tokens": shorten(dict(sorted(added.items(), key=lambda pair: pair[1])[:50])),
    }
    try:
        facts["roles"] = find_roles(added)
    except TokmillError as error:
        facts["problem"] = error.what
    return {**facts, "next": f"tokmill build text INPUT --tokenizer {look.path} -o STORE"}


def other_tokenizer(look: Look) -> Facts | None:
    """A tokenizer in another format: GPT-2's pair, tiktoken ranks, SentencePiece."""
    named = look.path.name.endswith(("vocab.json", "merges.txt"))
    if look.suffix not in (".tiktoken", ".model") and not named:
        return None
    try:
        found = plugins.require("tokmill.text.tokenizer").Tokenizer.from_file(look.path)
    except MissingExtraError as error:
        return {"kind": "tokenizer", "what": "a tokenizer by its name", "problem": error.what,
                "hint": error.hint}  # fmt: skip
    except MachineError:
        raise
    except TokmillError as error:
        return {"kind": "tokenizer", "what": "a tokenizer by its name", "problem": error.what}
    return {
        "kind": "tokenizer",
        "what": "a tokenizer",
        "size": found.size,
        "merges": len(found.merges),
        "special_tokens": shorten(found.specials),
        "next": f"tokmill build text INPUT --tokenizer {look.path} -o STORE",
    }


def other_json(look: Look) -> Facts | None:
    """JSON of another kind."""
    if look.json is None:
        if look.suffix != ".json":
            return None
        return {"kind": "json", "what": "JSON by its name", "bytes": look.size,
                "problem": "it cannot be read: it is damaged or cut off"}  # fmt: skip
    if isinstance(look.json, dict) and ".jsonl" not in look.path.suffixes:
        keys = list(look.json)
        return {"kind": "json", "what": "a JSON object", "bytes": look.size, "keys": keys[:30]}
    if isinstance(look.json, list):
        return {"kind": "json", "what": "a JSON list", "bytes": look.size,
                "entries": len(look.json)}  # fmt: skip
    return None


def recipe(look: Look) -> Facts | None:
    """A recipe, or other TOML."""
    if look.suffix != ".toml":
        return None
    facts: Facts = {"kind": "toml", "what": "TOML, but no recipe", "bytes": look.size}
    try:
        with machine_errors("read", look.path):
            value = tomllib.loads(look.path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return {**facts, "what": "TOML by its name", "problem": str(error)}
    if "source" in value:
        facts |= {"kind": "recipe", "what": f"a recipe of a {value['source']} build",
                  "next": f"tokmill build {look.path} -o STORE"}  # fmt: skip
    elif value.keys() & {"data", "model", "task", "optim", "run"}:
        facts |= {"kind": "recipe", "what": "a recipe of a training",
                  "next": f"tokmill train {look.path} -o RUN"}  # fmt: skip
    elif "extends" in value:
        facts |= {"kind": "recipe", "what": f"a recipe that extends {value['extends']}",
                  "next": f"tokmill recipe show {look.path}"}  # fmt: skip
    return {**facts, "content": shorten(value)}


FOLDERS: list[Recogniser] = [store, run, checkpoint, tokenizer_folder, other_folder]
FILES: list[Recogniser] = [
    *FOREIGN, shard, receipt, manifest, plan, tokenizer, other_tokenizer, other_json, recipe,
    *LOOSE,
]  # fmt: skip
"""The first that does not answer None is believed."""
