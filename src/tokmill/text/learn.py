"""Stage 0 of a build: a tokenizer trained on the documents that the build will see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tokmill.build.folder import LEARNED
from tokmill.errors import TokmillError
from tokmill.files import make_folder, write_file
from tokmill.store.manifest import encode, read_json
from tokmill.text.documents import iter_documents
from tokmill.text.train import train_tokenizer


class LearnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be learned."""

    vocab_size: int
    specials: tuple[str, ...] = ("<|endoftext|>",)
    pattern: str = "gpt2"
    tie_break: str = "first"


def learned_tokenizer(
    folder: Path,
    kind: str,
    inputs: Sequence[str],
    options: Mapping[str, Any],
    learn: LearnOptions,
) -> tuple[Path, bool]:
    """Return (`folder`/tokenizer.json, was it made now), trained on the inputs' documents.

    A tokenizer that was learned before with the same options is kept, whatever the inputs are now:
    a store's vocabulary is frozen. Other options are refused.
    """
    path, note = folder / "tokenizer.json", folder / LEARNED
    if path.exists() and note.exists():
        before = read_json(note, LearnOptions)
        if before != learn:
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
    tokenizer.save(path)
    write_file(note, encode(learn))
    return path, True
