"""Conditions on records (COLUMN OP VALUE), and the selection of records of a batch."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tokmill.errors import TokmillError, UsageError, nearest
from tokmill.store.schema import Array, Records, Schema
from tokmill.store.strings import Strings, take_flat

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def each_value(
    batch: Records, name: str, schema: Schema, function: Callable[[Any], Any]
) -> list[Any]:
    """Return a function's results for the values of all records; called once for each string."""
    value = batch.columns[name]
    if not isinstance(value, Strings):
        if schema[name].per != "record" or schema[name].width:
            raise UsageError(
                f"the column {name!r} does not hold one value per record",
                hint="`tokmill inspect STORE` lists the columns that hold one",
            )
        return [function(one) for one in value]
    try:
        found: list[Any] = value.each(function).tolist()
        return found
    except UnicodeDecodeError:
        raise TokmillError(
            f"a string of the column {name!r} is not UTF-8: the store is damaged",
            hint="`tokmill store validate STORE` finds it",
        ) from None


def parse_condition(text: str, schema: Schema) -> Callable[[Records, Array], Array]:
    """Return the function (batch, lengths) → bool array of a `where` text."""
    match = re.fullmatch(r"\s*(\w+)\s*(==|!=|>=|<=|=|>|<|~)\s*(.*?)\s*", text)
    if not match:
        raise UsageError(f"where: {text!r} is not COLUMN OP VALUE", hint="such as 'length >= 64'")
    name, sign, raw = match.groups()
    if name != "length" and name not in schema:
        raise UsageError(
            f"where: there is no column {name!r}", hint=nearest(name, [*schema, "length"])
        )
    if name != "length" and (schema[name].per != "record" or schema[name].width):
        known = [name for name, c in schema.items() if c.per == "record" and not c.width]
        raise UsageError(
            f"where: the column {name!r} does not hold one value per record",
            hint=f"these do: {', '.join([*known, 'length'])}",
        )
    is_text = name != "length" and schema[name].dtype == "utf8"
    raw = raw.strip("'\"") if is_text else raw
    try:
        wanted: Any = raw if is_text or sign == "~" else _number(raw)
    except ValueError:
        raise UsageError(
            f"where: {raw!r} is no number, but {name!r} holds numbers",
            hint=f"compare with a number: --where '{name} > 10'",
        ) from None

    if sign == "~":
        try:
            re.compile(raw)
        except re.error as error:
            raise UsageError(
                f"where: {raw!r} is no regular expression: {error}",
                hint="after ~ comes a regular expression of Python's `re`",
            ) from None

    def one_holds(value: Any) -> bool:
        if sign == "~":
            return bool(re.search(raw, str(value)))
        return bool(COMPARE[sign](value, wanted))

    def holds(batch: Records, lengths: Array) -> Array:
        if is_text or sign == "~":
            if name == "length":
                return np.asarray([one_holds(length) for length in lengths], bool)
            return np.asarray(each_value(batch, name, schema, one_holds), bool)
        values = lengths if name == "length" else batch.columns[name]
        result: Array = COMPARE[sign](values, wanted)
        return result

    return holds


def _number(text: str) -> int | float:
    try:
        return int(text, 16) if text.lower().startswith("0x") else int(text)
    except ValueError:
        return float(text)


def take(batch: Records, chosen: Array, schema: Schema) -> Records:
    """Return some records of a batch, in order."""
    if len(chosen) == len(batch):
        return batch
    lengths = np.diff(batch.offsets)[chosen]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns: dict[str, Any] = {}
    for name, value in batch.columns.items():
        if isinstance(value, Strings):
            columns[name] = value.take(chosen)
        elif schema[name].per == "token":
            columns[name] = take_flat(value, batch.offsets, chosen)[0]
        else:
            columns[name] = value[chosen]
    phrases = None
    if batch.phrases is not None:
        ids, ends = take_flat(batch.phrases.ids, batch.phrases.offsets, chosen)
        phrases = dataclasses.replace(batch.phrases, ids=ids, offsets=ends)
    return Records(offsets, columns, batch.starts[chosen], phrases=phrases)
