"""Puts `[CLS]` and `[SEP]` around the tokens of a row: `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`.

Shapes: B rows, W positions before and T positions after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from tokmill import plugins
from tokmill.base.files import read_file
from tokmill.feed.feed import Batch
from tokmill.models.model_inputs import Inputs
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.scores import BORDER
from tokmill.tasks.task_inputs import SEGMENT

Frame = Mapping[str, tuple[int, int]]
"""Column of ids → its `[CLS]` and `[SEP]`; empty: there is no frame."""
LOOKED_AT = 100
"""Records among which the first one that is not empty is looked for."""


def frame_of(inputs: Inputs) -> dict[str, tuple[int, int]]:
    """Return the special tokens around a row; none if a column lacks them."""
    roles = {name: inputs.roles.get(name, {}) for name in inputs.ids}
    if not roles or any(not {"cls", "sep"} <= found.keys() for found in roles.values()):
        return {}
    return {name: (found["cls"], found["sep"]) for name, found in roles.items()}


def is_framed(store: Store, frame: Frame) -> bool:
    """Say whether the records of a store already have special tokens; the first record decides."""
    for number in range(min(store.records, LOOKED_AT) if frame else 0):
        record = store.record(number)
        if all(len(record[name]) for name in frame):
            return all(record[name][0] == cls for name, (cls, _) in frame.items())
    return False


def affixes_of(store: Store) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return column → special tokens that stand before, and after, each record of a store.

    These are those of the tokenizer's template, and the end of a document, where the first records
    have them. Columns without a vocabulary are left out.
    """
    prefix: dict[str, list[int]] = {}
    suffix: dict[str, list[int]] = {}
    vocabularies = {name: store.schema[name].vocab for name in store.token_columns}
    names = {n: vocab for n, vocab in vocabularies.items() if vocab in store.vocabularies}
    count = min(store.records, LOOKED_AT) if names else 0
    records = [store.record(number) for number in range(count)]
    for name, named in names.items():
        assert named is not None
        vocabulary, file = store.vocabularies[named], store.vocabulary_file(named)
        before, after = template_of(vocabulary, read_file(file))
        end = [number for role, number in vocabulary.roles.items() if role == "eot"]
        some = [ids.tolist() for record in records if len(ids := record[name])]
        prefix[name] = before if all(ids[: len(before)] == before for ids in some) else []
        tails = (tail for tail in (after + end, after, end) if tail)
        suffix[name] = next((t for t in tails if all(ids[-len(t) :] == t for ids in some)), [])
    return prefix, suffix


def template_of(vocabulary: Vocabulary, file: bytes) -> tuple[list[int], list[int]]:
    """Return the ids that the template of a tokenizer's file puts before and after a text."""
    if vocabulary.coder != "tokenizer":
        return [], []
    tokenizers = plugins.require("tokmill.text.tokenizers.tokenizer_json")
    result: tuple[list[int], list[int]] = tokenizers.template_tokens(file)
    return result


def framed(batch: Batch, frame: Frame, length: int, *, pair: bool = False) -> Batch:
    """Return rows of `length` positions with special tokens around their tokens.

    The document 0 of a row is a. With `pair` all others are b, in segment 1. Both become one
    document. A special token is an instruction of its own, and is 0 in columns without a frame.
    """
    document = batch.document
    first, all_ = (document == 0).sum(1), (document >= 0).sum(1)
    if not pair:
        first = all_
    place = np.arange(length)
    end_a = (1 + first)[:, None]
    end = (1 + all_ + pair)[:, None]
    filled = place <= end
    special = (place == 0) | (place == end_a) | (place == end)
    own = filled & ~special
    source = (place - 1 - (place > end_a)).clip(0, document.shape[1] - 1)
    rows = np.arange(len(batch))[:, None]
    columns = {}
    for name, value in batch.columns.items():
        moved = value[rows, source]
        moved[~own] = 0
        if name in frame:
            cls, sep = frame[name]
            moved = np.where(special & filled, sep, moved.astype(np.int64))
            moved[:, 0] = cls
        elif name == BORDER:
            moved[special & filled] = 1
        columns[name] = moved
    if pair:
        columns[SEGMENT] = ((place > end_a) & filled).astype(np.int64)
    return dataclasses.replace(
        batch, columns=columns, document=np.where(filled, 0, -1).astype(np.int32)
    )
