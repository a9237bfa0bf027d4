"""From a raw record to a document: fields, placeholders, stripping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, TypeVar

import numpy as np

from tokmill.builds.scan import FolderOptions
from tokmill.store.schema import Array, Drops


class TextOptions(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options that all text sources share."""

    specials_in_text: Literal["plain", "special", "reject"] = "plain"
    """Meaning of `<|endoftext|>` inside user text: ordinary text, the special token, a reject."""
    end_of_record: Literal["eot", "none"] = "eot"
    """Whether a document ends with the `eot` token."""
    template: Literal["refuse", "add", "none"] = "refuse"
    """What to do with a tokenizer that puts BOS or the like around every text."""


class FieldOptions(TextOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of sources whose records have fields."""

    fields: tuple[str, ...] = ("title", "text")
    """Fields whose texts make the document, in this order; missing fields are left out. In JSON
    also paths: meta.title, messages[].content, "a.b" for a key with a dot."""
    join: str = "\n"
    """Text between two fields, and between the elements of a list."""
    strip: bool = False
    """Whether white space around each field is removed."""
    placeholders: tuple[str, ...] = ("[deleted]", "[removed]")
    """Texts that count as empty."""
    keep: tuple[str, ...] = ()
    """Fields that are kept as string columns."""


@dataclass(slots=True)
class Documents:
    """A batch of documents: texts, where each begins, records left out, fields that are kept."""

    texts: Sequence[str]
    starts: Array
    drops: list[Drops] = field(default_factory=list)
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ends_part: bool = False
    done: float | None = None
    """Share of the item up to the end of these documents."""
    notes: Mapping[str, int] = field(default_factory=dict)

    def take(self, chosen: Sequence[int], drops: Sequence[Drops]) -> Self:
        """Return some of the documents, and further drops."""
        return dataclasses.replace(
            self,
            texts=[self.texts[i] for i in chosen],
            starts=self.starts[np.asarray(chosen, np.int64)],
            drops=[*self.drops, *drops],
            kept={name: [values[i] for i in chosen] for name, values in self.kept.items()},
        )


D = TypeVar("D", bound=Documents)


def join_lists(values: Sequence[list[str] | None], options: FieldOptions) -> list[str | None]:
    """Return each list of texts as one text; elements are treated like fields."""
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
    """Return (texts, reasons); a text that is skipped is empty and has a reason.

    `columns` has a sequence of values for each field, None for a missing field.
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
    # A comprehension for speed: it tests every document, and few are empty.
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


def select(documents: D, reasons: Sequence[str], rejected: bool = False) -> D:
    """Return the documents without a reason, and a drop for each of the others."""
    if not any(reasons):
        return documents
    kept = [i for i, reason in enumerate(reasons) if not reason]
    left: dict[str, list[int]] = {}
    for i, reason in enumerate(reasons):
        if reason:
            left.setdefault(reason, []).append(i)
    drops = [Drops(documents.starts[at], reason, rejected) for reason, at in left.items()]
    return documents.take(kept, drops)
