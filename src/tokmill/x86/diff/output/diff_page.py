"""A diff of two programs as one HTML page: a list of functions, code and graphs side by side.

The page needs no network. Names and strings from programs are text in it and never markup: they are
in a JSON block without `<` and `&`, and the script makes text nodes of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.files import make_folder, write_file
from tokmill.base.progress import human_count
from tokmill.store.schema import Array
from tokmill.version import __version__
from tokmill.x86.diff.output.diff_code import LONGEST_NAME, Code, Listing, SideBySide, shown
from tokmill.x86.diff.output.diff_json import REASONS
from tokmill.x86.diff.output.summary import ADDED, MOST_REFERENCES, REMOVED, references_of
from tokmill.x86.diff.result import Diff, ProgramChanges
from tokmill.x86.graph import Graph

MOST_CODE = 24 << 20
"""Most bytes of code on a page, that of the functions that changed most; others are only listed."""
MOST_FUNCTION = 2 << 20
"""Most bytes of one function's code; larger functions are only listed."""
MOST_BLOCKS = 1000
"""A function's graph is drawn if it has at most so many blocks."""
CHANGED, REFERENCES, SAME, DELETED, INSERTED = range(5)
"""Kinds of rows: `REFERENCES` are the same instructions, which refer to something else."""
KINDS = {
    "changed": "changed", "references": "same except for references", "same": "same",
    "deleted": f"no partner ({REMOVED})", "inserted": f"no partner ({ADDED})",
}  # fmt: skip
"""Their names for styles, and as they are shown."""
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class Row(msgspec.Struct, array_like=True):
    """A line of the list of functions: in JSON a list of its fields."""

    kind: int
    name_a: str
    address_a: str
    name_b: str
    address_b: str
    similarity: float
    confidence: float
    reason: str
    size_a: int
    """Number of instructions."""
    size_b: int
    references: list[str]
    """What operands of equal instructions refer to, `old → new`."""
    code: int
    """Number of its code; -1: the page does not have it."""


