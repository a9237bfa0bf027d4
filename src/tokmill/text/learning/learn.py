"""The step before a build with --vocab-size: train a tokenizer on the documents of the build."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import (
    make_folder,
    read_file,
    sha256_file,
    write_file,
)
from tokmill.store.manifest import read_sealed, sealed
from tokmill.store.marks import is_store
from tokmill.store.vocab import LEARNED, Learned
from tokmill.text.documents import iter_documents
from tokmill.text.learning.train_tokenizer import train_tokenizer
from tokmill.text.tokenizers.tokenizer import Tokenizer


def read_note(folder: Path) -> Learned:
    """Return the note `LEARNED` of a folder."""
    return read_sealed(folder / LEARNED, Learned)


def noted(options: Learned, tokenizer: Tokenizer) -> Learned:
    files = {n: hashlib.sha256(d).hexdigest() for n, d in tokenizer.files().items()}
    return msgspec.structs.replace(options, sha256=files.pop("tokenizer.json"), files=files)


def write_beside(folder: Path, note: Learned) -> None:
    """Write the files beside a learned tokenizer.json that are missing or damaged."""
    file = folder / "tokenizer.json"
    for name, data in Tokenizer.from_json(read_file(file), str(file)).files().items():
        path = folder / name
        if note.files.get(name) == hashlib.sha256(data).hexdigest() and not (
            path.is_file() and sha256_file(path) == note.files[name]
        ):
            write_file(path, data)


def learned_tokenizer(
    folder: Path,
    kind: str,
    inputs: Sequence[str],
    options: Mapping[str, Any],
    learn: Learned,
    *,
    again: bool = False,
) -> tuple[Path, bool]:
    """Train a tokenizer on the documents of inputs; return (`folder`/tokenizer.json, is it new).

    A tokenizer that was learned before with the same options is kept even if the inputs have
    changed: a store's vocabulary is frozen. Other options are refused, and so is a tokenizer that
    was not learned here. With `again` an existing tokenizer is replaced.
    """
    path, note = folder / "tokenizer.json", folder / LEARNED
    if not again:
        check_learned(folder)
    if path.exists() and not again:
        before = read_note(folder)
        if msgspec.structs.replace(before, sha256="", files={}) != learn:
            raise TokmillError(
                f"a tokenizer was trained here with {before.vocab_size} ids and "
                f"{list(before.specials)}, not {learn.vocab_size} and {list(learn.specials)}",
                where=str(path),
                hint="choose another folder, or remove this one",
            )
        write_beside(folder, before)
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
    # The note is written first: a tokenizer without a note is taken for the user's own.
    write_file(note, sealed(noted(learn, tokenizer)))
    tokenizer.save(path)
    return path, True


def check_learned(folder: Path) -> None:
    """Refuse a folder with a tokenizer that was not learned there: the build would replace it."""
    path, note = folder / "tokenizer.json", folder / LEARNED
    if not path.exists():
        return
    use = f"--tokenizer {shlex.quote(str(path))}"
    try:
        wanted = read_note(folder).sha256 if note.exists() else None
    except TokmillError as error:
        error.hint = f"remove it, and use the tokenizer: {use}"
        raise
    if wanted is None or sha256_file(path) != wanted:
        hint = f"use it: {use}; or choose a new folder"
        if wanted and is_store(folder.parent):
            hint = "if it is damaged, remove it: the same build trains it again"
        raise UsageError(
            "the folder holds a tokenizer that was not trained there", where=str(path), hint=hint
        )
