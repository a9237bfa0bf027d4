"""The input `-`: the content of the pipe is kept in a file of the store, to be read again.

A build reads its input more than once: to plan, to train a tokenizer, after an interruption, for a
repair. The file lies in the store's `cache`. Its name is a digest of the content, so equal input
gives an equal plan. It is removed when the store's plan does not name it any more.
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
from tokmill.builds.folder import check_folder, claimed
from tokmill.builds.prepare import BuildRecipe
from tokmill.errors import TokmillError, UsageError
from tokmill.files import machine_errors, make_folder, remove, write_file
from tokmill.store import manifest as layout
from tokmill.store.marks import LOCK
from tokmill.store.receipts import read_planned

STDIN = "-"
"""The INPUT argument for stdin."""
NAME = "stdin-"
MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}


@contextlib.contextmanager
def stdin_kept(chosen: BuildRecipe) -> Iterator[BuildRecipe]:
    """Yield the recipe with a file in place of the input `-`.

    At the end the file is removed if no plan names it. Raises `UsageError` if nothing is piped in,
    or the source cannot read from a pipe.
    """
    if STDIN not in chosen.inputs:
        yield chosen
        return
    suffix = plugins.load(plugins.SOURCES, chosen.source).stdin_suffix
    if not suffix:
        raise UsageError(
            f"{chosen.source} cannot read from a pipe", hint="text, jsonl and chat can"
        )
    if chosen.inputs.count(STDIN) > 1:
        raise UsageError("stdin was named twice", hint="name - once")
    if not chosen.out:
        raise UsageError("no folder for the store was named", hint="-o STORE")
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "nothing is piped in", where="-", hint="zcat x.gz | tokmill build KIND - -o STORE"
        )
    out = Path(chosen.out)
    check_folder(out)
    try:
        with claimed(out):
            path = _kept(make_folder(out / "cache"), suffix)
        inputs = tuple(str(path) if name == STDIN else name for name in chosen.inputs)
        yield msgspec.structs.replace(chosen, inputs=inputs)
    finally:
        _remove_unplanned(out)


def _kept(cache: Path, suffix: str) -> Path:
    digest = hashlib.sha256()
    head = b""

    def chunks() -> Iterator[bytes]:
        nonlocal head
        with machine_errors("read", "stdin"):
            while chunk := sys.stdin.buffer.read(1 << 20):
                head = head or chunk[:4]
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
    packed = next((end for magic, end in MAGIC.items() if head.startswith(magic)), "")
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
    for path in cache.glob(f"{NAME}*"):
        if path.name not in named:
            remove(path)
    left = {path.name for path in (*out.glob("*"), *cache.glob("*"))}
    if not planned and left <= {"cache", LOCK}:
        remove(out / LOCK)
        with contextlib.suppress(OSError):
            cache.rmdir()
            out.rmdir()
