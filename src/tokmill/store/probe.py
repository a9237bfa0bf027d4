"""What an engine made of known texts when a store was built, to be asked again of another engine.

A tokenizer's file does not say all: another engine, or another version of one, may leave out the
token that begins a text, or cut letters otherwise, and nothing of a store would show it. So a store
of text keeps 64 short texts with the ids that they got, `vocab/probe.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from tokmill.errors import TokmillError
from tokmill.files import sha256_file
from tokmill.store.manifest import read_sealed

FILE = "probe.json"
"""Name below `vocab/`."""
SHOWN = 24
"""Ids of a text that are shown."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Known texts and the ids that a store would hold of each."""

    before: Count
    """Ids that the build put before every text (`bos`)."""
    after: Count
    """Ids that it put behind every text (`eot`)."""
    answers: list[tuple[str, list[int]]]
    """Text, and its ids with those before and after it; none where the engine refused the text."""

    def texts(self) -> list[str]:
        """Return the texts."""
        return [text for text, _ in self.answers]

    def bare(self) -> list[tuple[str, list[int]]]:
        """Return each text with its ids alone, without those around it."""
        return [(text, ids[self.before : len(ids) - self.after]) for text, ids in self.answers]


def probe_path(store: Path) -> Path:
    """Return where the probe of a store lies."""
    return store / "vocab" / FILE


def read_probe(store: Path) -> Probe:
    """Read the probe of a store."""
    return read_sealed(probe_path(store), Probe)


def probe_digest(store: Path) -> str | UnsetType:
    """Return the sha256 of the probe's file, as the manifest has it; unset where there is none."""
    path = probe_path(store)
    return sha256_file(path) if path.is_file() else UNSET


def compare(
    then: Sequence[tuple[str, list[int]]],
    now: Sequence[tuple[str, list[int]]],
    *,
    where: str,
    who: str,
    hint: str,
) -> None:
    """Refuse answers of which one is another now.

    Raises `TokmillError` with the first text that differs and its ids, then and now.
    """
    for number, ((text, before), (_, after)) in enumerate(zip(then, now, strict=True), 1):
        if before != after:
            raise TokmillError(
                f"{who}: text {number} of {len(then)}, {text!r}, was {_ids(before)} then and is "
                f"{_ids(after)} now{_missing(before, after)}",
                where=where,
                hint=hint,
            )


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids[:SHOWN])) + " …" * (len(ids) > SHOWN) if ids else "refused"


def _missing(before: list[int], after: list[int]) -> str:
    for one, other, word in ((before, after, "without"), (after, before, "with")):
        if one and one[1:] == other:
            return f", {word} the {one[0]} that begins it"
        if one and one[:-1] == other:
            return f", {word} the {one[-1]} that ends it"
    return ""


def check_coder(
    path: Path, encode: Callable[[str], list[int] | None], specials: Sequence[str] = ()
) -> None:
    """Refuse a coder that gives the texts of a probe's file other ids than the build did.

    `specials`: names of tokens that a build may have taken for text or not; texts with one are
    left out, as are those that one of the two refuses (None). Without a file nothing is checked.
    """
    if not path.is_file():
        return
    then, now = [], []
    for text, ids in read_sealed(path, Probe).bare():
        if ids and not any(name in text for name in specials):
            found = encode(text)
            if found is not None:
                then.append((text, ids))
                now.append((text, found))
    compare(
        then,
        now,
        where=str(path),
        who="this program gives other ids than the engine with which the store was built",
        hint="install the packages with which the store was built (`tokmill doctor` lists those "
        "that are here)",
    )
