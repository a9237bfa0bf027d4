"""From a raw record to a document: fields, placeholders, stripping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tokmill.builds.scan import FolderOptions
from tokmill.store.schema import Array, Drops


class TextOptions(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options that all text sources share."""

    specials_in_text: Literal["plain", "special", "reject"] = "plain"
    """What `<|endoftext|>` inside user text means: ordinary text, the special token, a reject."""
    end_of_record: Literal["eot", "none"] = "eot"
    """Whether a document ends with the `eot` token."""
    template: Literal["refuse", "add", "none"] = "refuse"
    """What to do with a tokenizer that puts BOS or the like around every text."""


class FieldOptions(TextOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of sources whose records have fields."""

    fields: tuple[str, ...] = ("title", "text")
    """Fields whose texts make the document, in this order; a missing one is left out. Of JSON also
    paths: meta.title, messages[].content, "a.b" for a key with a dot."""
    join: str = "\n"
    """What stands between two fields, and between the elements of a list."""
    strip: bool = False
    """Whether white space around each field is removed."""
    placeholders: tuple[str, ...] = ("[deleted]", "[removed]")
    """Texts that stand for nothing."""
    keep: tuple[str, ...] = ()
    """Fields that are carried along as string columns."""


@dataclass(slots=True)
class Documents:
    """A batch of documents: texts, where each began, what was left out, fields carried along."""

    texts: Sequence[str]
    starts: Array
    drops: list[Drops] = field(default_factory=list)
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ends_part: bool = False
    done: float | None = None
    """Share of the item that ends with these documents."""

    def one(self, index: int) -> Documents:
        """Return a batch of one of the documents, without what is carried along."""
        return Documents([self.texts[index]], self.starts[index : index + 1])


def join_lists(values: Sequence[list[str] | None], options: FieldOptions) -> list[str | None]:
    """Return lists of texts as one text each; their elements are treated as fields are."""
    placeholders = frozenset(options.placeholders)
    joined: list[str | None] = []
    for texts in values:
        if texts is None:
            joined.append(None)
            continue
        parts = [text.strip() for text in texts] if options.strip else texts
        joined.append(options.join.join(p for p in parts if p and p not in placeholders))
    return joined


def join_fields(
    columns: Sequence[Sequence[str | None]], options: FieldOptions
) -> tuple[list[str], list[str]]:
    """Return (texts, reasons): a text is empty where its reason for skipping is not.

    `columns` holds one sequence of values a field, None where the field is missing.
    """
    placeholders = frozenset(options.placeholders)
    if len(columns) == 1:
        raw = columns[0]
        if options.strip:
            texts = [value.strip() if value else "" for value in raw]
        else:
            texts = [value or "" for value in raw]
        if placeholders:
            texts = ["" if text in placeholders else text for text in texts]
    else:
        texts = []
        for values in zip(*columns, strict=True):
            parts = []
            for value in values:
                if value:
                    part = value.strip() if options.strip else value
                    if part and part not in placeholders:
                        parts.append(part)
            texts.append(options.join.join(parts))
    reasons = [""] * len(texts)
    # A comprehension, as it looks at every document and finds one seldom.
    for i in [i for i, text in enumerate(texts) if not text or text.isspace()]:
        reasons[i] = _reason([values[i] for values in columns], placeholders)
        texts[i] = ""
    return texts, reasons


def _reason(values: Sequence[str | None], placeholders: frozenset[str]) -> str:
    if all(value is None for value in values):
        return "missing"
    if any(value and value.strip() in placeholders for value in values):
        return "placeholder"
    return "empty"


def select(documents: Documents, reasons: Sequence[str], rejected: bool = False) -> Documents:
    """Return the documents without a reason, and a drop for each of the others."""
    if not any(reasons):
        return documents
    kept = [i for i, reason in enumerate(reasons) if not reason]
    left: dict[str, list[int]] = {}
    for i, reason in enumerate(reasons):
        if reason:
            left.setdefault(reason, []).append(i)
    drops = [Drops(documents.starts[at], reason, rejected) for reason, at in left.items()]
    return Documents(
        [documents.texts[i] for i in kept],
        documents.starts[np.asarray(kept, np.int64)],
        documents.drops + drops,
        {name: [values[i] for i in kept] for name, values in documents.kept.items()},
        documents.ends_part,
        documents.done,
    )
