"""Conditions on records (COLUMN OP VALUE), and the selection of records of a batch."""

import dataclasses
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.store.schema import Array, Records, Schema, Strings, take_flat

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
        return value.each(function).tolist()
    except UnicodeDecodeError:
        raise TokmillError(
            f"a string of the column {name!r} is not UTF-8: the store is damaged",
            hint="`tokmill store validate STORE` finds it",
        ) from None


NUMBER = re.compile(
    r"([-+]?)(?:0x([0-9a-f]+)|((?:0|[1-9][0-9]*|(?=\.[0-9]))(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?|inf(?:inity)?))",
    re.IGNORECASE,
)
"""A number as JSON writes it, or without a digit before its point, or hexadecimal."""
QUOTED = re.compile(r"(['\"]).*\1")
ORDERS = (">=", "<=", ">", "<")


def parse_condition(
    text: str, schema: Schema
) -> Callable[[Records, Array], tuple[Array, Array | None]]:
    """Return the function of a `where` text: (batch, lengths) → (holds, holds no number).

    Both are bool (n,). A number is compared with numbers, also those that a column of strings
    holds; a value that is no number is not above or below one. In quotes it is compared as text.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(==|!=|>=|<=|=|>|<|~)\s*(.*?)\s*", text)
    if not match:
        raise UsageError(f"where: {text!r} is not COLUMN OP VALUE", hint="such as 'length >= 64'")
    name, sign, raw = match.groups()
    _check_column(name, schema)
    is_text = name != "length" and schema[name].dtype == "utf8"
    bare = raw[1:-1] if is_text and QUOTED.fullmatch(raw) else raw
    number = number_of(raw) if sign != "~" else None
    if not is_text and number is None and sign != "~":
        raise UsageError(
            f"where: {raw!r} is not a number, but {name!r} holds numbers",
            hint=f"compare with a number: --where '{name} > 10'",
        )
    kind: Any = np.dtype(np.int64) if name == "length" else schema[name].numpy()
    if kind.kind == "f" and number and _rounds_to_inf(abs(number), kind):
        hint = f"leave it out, or compare with inf: --where '{name} < inf'"
        raise UsageError(f"where: {name!r} has no numbers as large as {raw[:20]}", hint=hint)
    if sign == "~":
        try:
            re.compile(bare)
        except re.error as error:
            raise UsageError(
                f"where: {bare!r} is not a regular expression: {error}",
                hint="after ~ comes a regular expression of Python's `re`",
            ) from None

    def one_holds(value: Any) -> bool | None:
        """Say whether a value fits; None: it is not a number, and neither above nor below one."""
        if sign == "~":
            return bool(re.search(bare, str(value)))
        if number is None:
            return bool(COMPARE[sign](value, bare))
        if (as_number := number_of(value)) is None:
            return None if sign in ORDERS else sign == "!="
        return bool(COMPARE[sign](as_number, number))

    def holds(batch: Records, lengths: Array) -> tuple[Array, Array | None]:
        values = lengths if name == "length" else batch.columns[name]
        if isinstance(values, np.ndarray) and sign != "~":
            missing: Array | None = None
            if sign in ORDERS and values.dtype.kind == "f":
                missing = np.isnan(values)
            return COMPARE[sign](values, number), missing
        if name == "length":
            answers = [one_holds(length) for length in lengths]
        else:
            answers = each_value(batch, name, schema, one_holds)
        unknown = np.asarray([one is None for one in answers], bool) if number is not None else None
        return np.asarray(answers, bool), unknown

    return holds


def _check_column(name: str, schema: Schema) -> None:
    single = [name for name, c in schema.items() if c.per == "record" and not c.width]
    if name not in (*schema, "length"):
        raise UsageError(
            f"where: there is no column {name!r}", hint=nearest(name, [*schema, "length"])
        )
    if name == "length" and name in schema:
        raise UsageError(
            "where: 'length' counts tokens, and the store has a column of this name",
            hint="--min-length and --max-length count tokens; give the column another name",
        )
    if name not in (*single, "length"):
        raise UsageError(
            f"where: the column {name!r} does not hold one value per record",
            hint=f"these do: {', '.join([*single, 'length'])}",
        )


def _rounds_to_inf(number: float, kind: Any) -> bool:
    """Return whether a finite number is beyond all of a type; 3.4028235e38 is the largest f4."""
    info = np.finfo(kind)
    return float(info.max) * (1 + float(info.eps) / 4) < number != np.inf


def number_of(text: str) -> int | float | None:
    """Return the number that a text is; None for one that is none (nan too)."""
    if not (match := NUMBER.fullmatch(text)):
        return None
    sign, digits, decimal = match.groups()
    if digits:
        return int(sign + digits, 16)
    return int(sign + decimal) if decimal.isdigit() and len(decimal) < 4000 else float(text)


def take(batch: Records, chosen: Array, schema: Schema) -> Records:
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
