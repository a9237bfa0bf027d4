"""Facts about a task's stores, and what follows: inputs of the model, rows, special tokens.

Special tokens around the tokens of a row: `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`. Shapes there:
B rows, W positions before and T positions after.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import read_file
from tokmill.feed.feed import Batch, id_counts
from tokmill.feed.packed import Packed
from tokmill.feed.rows import Rows, Stream, Whole, Windows
from tokmill.models.model import Inputs
from tokmill.store.manifest import CHOICE, PLAN, Made, read_json, read_plan
from tokmill.store.schema import Schema
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.measures import Measures

MOST_CLASSES = 10_000
"""Largest number of classes of a label column."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the training store. A run keeps them, and opens without its store.

    `columns`: the columns that a model can read (`column_sizes`) → the number of their ids. Roles
    of vocabularies are in `vocabularies`, widths of columns in `schema`.
    """

    fingerprint: str
    columns: dict[str, Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]]
    schema: Schema
    vocabularies: dict[str, Vocabulary]
    bytes_per_token: float = 0.0
    vectors: dict[str, Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]] = {}
    """Vectors that the model reads (`Task.vectors`) → their width."""
    vector_models: dict[str, str] = {}
    """These vectors → the digest of the model that made them, if it is known."""
    classes: dict[str, Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_CLASSES)]] = {}
    """Columns of labels (`Task.label_classes`) → the names of their classes, by number."""
    measures: Measures = Measures()
    """The metrics of the task."""
    prefix: dict[str, tuple[int, ...]] = {}
    """Columns → the special tokens before each record (`affixes_of`)."""
    suffix: dict[str, tuple[int, ...]] = {}
    """The same of those after it; of an imported run only those of its template."""
    ends: dict[str, tuple[int, ...]] = {}
    """Columns → all ids that end a text, of an imported run that names some."""


def store_inputs(facts: Facts, segment: bool | str = False) -> Inputs:
    """Return all columns of ids that a store has, the roles of their vocabularies, and vectors.

    `segment`: whether the model reads the segment of each token, if the store has it; "always":
    also if it has none.
    """
    column = facts.schema.get(SEGMENT)
    there = column is not None and column.per == "token"
    return Inputs(
        made={SEGMENT: 2} if segment == "always" or (segment and there) else {},
        ids=dict(facts.columns),
        roles=roles_of(facts, facts.columns),
        vectors=dict(facts.vectors),
    )


def roles_of(facts: Facts | Store, columns: Iterable[str]) -> dict[str, Mapping[str, int]]:
    vocabularies = {
        name: facts.schema[name].vocab or "" for name in columns if name in facts.schema
    }
    return {
        name: dict(facts.vocabularies[vocabulary].roles)
        for name, vocabulary in vocabularies.items()
        if vocabulary in facts.vocabularies
    }


def column_sizes(store: Store) -> dict[str, int]:
    """Return the columns that a model can read → the number of their ids.

    These are the columns with a vocabulary and one value for each token. A column `token` without a
    vocabulary (imported from bare ids) counts too: its largest id gives the number of ids.
    """
    return {name: n for name, n in id_counts(store).items() if not store.schema[name].width}


SEGMENT = "segment"
"""A made column with 2 ids: 0 in the first span of a pair and at padding, 1 in the second span."""


INPUT_FORMAT = "input_format.json"


class InputFormat(Made, frozen=True, kw_only=True):
    """Source and options of the store that a run has learned from."""

    roles: dict[str, str] = {}
    """Role → special token, if roles were named."""
    segments: int = 1
    """Sentences of a record: 2 of pairs."""


def segments_of(store: Store) -> int:
    return 1 + int(store.manifest.ranges.get(SEGMENT, (0, 0))[1])


def input_format_of(store: Path) -> InputFormat | None:
    """Return source and options of a store; of a selection those of its inputs."""
    if not (store / PLAN).exists():
        return None
    plan = read_plan(store)
    source = plan.recipe["source"]
    if source != "select":
        options = {key: value for key, value in plan.options.items() if key not in CHOICE}
        roles = plan.roles if isinstance(plan.roles, dict) else {}
        return InputFormat(source=source, options=options, roles=roles)
    with contextlib.suppress(TokmillError):
        first, *rest = map(input_format_of, map(Path, plan.inputs()))
        return first if all(one == first for one in rest) else None
    return None


def read_input_format(run: Path) -> InputFormat | None:
    path = run / INPUT_FORMAT
    return read_json(path, InputFormat) if path.exists() else None


RowKind = Literal["windows", "stream", "packed", "whole"]
"""The ways to cut a store into rows."""


def check_room(length: int, least: int, what: str) -> None:
    """Refuse rows of fewer than `least` positions."""
    if length < least:
        raise UsageError(
            f"a row of {length} positions has no room {what}",
            where="task.length",
            hint="--set task.length=128, for example",
        )


def check_cut(kind: RowKind, length: int, step: int, where: str = "") -> None:
    """Refuse lengths and steps of rows that are impossible or lose tokens."""
    if kind not in get_args(RowKind):
        raise UsageError(
            f"rows cannot be cut as {kind!r}",
            where=f"{where}rows",
            hint=nearest(kind, get_args(RowKind)),
        )
    if length < 1:
        raise UsageError(
            "a row needs at least one position",
            where=f"{where}length",
            hint="--set task.length=128, for example",
        )
    if step and kind != "windows":
        raise UsageError(
            f"{kind} rows take no step", where=f"{where}step", hint='step is for rows = "windows"'
        )
    if not 0 <= step <= length:
        raise UsageError(
            f"windows of {length} targets cannot come every {step} tokens",
            where=f"{where}step",
            hint=f"1 to {length}: with more, some tokens would never be learned",
        )


def cut_rows(
    store: Store,
    kind: RowKind,
    length: int,
    step: int = 0,
    seed: int = 0,
    shards: int = 0,
    *,
    overlap: int = 1,
) -> Rows:
    """Return rows of `length` tokens.

    Rows that are cut from one record share `overlap` tokens (a `step` of 0 is `length` -
    `overlap`). For the next token this is 1: the last target of a row is the first input of the
    next row. `shards`: how many are mixed at a time; 0: all.
    """
    if kind == "stream":
        if shards:
            raise UsageError(
                "rows that begin anywhere cannot be mixed a few shards at a time",
                where="data.shards",
                hint='--set task.rows="windows", or --set data.shards=0',
            )
        return Stream(store, length, seed)
    if kind == "packed":
        return Packed(store, length, overlap=overlap, shards=shards, seed=seed)
    if kind == "whole":
        return Whole(store, length, shards=shards, seed=seed)
    return Windows(store, length, step or length - overlap, shards=shards, seed=seed)


Frame = Mapping[str, tuple[int, int]]
"""Column of ids → its `[CLS]` and `[SEP]`; empty: there is no frame."""
LOOKED_AT = 100
"""Records among which the first one that is not empty is looked for."""


def frame_of(inputs: Inputs) -> dict[str, tuple[int, int]]:
    """Return the special tokens around a row; none if a column lacks them."""
    roles = {name: inputs.roles.get(name, {}) for name in inputs.ids}
    if not roles or any(not {"cls", "sep"} <= ids.keys() for ids in roles.values()):
        return {}
    return {name: (ids["cls"], ids["sep"]) for name, ids in roles.items()}


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
    return tokenizers.template_tokens(file)


def lossy_step_of(store: Store, column: str) -> str:
    """Return the step of a column's tokenizer after which different texts are equal, or ""."""
    name = store.schema[column].vocab or ""
    if name not in store.vocabularies or store.vocabularies[name].coder != "tokenizer":
        return ""
    tokenizers = plugins.require("tokmill.text.tokenizers.tokenizer_json")
    return str(tokenizers.lossy_step(read_file(store.vocabulary_file(name))))


def framed(batch: Batch, frame: Frame, length: int, *, pair: bool = False) -> Batch:
    """Return rows of `length` positions with special tokens around their tokens.

    The document 0 of a row is a. With `pair` all others are b, in segment 1. Both become one
    document. A special token is 0 in columns without a frame.
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
        columns[name] = moved
    if pair:
        columns[SEGMENT] = ((place > end_a) & filled).astype(np.int64)
    return dataclasses.replace(
        batch, columns=columns, document=np.where(filled, 0, -1).astype(np.int32)
    )
