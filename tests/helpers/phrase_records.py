"""Random records that are sequences of phrases, and their expansion by hand."""

from typing import Any

from hypothesis import strategies as st

from tokmill.store.schema import Column, Schema

PHRASES: Schema = {
    "asm": Column("u2", phrase=True),
    "type": Column("u1", phrase=True),
    "border": Column("u1", phrase=True),
    "side": Column("u1"),
    "address": Column("u8", per="record"),
}
CODED = ["asm", "type", "border"]


@st.composite
def tables(draw: Any) -> dict[str, list[list[int]]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return {
        name: [draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)) for n in sizes]
        for name in ("asm", "type")
    }


@st.composite
def shards(draw: Any) -> tuple[dict[str, list[list[int]]], list[dict[str, Any]]]:
    table = draw(tables())
    phrase = st.tuples(st.integers(0, len(table["asm"]) - 1), st.booleans())
    rows = []
    for i, phrases in enumerate(draw(st.lists(st.lists(phrase, max_size=5), max_size=4))):
        length = sum(len(table["asm"][number]) for number, _ in phrases)
        rows.append({"phrases": phrases, "side": [j % 2 for j in range(length)], "address": i})
    return table, rows


def expand(table: dict[str, list[list[int]]], row: dict[str, Any]) -> dict[str, list[int]]:
    """Write a record's phrases out by hand."""
    found: dict[str, list[int]] = {name: [] for name in CODED}
    for number, top in row["phrases"]:
        found["asm"] += table["asm"][number]
        found["type"] += table["type"][number]
        length = len(table["asm"][number])
        found["border"] += [3 if top else 1] + [0] * (length - 1)
    return found
