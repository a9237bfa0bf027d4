"""Stage 0 of a build: a tokenizer trained on the documents that the build will see."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tokmill.build.folder import LEARNED
from tokmill.errors import TokmillError, UsageError
from tokmill.files import make_folder, sha256_file, write_file
from tokmill.store.manifest import encode, read_json
from tokmill.text.documents import iter_documents
from tokmill.text.train import train_tokenizer


class LearnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be learned."""

    vocab_size: int
    specials: tuple[str, ...] = ("<|endoftext|>",)
    pattern: str = "gpt2"
    tie_break: str = "first"


class _Note(LearnOptions, frozen=True, kw_only=True):
    """What is kept beside a tokenizer that was learned."""

    sha256: str = ""
    """Of the tokenizer.json, so that another one is never taken for it; "": an old note."""


def learned_tokenizer(
    folder: Path,
    kind: str,
    inputs: Sequence[str],
    options: Mapping[str, Any],
    learn: LearnOptions,
    *,
    again: bool = False,
) -> tuple[Path, bool]:
    """Return (`folder`/tokenizer.json, was it made now), trained on the inputs' documents.

    A tokenizer that was learned before with the same options is kept, whatever the inputs are now:
    a store's vocabulary is frozen. Other options are refused, and so is a tokenizer that was not
    learned here; with `again` whatever is there is replaced.
    """
    path, note = folder / "tokenizer.json", folder / LEARNED
    if not again:
        check_learned(folder)
    if path.exists() and not again:
        before: _Note = read_json(note, _Note)
        if msgspec.convert(before, LearnOptions, from_attributes=True) != learn:
            raise TokmillError(
                f"a tokenizer was trained here with {before.vocab_size} ids and "
                f"{list(before.specials)}, not {learn.vocab_size} and {list(learn.specials)}",
                where=str(path),
                hint="choose another folder, or remove this one",
            )
        return path, False
    make_folder(folder)
    texts = chain.from_iterable(iter_documents(inputs, kind, options))
    tokenizer = train_tokenizer(
        texts,
        learn.vocab_size,
        list(learn.specials),
        pattern=learn.pattern,
        tie_break=learn.tie_break,
    )
    digest = hashlib.sha256(tokenizer.to_json()).hexdigest()
    # The note comes first: a tokenizer without one would be somebody's own.
    write_file(note, encode(_Note(**msgspec.structs.asdict(learn), sha256=digest)))
    tokenizer.save(path)
    return path, True


def check_learned(folder: Path) -> None:
    """Refuse a folder whose tokenizer was not learned there: it would be replaced."""
    path, note = folder / "tokenizer.json", folder / LEARNED
    if not path.exists():
        return
    wanted = read_json(note, _Note).sha256 if note.exists() else None
    if wanted is None or (wanted and sha256_file(path) != wanted):
        raise UsageError(
            "the folder holds a tokenizer that was not trained there",
            where=str(path),
            hint=f"use it: --tokenizer {shlex.quote(str(path))}; or choose a new folder",
        )
