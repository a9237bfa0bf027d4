"""`--explain FILE:LINE`: all stages of one record, from its bytes to its ids."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.inflate import inflate
from tokmill.builds.plan import BuildRecipe
from tokmill.builds.source import Frozen, Request, Resources
from tokmill.store.schema import each_drop
from tokmill.text.documents import DocumentSource, NoHash
from tokmill.text.make_document import Documents
from tokmill.text.record_blocks import BOM, is_stream

SHOWN = 400


def explain(chosen: BuildRecipe, place: str) -> dict[str, Any]:
    """Return stage → its result for the record that contains line LINE of FILE.

    For Parquet, LINE is the row, counted from 1. Stages: place, raw, outcome, document, tokens,
    ids. Raises `UsageError` for a line that does not exist.
    """
    name, _, number = place.rpartition(":")
    if not name or not number.isdecimal() or int(number) < 1:
        raise UsageError(f"--explain {place!r} is not FILE:LINE", hint="lines count from 1")
    kind = plugins.load(plugins.SOURCES, chosen.source)
    config = recipe.convert(kind.Config, chosen.options, f"options of {chosen.source}")
    request = Request(inputs=(name,), tokenizer=chosen.tokenizer, roles=chosen.roles)
    config = kind.resolve(config, request)
    frozen = kind.freeze(config, request)
    source: DocumentSource = kind(config, [name], frozen, Resources())
    rows = chosen.source == "parquet"
    line = int(number)
    offset, raw = (line - 1, b"") if rows else find_line(name, line)
    if offset == 0 and raw.startswith(BOM):
        # A record may begin before or after the byte order mark.
        offset = len(BOM)
    result = {"place": f"{name}, row {line}"}
    if not rows:
        result = {"place": f"{name}, line {line}, byte {offset:,}", "raw": show(raw)}
    begins = -1
    documents: Documents | None = None
    index, outcome = -1, ""
    for item in source.items():
        for batch in source.documents(item, NoHash()):
            starts = batch.starts
            before = int(np.searchsorted(starts, offset, side="right")) - 1
            if before >= 0 and starts[before] > begins:
                begins, documents, index, outcome = int(starts[before]), batch, before, "kept"
            for drop in each_drop(batch.drops):
                if begins < drop.offset <= offset:
                    begins, documents = drop.offset, None
                    verb = "rejected" if drop.rejected else "skipped"
                    outcome = f"{verb}: {drop.reason}"
    if begins < 0 or (rows and begins != offset):
        raise UsageError(
            f"{name} has no record at line {line}",
            hint="a line is counted from 1, and a record may begin on an earlier one",
        )
    result["outcome"] = outcome
    if documents is None:
        return result
    text = documents.texts[index]
    result["document"] = f"{len(text.encode()):,} bytes: {show(text.encode())}"
    for field, values in documents.kept.items():
        result[f"kept {field.strip()}"] = values[index]
    one = dataclasses.replace(documents, drops=[]).take([index], [])
    return result | _tokens(source, one, frozen["token"])


def _tokens(source: DocumentSource, document: Documents, frozen: Frozen) -> dict[str, str]:
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    encode = source.encoder(Resources(threads=False))
    records = encode(document)
    if not len(records):
        return {"outcome": f"rejected: {records.drops[0].reason}"}
    tokens = records.columns["token"]
    assert isinstance(tokens, np.ndarray)
    ids = tokens.tolist()
    tokenizer = Tokenizer.from_json(frozen.data)
    pieces = [tokenizer.decode([i]) for i in ids[:60]]
    more = f" … ({len(ids):,} in all)" if len(ids) > 60 else f" ({len(ids):,})"
    return {
        "engine": encode.engine,
        "tokens": " | ".join(repr(piece)[1:-1] for piece in pieces) + more,
        "ids": " ".join(map(str, ids[:60])) + more,
    }


def find_line(name: str, line: int) -> tuple[int, bytes]:
    """Return (byte offset, bytes) of a line of a file, counted from 1; compressed ones inflated."""
    if not Path(name).is_file():
        raise TokmillError(
            "there is no such file", where=name, hint="--explain FILE:LINE takes one of the inputs"
        )
    offset = 0
    for number, raw in enumerate(_lines(name), 1):
        if number == line:
            return offset, raw
        offset += len(raw)
    raise UsageError(f"{name} has no line {line}", hint="lines count from 1")


def _lines(name: str) -> Iterator[bytes]:
    if not is_stream(name):
        with open(name, "rb") as file:
            yield from file
        return
    rest = b""
    for chunk in inflate(name):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def show(raw: bytes) -> str:
    """Return bytes as readable text, shortened in the middle."""
    text = repr(raw.decode("utf-8", "backslashreplace"))[1:-1]
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
