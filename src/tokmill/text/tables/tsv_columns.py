"""Which columns of a table are sentences and label, and the names of its classes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import machine_errors
from tokmill.base.headers import loads_json
from tokmill.base.inflate import head_of
from tokmill.base.remote import open_input
from tokmill.builds.finish import conversion
from tokmill.builds.source import Frozen, Item
from tokmill.store.vocab import Vocabulary
from tokmill.text.record_blocks import BOM, is_stream

FILE = "label.json"
MOST_HEAD = 1 << 20
"""Bytes of a first line at most."""

KNOWN: tuple[tuple[tuple[str, ...], str], ...] = (
    (("#1 String", "#2 String"), "Quality"),
    (("sentence1", "sentence2"), "gold_label"),
    (("sentence1", "sentence2"), "label"),
    (("question1", "question2"), "is_duplicate"),
    (("question", "sentence"), "label"),
    (("sentence",), "label"),
)
"""Sentences and label of GLUE: MRPC, MNLI and SNLI, RTE and WNLI, QQP, QNLI, SST-2."""


class Layout(NamedTuple):
    """The columns of a file; numbers from 0."""

    first: bytes
    """The first line."""
    columns: int
    sentences: tuple[int, ...]
    label: int | None


def layout_of(item: Item, config: Any) -> Layout:
    """Return the layout of an item's file, by its first line and the options."""
    first = first_line(item.path)
    try:
        names = split_line(first.removeprefix(BOM))
    except UnicodeDecodeError:
        raise TokmillError(
            "the first line is not text in UTF-8", where=item.path, hint=conversion(item.path)
        ) from None
    sentences, label = tuple(config.sentences), config.label_column
    if not sentences or not (label or config.unlabelled):
        template = _known(names, sentences, label, config.unlabelled) if config.header else None
        if template is None:
            what = "sentences" if not sentences else "label"
            raise UsageError(
                f"which columns are {what} is not known: there are {', '.join(names)[:400]}",
                where=item.path,
                hint="--sentence A --sentence B --label-column C name them, or number them from 1; "
                "--unlabelled makes no label (of `tokenizer train`: --field A --field B)",
            )
        sentences, label = sentences or template[0], label or template[1]
    header = names if config.header else []
    chosen = tuple(_number(name, header, len(names), item.path) for name in sentences)
    if len({*chosen}) < len(chosen):
        raise UsageError("sentences: a column is named twice", where=item.path, hint="name two")
    of_label = None
    if not config.unlabelled:
        of_label = _number(label, header, len(names), item.path)
    return Layout(first, len(names), chosen, of_label)


def _known(
    names: Sequence[str], sentences: tuple[str, ...], label: str, unlabelled: bool
) -> tuple[tuple[str, ...], str] | None:
    for columns, of_label in KNOWN:
        good = sentences or all(name in names for name in columns)
        if good and (label or unlabelled or of_label in names):
            return columns, of_label
    return None


def _number(name: str, header: Sequence[str], count: int, where: str) -> int:
    if list(header).count(name) > 1:
        raise UsageError(
            f"several columns are called {name!r}", where=where, hint="name it by its number from 1"
        )
    if name in header:
        return list(header).index(name)
    if name.isascii() and name.isdigit() and 1 <= int(name) <= count:
        return int(name) - 1
    raise UsageError(
        f"the file has no column {name!r}",
        where=where,
        hint=nearest(name, header) if header else f"number them, 1 to {count}",
    )


def first_line(path: str) -> bytes:
    with machine_errors("read", path):
        if not is_stream(path):
            with open_input(path) as handle:
                return handle.readline(MOST_HEAD)
        return head_of(path, MOST_HEAD).partition(b"\n")[0]


def split_line(line: bytes) -> list[str]:
    """Return the cells of a line; quotation marks are text."""
    return line.decode().removesuffix("\n").removesuffix("\r").split("\t")


def vocabulary_of(names: Sequence[str]) -> Frozen:
    raw = (json.dumps({"tokens": list(names)}, ensure_ascii=False, indent=0) + "\n").encode()
    digest = hashlib.sha256(raw).hexdigest()
    return Frozen(Vocabulary(file=FILE, sha256=digest, size=len(names)), raw)


def class_names(raw: bytes) -> list[str]:
    try:
        names = loads_json(raw)["tokens"]
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError("its tokens are no list of names")
    except (ValueError, TypeError, KeyError) as error:
        raise TokmillError(
            f"this is not a list of classes: {error}",
            where=FILE,
            hint="the same `tokmill build` makes it again",
        ) from None
    return names
