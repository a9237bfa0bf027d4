"""Known texts and the ids that a store's engine gave them; other engines must give the same ids.

A tokenizer's file does not decide everything. Another engine, or another version, may leave out the
token that begins a text, or cut text differently, and nothing in a store would show it. So a store
of text keeps 64 short texts with their ids in `vocab/probe.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from tokmill.base.errors import TokmillError
from tokmill.base.files import sha256_file
from tokmill.store.manifest import read_sealed

FILE = "probe.json"
"""Name in `vocab/`."""
SHOWN = 24
"""Ids of a text that an error shows."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Known texts, and for each the ids of its record in the store."""

    before: Count
    """Number of ids that the build put before every text (`bos`)."""
    after: Count
    """Number of ids that it put after every text (`eot`)."""
    answers: list[tuple[str, list[int]]]
    """Text, and its ids including those before and after; no ids if the engine refused the text."""

    def texts(self) -> list[str]:
        return [text for text, _ in self.answers]

    def bare(self) -> list[tuple[str, list[int]]]:
        """Return each text with its own ids, without those before and after."""
        return [(text, ids[self.before : len(ids) - self.after]) for text, ids in self.answers]


def probe_path(store: Path) -> Path:
    """Return the path of a store's probe."""
    return store / "vocab" / FILE


def read_probe(store: Path) -> Probe:
    return read_sealed(probe_path(store), Probe)


def probe_digest(store: Path) -> str | UnsetType:
    """Return the sha256 of the probe's file for the manifest; `UNSET` if there is none."""
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
    """Refuse answers that differ from earlier ones.

    Raises `TokmillError` for the first text whose ids differ, with the ids then and now.
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
    for longer, shorter, word in ((before, after, "without"), (after, before, "with")):
        if longer and longer[1:] == shorter:
            return f", {word} the {longer[0]} that begins it"
        if longer and longer[:-1] == shorter:
            return f", {word} the {longer[-1]} that ends it"
    return ""


def check_coder(
    path: Path, encode: Callable[[str], list[int] | None], specials: Sequence[str] = ()
) -> None:
    """Refuse an encoder that gives the texts of a probe's file other ids than the build did.

    `encode` returns None for a text that it refuses; such texts are not compared, nor those that
    the build's engine refused. `specials`: names of special tokens; texts with one are not
    compared, as a build may read a name as text or as the token. Without a file nothing is checked.
    """
    if not path.is_file():
        return
    then, now = [], []
    for text, ids in read_sealed(path, Probe).bare():
        if ids and not any(name in text for name in specials):
            again = encode(text)
            if again is not None:
                then.append((text, ids))
                now.append((text, again))
    compare(
        then,
        now,
        where=str(path),
        who="this program gives other ids than the engine with which the store was built",
        hint="install the packages with which the store was built (`tokmill doctor` lists the "
        "installed ones)",
    )
