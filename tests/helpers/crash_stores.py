"""Small inputs that give several shards, and what a store's folder holds."""

import hashlib
import json
import shutil
from functools import lru_cache
from pathlib import Path

from tokmill.builds.plan import SHARD_BYTES

INPUT_BYTES = 2000
"""At least so large is every input file that is to end its shard."""
NO_CONTENT = ("stamps.jsonl", "events.jsonl", ".lock")
"""Files that hold times, or nothing; all others are equal between equal builds."""


@lru_cache
def ending_names(count: int) -> list[str]:
    """Return names of files which end their shard although they are small.

    That is decided by hash(name, start) / 2^64 < size / 64 MiB: one name of 30,000 does.
    """
    names: list[str] = []
    number = 0
    while len(names) < count:
        name = f"n{number}.jsonl"
        digest = hashlib.sha256(f"{name}\0{0}".encode()).digest()
        if int.from_bytes(digest[:8], "little") / 2**64 < INPUT_BYTES / SHARD_BYTES:
            names.append(name)
        number += 1
    return sorted(names)


def write_jsonl(path: Path, size: int = INPUT_BYTES, word: str = "fox") -> Path:
    """Write lines of JSON, `size` bytes or a little more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        number = 0
        while handle.tell() < size:
            text = f"record {number} of {path.name}: the quick brown {word} jumps"
            handle.write(json.dumps({"id": number, "text": text}) + "\n")
            number += 1
    return path


def write_inputs(folder: Path, shards: int) -> list[Path]:
    """Write files that give so many shards; one shard holds two files."""
    paths = [write_jsonl(folder / name) for name in ending_names(shards)]
    return [write_jsonl(folder / "a.jsonl"), *paths]


def write_tokenizer(path: Path, vocab_size: int = 300) -> Path:
    """Train a tokenizer on a sentence."""
    from tokmill.text.learning.train_tokenizer import train_tokenizer

    text = "record of the quick brown fox jumps over the lazy dog"
    train_tokenizer([text], vocab_size, engine="python").save(path)
    return path


def contents(store: Path) -> dict[str, bytes]:
    """Return path → content of all files of a store but its log and its lock."""
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name not in NO_CONTENT
    }


def identities(store: Path) -> dict[str, tuple[int, int]]:
    """Return name → (inode, mtime) of the files among the shards: equal means untouched."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in (store / "shards").iterdir()
    }


def copy(template: Path | None, store: Path) -> None:
    """Make `store` what `template` is (None: absent)."""
    if store.exists():
        shutil.rmtree(store)
    if template is not None:
        shutil.copytree(template, store)


def is_clean(err: str) -> bool:
    """Say whether a refusal, or an interruption, is one line with a hint and nothing of Python."""
    lines = err.strip().splitlines()
    return (
        sum(line.startswith(("error: ", "interrupted: ")) for line in lines) == 1
        and sum(line.startswith("hint: ") for line in lines) == 1
        and "Traceback" not in err
        and "leaked" not in err
    )
