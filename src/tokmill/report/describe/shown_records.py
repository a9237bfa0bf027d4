"""Records of a store for people: text if there is a tokenizer, else tokens, else ids."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import MissingExtraError, TokmillError, one_line
from tokmill.base.files import read_file
from tokmill.base.headers import loads_json
from tokmill.builds.selection.conditions import parse_condition
from tokmill.store.schema import Array, place_in_words
from tokmill.store.store import Store

SOME = 4096
"""Records whose strings are read at a time."""


def matching(
    store: Store, conditions: Sequence[str] = (), unknown: Counter[str] | None = None
) -> Iterator[int]:
    """Yield the numbers of the records for which every condition, COLUMN OP VALUE, holds.

    Conditions are those of `build select`. In `unknown`, by condition, values that are not numbers
    are counted. Raises `UsageError` for one of another form, and for a
    column that does not hold one value per record.
    """
    wanted = [parse_condition(condition, store.schema) for condition in conditions]
    base = 0
    for _, _, batch in store.batches(SOME):
        keep, lengths = np.ones(len(batch), bool), np.diff(batch.offsets)
        for text, condition in zip(conditions, wanted, strict=True):
            holds, no_number = condition(batch, lengths)
            if unknown is not None and no_number is not None:
                unknown[text] += int(no_number.sum())
            keep &= holds
        yield from (base + np.flatnonzero(keep)).tolist()
        base += len(batch)


def input_in_words(record: Mapping[str, Any]) -> str:
    """Return the input of a shown record, with its place unless the column `address` shows it."""
    shown = "address" in record and str(record["at"]).startswith("address")
    return str(record["from"]) if shown else f"{record['from']} {record['at']}"


def fact_in_words(name: str, value: Any) -> str:
    return f"{name}: {value:#x}" if name == "address" else f"{name}: {one_line(str(value))}"


class Reader:
    """Shows records of a store, as `text` if its tokenizer can be loaded.

    `talk`: a message for the user if it cannot.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.talk = ""
        self._receipt = lru_cache(maxsize=64)(store.receipt)
        self.column = next(
            (
                name
                for name in store.token_columns
                if (vocabulary := store.vocabularies.get(store.schema[name].vocab or ""))
                and vocabulary.coder == "tokenizer"
            ),
            "",
        )
        self.tokenizer: Any = self._load() if self.column else None
        lists = {name: self._tokens(column.vocab or "") for name, column in store.schema.items()}
        self.lists = {name: lists[name] for name in store.token_columns if lists[name]}
        """Column → its tokens by id, if its vocabulary is a list."""
        self.names = {n: tokens for n, tokens in lists.items() if tokens and n not in self.lists}
        """The same of columns with a number for each record, such as labels."""

    def _tokens(self, vocabulary: str) -> list[str]:
        vocabulary_of_column = self.store.vocabularies.get(vocabulary)
        if (
            vocabulary_of_column is None
            or not vocabulary_of_column.file.endswith(".json")
            or vocabulary_of_column.coder == "tokenizer"
        ):
            return []
        path = self.store.vocabulary_file(vocabulary)
        try:
            return loads_json(read_file(path), _TokenList).tokens
        except (TokmillError, ValueError):
            self.talk = f"ids instead of tokens: {path} is not a list of tokens"
            return []

    def _load(self) -> Any:
        try:
            kind = plugins.require("tokmill.text.tokenizers.tokenizer").Tokenizer
            name = self.store.schema[self.column].vocab or ""
            return kind.from_file(self.store.vocabulary_file(name))
        except MissingExtraError as error:
            self.talk = f"ids instead of text: {error.what}\nhint: {error.hint}"
        except TokmillError as error:
            self.talk = f"ids instead of text: {error}"
        return None

    def show(self, number: int, most: int | None = None, start: int = 0) -> dict[str, Any]:
        """Return a record as plain values, with `most` tokens of each column from `start`."""
        record = self.store.record(number)
        lengths = [len(record[name]) for name in self.store.token_columns]
        shown: dict[str, Any] = {"record": number, "tokens": lengths[0] if lengths else 0}
        shown |= self.origin(number)
        here = slice(start, None if most is None else start + most)
        for name, column in self.store.schema.items():
            value = record[name]
            if column.per == "record":
                shown[name] = value if isinstance(value, str) else value.tolist()
                if name in self.names:
                    shown[f"{name}_name"], *_ = _named([shown[name]], self.names[name])
            elif name == self.column and self.tokenizer is not None:
                shown["text"] = self.text(value[here])
            elif name in self.lists:
                shown[name] = _named(value[here].tolist(), self.lists[name])
                if name == "asm" and "border" in record:
                    shown["text"] = _lines(shown.pop(name), record["border"][here].tolist())
            else:
                shown[name] = value[here].tolist()
        return shown

    def text(self, ids: Array) -> str:
        """Return the text of ids, or in brackets why there is none."""
        try:
            return str(self.tokenizer.decode(ids.tolist()))
        except TokmillError as error:
            return f"({error.what})"

    def origin(self, number: int) -> dict[str, Any]:
        """Return the input of a record and its place there in words; {} without a receipt."""
        shard_number, local = self.store.find(number)
        shard = self.store.shard(shard_number)
        try:
            item = self._receipt(shard_number).items[int(shard["item"][local])]
        except (TokmillError, IndexError):
            return {}
        place = place_in_words(int(shard["start"][local]), self.store.manifest.unit)
        return {"from": item.name, "at": place}


class _TokenList(msgspec.Struct):
    tokens: list[str]


def _named(ids: list[int], tokens: list[str]) -> list[str]:
    return [tokens[i] if i < len(tokens) else f"({i})" for i in ids]


def _lines(tokens: list[str], border: list[int]) -> str:
    """Return one instruction per line; `border`: bit 0 begins an instruction, bit 1 a block."""
    parts = [
        ("\n\n" if bits & 2 else "\n" if bits & 1 else " ") + token
        for token, bits in zip(tokens, border, strict=False)
    ]
    return "".join(parts).strip()
