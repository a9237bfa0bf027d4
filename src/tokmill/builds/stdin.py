"""Inputs that are no files: their content is kept in a file of the store, to be read again.

These are the pipe, `-`, and what a source makes of a name (`Source.spelled`).

A build reads its input more than once: to plan, to train a tokenizer, after an interruption. The
file lies in the store's `cache`. Its name is a digest of the content, or says what it was made of,
so equal input gives an equal plan. It is removed when the store's plan does not name it any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import machine_errors, make_folder, read_file, remove, write_file
from tokmill.base.inflate import packing
from tokmill.builds.folder import check_folder, claimed
from tokmill.builds.plan import BuildRecipe
from tokmill.store import manifest as layout
from tokmill.store.marks import LOCK
from tokmill.store.receipts import read_planned

STDIN = "-"
"""The INPUT argument for stdin."""
NAME, SPELLED = "stdin-", "spelled-"
LONGEST = 100
"""Characters of a name that says what a file was made of; a longer one is cut, with a digest."""


@contextlib.contextmanager
def stdin_kept(chosen: BuildRecipe) -> Iterator[BuildRecipe]:
    """Yield the recipe with files in place of the input `-` and of those that a source spells out.

    At the end files are removed that no plan names. Raises `UsageError` if nothing is piped in, or
    the source cannot read from a pipe.
    """
    kind = plugins.load(plugins.SOURCES, chosen.source)
    spelled = {name: found for name in chosen.inputs if (found := kind.spelled(name))}
    if STDIN not in chosen.inputs and not spelled:
        yield chosen
        return
    if STDIN in chosen.inputs:
        _check_pipe(chosen, kind.stdin_suffix)
    if not chosen.out:
        raise UsageError("no folder for the store was named", hint="-o STORE")
    out = Path(chosen.out)
    check_folder(out)
    try:
        with claimed(out):
            cache = make_folder(out / "cache")
            places = {name: _spelled(cache, *found) for name, found in spelled.items()}
            if STDIN in chosen.inputs:
                places[STDIN] = _kept(cache, kind.stdin_suffix)
        inputs = tuple(str(places.get(name, name)) for name in chosen.inputs)
        yield msgspec.structs.replace(chosen, inputs=inputs)
    finally:
        _remove_unplanned(out)


def _check_pipe(chosen: BuildRecipe, suffix: str) -> None:
    if not suffix:
        raise UsageError(
            f"{chosen.source} cannot read from a pipe", hint="text, jsonl and chat can"
        )
    if chosen.inputs.count(STDIN) > 1:
        raise UsageError("stdin was named twice", hint="name - once")
    if chosen.out and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(
            "nothing is piped in", where="-", hint="zcat x.gz | tokmill build KIND - -o STORE"
        )


def _spelled(cache: Path, name: str, data: bytes) -> Path:
    """Return the file of what a source made of a name; it is not written again if it is there."""
    stem, suffix = Path(name).stem, Path(name).suffix
    if len(stem) > LONGEST:
        stem = f"{stem[:LONGEST]}-{hashlib.sha256(data).hexdigest()[:8]}"
    path = cache / f"{SPELLED}{stem}{suffix}"
    return path if path.is_file() and read_file(path) == data else write_file(path, data)


def _kept(cache: Path, suffix: str) -> Path:
    digest = hashlib.sha256()
    head = b""

    def chunks() -> Iterator[bytes]:
        nonlocal head
        with machine_errors("read", "stdin"):
            while chunk := sys.stdin.buffer.read(1 << 20):
                head = head or chunk[:16]
                digest.update(chunk)
                yield chunk

    path = write_file(cache / f"{NAME}new", chunks())
    if not head:
        remove(path)
        raise TokmillError(
            "nothing came through the pipe",
            where="stdin",
            hint="did the command in front of it fail?",
        )
    packed = packing(head)
    final = cache / f"{NAME}{digest.hexdigest()[:24]}{suffix}{packed}"
    with machine_errors("write", final):
        os.replace(path, final)
    return final


def _remove_unplanned(out: Path) -> None:
    """Remove kept files that no plan names, and then the folder if it is empty."""
    named = set()
    planned = (out / layout.PLAN).exists()
    if planned:
        with contextlib.suppress(TokmillError):
            named = {Path(item.path).name for item in read_planned(out)}
    cache = out / "cache"
    for path in (*cache.glob(f"{NAME}*"), *cache.glob(f"{SPELLED}*")):
        if path.name not in named:
            remove(path)
    left = {path.name for path in (*out.glob("*"), *cache.glob("*"))}
    if not planned and left <= {"cache", LOCK}:
        remove(out / LOCK)
        with contextlib.suppress(OSError):
            cache.rmdir()
            out.rmdir()
