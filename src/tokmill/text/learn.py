"""Stage 0 of a build: a tokenizer trained on the documents that the build will see."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tokmill.errors import TokmillError, UsageError
from tokmill.files import inside, make_folder, remove, sha256_file, write_file
from tokmill.store.manifest import read_sealed
from tokmill.store.marks import is_store
from tokmill.store.seal import sealed
from tokmill.store.vocab import LEARNED, Learned
from tokmill.text.documents import iter_documents
from tokmill.text.train import train_tokenizer


def read_note(folder: Path) -> Learned:
    """Return how the tokenizer of a folder was learned, and what was written."""
    return read_sealed(folder / LEARNED, Learned)


def options_of(note: Learned) -> Learned:
    """Return how a tokenizer was learned, without what came out."""
    return msgspec.structs.replace(note, sha256="", files={})


def learned_tokenizer(
    folder: Path,
    kind: str,
    inputs: Sequence[str],
    options: Mapping[str, Any],
    learn: Learned,
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
        before = read_note(folder)
        if options_of(before) != learn:
            raise TokmillError(
                f"a tokenizer was trained here with {before.vocab_size} ids and "
                f"{list(before.specials)}, not {learn.vocab_size} and {list(learn.specials)}",
                where=str(path),
                hint="choose another folder, or remove this one",
            )
        return path, False
    make_folder(folder)
    remove_remains(folder)
    texts = chain.from_iterable(iter_documents(inputs, kind, options))
    tokenizer = train_tokenizer(
        texts,
        learn.vocab_size,
        list(learn.specials),
        pattern=learn.pattern,
        tie_break=learn.tie_break,
    )
    files = {n: hashlib.sha256(d).hexdigest() for n, d in tokenizer.files().items()}
    made = msgspec.structs.replace(learn, sha256=files.pop("tokenizer.json"), files=files)
    # The note comes first: a tokenizer without one would be somebody's own.
    write_file(note, sealed(made))
    tokenizer.save(path)
    return path, True


def remove_remains(folder: Path) -> None:
    """Remove files that stand without their tokenizer.json, as a kill leaves them: those that the
    note of what was learned lists with the same content.
    """
    if (folder / "tokenizer.json").exists() or not (folder / LEARNED).exists():
        return
    try:
        files = read_note(folder).files
    except TokmillError:
        return
    for name, digest in files.items():
        path = inside(folder, name)
        if path.is_file() and sha256_file(path) == digest:
            remove(path)


def check_learned(folder: Path) -> None:
    """Refuse a folder whose tokenizer was not learned there: it would be replaced."""
    path, note = folder / "tokenizer.json", folder / LEARNED
    if not path.exists():
        return
    wanted = read_note(folder).sha256 if note.exists() else None
    if wanted is None or (wanted and sha256_file(path) != wanted):
        hint = f"use it: --tokenizer {shlex.quote(str(path))}; or choose a new folder"
        if wanted and is_store(folder.parent):
            mend = f"tokmill store repair {shlex.quote(str(folder.parent))}"
            hint = f"if it was damaged, `{mend}` trains it again; else choose a new folder"
        raise UsageError(
            "the folder holds a tokenizer that was not trained there", where=str(path), hint=hint
        )