def diff_page(
    a: Graph,
    b: Graph,
    diff: Diff,
    out: Path,
    *,
    called: tuple[str, str] | None = None,
    most: int = MOST_CODE,
) -> None:
    """Write the page of a diff: the most changed functions first, then those of only one program.

    Args:
        called: names of the programs on the page, for example if both have the same name; by
            default those in their graphs.
    """
    jinja = plugins.require("jinja2")
    plugins.require("iced_x86")
    names = called or (a.program, b.program)
    sides = SideBySide(a, b, diff)
    rows = _rows(sides, diff)
    code = _code(sides, rows, most)
    notes = [f"{number:,} {what}" for what, number in diff.left_out.items()]
    without = len(rows) - len(code)
    if without:
        notes.append(
            f"The code of {human_count(without, 'function')} is not on this page. It holds at most "
            f"{most >> 20} MiB of code, and {MOST_FUNCTION >> 20} MiB of one function: that of the "
            "functions that changed most."
        )
    data = {
        "rows": [row for row, _ in rows],
        "code": code,
        "kinds": list(KINDS.values()),
        "programs": [shown(name, LONGEST_NAME) for name in names],
        "mostBlocks": MOST_BLOCKS,
    }
    environment = jinja.Environment(
        loader=jinja.PackageLoader("tokmill", "x86/diff/output"),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    counts = np.bincount([row.kind for row, _ in rows], minlength=len(KINDS)).tolist()
    html = environment.get_template("diff_page.html.j2").render(
        title=" → ".join(shown(name if called else Path(name).name, 80) for name in names),
        version=__version__,
        programs=[_about(one, name) for one, name in zip((a, b), names, strict=True)],
        counts=[(*names, count) for names, count in zip(KINDS.items(), counts, strict=True)],
        notes=notes,
        other=[(title, rows) for title, rows in _other(diff.other) if rows],
        data=_safe(data),
    )
    make_folder(out.parent)
    write_file(out, html)


def _about(graph: Graph, name: str) -> dict[str, str]:
    facts = [
        human_count(len(graph.function_address), "function"),
        human_count(len(graph.block_address), "block"),
        " ".join(filter(None, (graph.compiler, graph.level))),
    ]
    return {"name": shown(name, LONGEST_NAME), "facts": ", ".join(filter(None, facts))}


def _other(changes: ProgramChanges) -> list[tuple[str, list[str]]]:
    data = [
        f"{shown(one.name, LONGEST_NAME) or 'data'} at {one.a:x} → {one.b:x}, {one.size_a:,} → "
        f"{one.size_b:,} bytes, at +{one.first:#x}: {one.old or 'nothing'} → {one.new or 'nothing'}"
        for one in changes.data
    ]
    return [
        ("data changed", data),
        *(
            (f"{what} {how}", [shown(n, LONGEST_NAME) for n in getattr(changes, f"{what}_{how}")])
            for what in ("imports", "exports")
            for how in ("deleted", "inserted")
        ),
    ]


def _rows(sides: SideBySide, diff: Diff) -> list[tuple[Row, int]]:
    """Return the rows, the most changed first, each with the number of its match or function."""
    sizes_a = [sides.a.size(one) for one in diff.function_a.tolist()]
    sizes_b = [sides.b.size(one) for one in diff.function_b.tolist()]
    changed = (1 - diff.similarity.astype(np.float64)) * np.maximum(sizes_a, sizes_b)
    # The same functions have no change, and those at lower addresses come first.
    order: Array = np.argsort(-changed, kind="stable") if len(changed) else np.zeros(0, np.int64)
    rows = [(_match(sides, diff, number), number) for number in order.tolist()]
    rows.sort(key=lambda row: row[0].kind)
    for kind, numbers in ((DELETED, diff.deleted), (INSERTED, diff.inserted)):
        listing = sides.a if kind == DELETED else sides.b
        largest = sorted(numbers.tolist(), key=lambda one: -listing.size(one))
        rows += [(_alone(listing, one, kind), one) for one in largest]
    # Changes come before the functions that are the same.
    rows.sort(key=lambda row: row[0].kind == SAME)
    return rows


def _match(sides: SideBySide, diff: Diff, number: int) -> Row:
    one, other = int(diff.function_a[number]), int(diff.function_b[number])
    similarity = float(diff.similarity[number])
    # A function that is not the same must not be rounded to 100 %.
    rounded = min(round(similarity, 3), 0.999) if similarity < 1 else 1.0
    kind = REFERENCES if diff.references_only[number] else CHANGED
    return Row(
        SAME if similarity == 1 else kind,
        sides.a.names[one],
        f"{int(sides.a.graph.function_address[one]):x}",
        sides.b.names[other],
        f"{int(sides.b.graph.function_address[other]):x}",
        rounded,
        round(float(diff.confidence[number]), 3),
        REASONS[int(diff.reason[number])],
        sides.a.size(one),
        sides.b.size(other),
        [shown(text, LONGEST_NAME) for text in references_of(diff, number)[:MOST_REFERENCES]],
        -1,
    )


def _alone(listing: Listing, number: int, kind: int) -> Row:
    name, size = listing.names[number], listing.size(number)
    address = f"{int(listing.graph.function_address[number]):x}"
    if kind == DELETED:
        return Row(kind, name, address, "", "", 0, 0, "", size, 0, [], -1)
    return Row(kind, "", "", name, address, 0, 0, "", 0, size, [], -1)


def _code(sides: SideBySide, rows: list[tuple[Row, int]], most: int) -> list[Code]:
    codes: list[Code] = []
    size = 0
    for row, code in _with_code(sides, rows):
        length = len(msgspec.json.encode(code))
        if length > MOST_FUNCTION:
            continue
        if size + length > most:
            break
        row.code = len(codes)
        codes.append(code)
        size += length
    return codes


def _with_code(sides: SideBySide, rows: list[tuple[Row, int]]) -> Iterator[tuple[Row, Code]]:
    sides_of: dict[int, Literal["a", "b"]] = {DELETED: "a", INSERTED: "b"}
    for row, number in rows:
        if row.kind in sides_of:
            yield row, sides.alone(sides_of[row.kind], number)
        else:
            yield row, sides.match(number)


def _safe(data: dict[str, Any]) -> str:
    """Return JSON that is safe in a page: no character in it begins markup."""
    text = json.dumps(msgspec.to_builtins(data), ensure_ascii=False, separators=(",", ":"))
    for sign, escape in ESCAPES.items():
        text = text.replace(sign, escape)
    return text
