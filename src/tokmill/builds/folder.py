"""The folder of a store before and between builds: checks, the lock, clearing, changed inputs.

A store keeps size, times and inode of each input file in `cache/stamps.jsonl`. These stamps are a
hint: they are part of no identity, and may be lost. If a stamp differs, the file is read again and
compared with the digests in the receipts, as its sampled digest may be the same.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from tokmill.base.errors import Interrupted, MachineError, TokmillError, UsageError
from tokmill.base.files import (
    address_of,
    inside,
    machine_errors,
    make_folder,
    new_folder,
    path_from_text,
    path_to_text,
    read_file,
    remove,
    remove_leftovers,
    write_file,
)
from tokmill.base.locks import is_lock, locked
from tokmill.base.progress import Progress, human_count
from tokmill.base.remote import stamp_of
from tokmill.builds.make_shard import Content, InputChanged
from tokmill.builds.plan import How, Prepared, difference, plan_is_current, write_plan
from tokmill.builds.source import PROBE_LOCK, Frozen, Item, Source
from tokmill.store import manifest as layout
from tokmill.store.checks.probe import FILE as PROBE
from tokmill.store.checks.probe import probe_path
from tokmill.store.manifest import SHARD_FILE, Overlay, Plan, PlannedItem, Receipt
from tokmill.store.marks import LOCK, is_store
from tokmill.store.receipts import read_planned, read_receipts
from tokmill.store.shards.shard import SUFFIX
from tokmill.store.vocab import LEARNED

KNOWN_FILES = ("manifest.json", layout.PLAN, "inputs.jsonl", "events.jsonl")
KNOWN_FOLDERS = ("shards", "vocab", "overlays", "cache")
SHARD_DIGITS = 24
"""Digits of a shard's name before the number of its part."""
AGAIN = "cache/again"
"""Folder in which shards are made again, to compare them with the old ones."""
CACHED = re.compile(
    r"stamps\.jsonl|(repeats|names|projected)-[0-9a-f]{24}|\.(repeats|names|projected)\.lock|"
    r"pieces-[0-9a-f]{16}-[-0-9]+\.safetensors"
)
"""Matches the other files that a store keeps in `cache`."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TAKEN = "another build is writing to this store"


def check_folder(out: Path) -> None:
    """Refuse a folder that holds something other than a store.

    A store is recognised by the content of its files, a store that has just begun by its lock;
    names of files are not enough.
    """
    if out.is_file():
        raise UsageError(
            "is a file; a store is a folder", where=str(out), hint="choose another path"
        )
    if not out.is_dir():
        return
    check_links(out)
    if is_store(out):
        return
    names = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith("."))
    if is_lock(out / LOCK):
        names = [name for name in names if name not in (*KNOWN_FILES, *KNOWN_FOLDERS)]
    if names:
        raise UsageError(
            f"the folder is not empty and holds no store ({names[0]} …)",
            where=str(out),
            hint="choose a new folder",
        )


def check_links(out: Path) -> None:
    """Refuse a store with a link in place of a folder: the files behind it may be the user's."""
    folder = out / "overlays"
    overlays = [path for path in folder.iterdir() if path.is_symlink()] if folder.is_dir() else []
    for path in [*(out / name for name in (*KNOWN_FOLDERS, AGAIN)), *sorted(overlays)]:
        if path.is_symlink():
            raise UsageError(
                "is a link; a store holds its files itself",
                where=str(path),
                hint="remove the link, or choose another folder for the whole store",
            )


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Hold the lock of a folder that will become a store; remove both if nothing was written."""
    with new_folder(out), locked(out / LOCK, TAKEN, "wait for it, or choose another folder"):
        try:
            yield
        finally:
            if [path.name for path in out.iterdir()] == [LOCK]:
                remove(out / LOCK)


def clear(out: Path, spared: Collection[str] = ()) -> None:
    """Remove a store from its folder, the manifest first, except the folders `spared`.

    Files that a store does not write stay, and so does the folder itself.
    """
    check_links(out)
    vocabularies = _vocabulary_files(out)
    for name in KNOWN_FILES:
        if not (out / name).is_dir():
            remove(out / name)
    for name in KNOWN_FOLDERS:
        folder = out / name
        if name in spared or not folder.is_dir():
            continue
        if name == "overlays":
            for overlay in [path for path in folder.iterdir() if is_store(path)]:
                clear(overlay)
                remove(overlay / LOCK)
                _remove_empty(overlay)
        elif name == "vocab":
            # With LEARNED, the tokenizer was learned just before, for this build.
            if (folder / LEARNED).exists():
                vocabularies.difference_update(TOKENIZER_FILES)
            _remove_files(folder, lambda name: name in vocabularies)
        elif name == "shards":
            remove_shards(folder)
        else:
            remove_shards(out / AGAIN)
            _remove_files(folder, lambda name: CACHED.fullmatch(name) is not None)


def remove_shards(folder: Path, kept: Collection[str] = ()) -> None:
    """Remove the files of shards in a folder, except those of `kept`; then the folder if empty."""
    _remove_files(
        folder,
        lambda name: SHARD_FILE.fullmatch(name) is not None and name.partition(".")[0] not in kept,
    )


def _remove_files(folder: Path, chosen: Callable[[str], bool]) -> None:
    if not folder.is_dir() or folder.is_symlink():
        return
    remove_leftovers(folder)
    with machine_errors("list", folder), os.scandir(folder) as entries:
        names = [e.name for e in entries if chosen(e.name) and e.is_file(follow_symlinks=False)]
    for name in names:
        remove(folder / name)
    _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _vocabulary_files(out: Path) -> set[str]:
    """Return the names of a store's files in `vocab`, from its plan or its manifest."""
    for name, kind in layout.DESCRIPTIONS.items():
        with contextlib.suppress(TokmillError):
            description: Any = layout.read_checked(out / name, kind)
            tokenizer = TOKENIZER_FILES if "token" in description.vocabularies else ()
            return {*(one.file for one in description.vocabularies.values()), *tokenizer, PROBE}
    return {*TOKENIZER_FILES, PROBE}


def sweep(out: Path) -> None:
    """Remove the files that killed writers left behind."""
    for folder in (out, out / "vocab", out / "shards", out / "cache"):
        remove_leftovers(folder)
    if probe_path(out).exists():
        # The lock is no longer used; a kill may have left it.
        remove(out / PROBE_LOCK)


@contextlib.contextmanager
def unless_failed(out: Path) -> Iterator[None]:
    """Remove a new store whose build fails before its first record, so that another can begin.

    A store stays if its build was interrupted, stopped by the machine, or met a changed input:
    these can be continued.
    """
    there = [name for name in (*KNOWN_FILES, *KNOWN_FOLDERS) if (out / name).exists()]
    # `vocab` may hold a tokenizer that was learned for this build, `cache` an input.
    begins = {*there} <= {"vocab", "cache"}
    asked = probe_path(out).exists()
    try:
        yield
    except Exception as error:
        goes_on = isinstance(error, Interrupted | MachineError | InputChanged)
        if begins and not goes_on and not any(receipt.records for receipt in read_receipts(out)):
            sweep(out)
            clear(out, there)
            remove(out / STAMPS)
            if not asked:
                remove(probe_path(out))
            if not there:
                # Otherwise it marks the folder as a store that has begun.
                remove(out / LOCK)
        raise


def place_plan(out: Path, prepared: Prepared, how: How) -> None:
    """Compare the plan with the store's old one, then write it with its vocabularies."""
    plan, stamps = prepared.plan, stamps_of(prepared.planned)
    shards = (path.name for path in out.glob(f"shards/*{SUFFIX}"))
    if (out / layout.PLAN).exists() or any(map(SHARD_FILE.fullmatch, shards)):
        old = _plan_before(out, prepared.planned)
        if old and old.recipe_id != plan.recipe_id and any(r.records for r in read_receipts(out)):
            lines = "\n  ".join(difference(old.recipe, plan.recipe))
            is_overlay = isinstance(plan.overlay, Overlay)
            thing = "overlay was made" if is_overlay else "store was built"
            place = "choose another --name" if is_overlay else "build into a new folder"
            raise TokmillError(
                f"the {thing} with another recipe:\n  {lines}",
                where=str(out),
                hint=f"{place}, or start over with --fresh",
            )
        changed = changed_shards(out, prepared.planned, stamps, prepared.source, quiet=how.quiet)
        same = old is not None and old.plan_id == plan.plan_id
        if changed or not same:
            report_changes(out, prepared.planned, how, changed)
        for path in [*(out / "shards").glob("*.json")] if changed else []:
            if SHARD_FILE.fullmatch(path.name) and path.name[:SHARD_DIGITS] in changed:
                remove(path)
        if same and plan_is_current(out, plan, prepared.planned):
            write_vocabularies(out, prepared.frozen)
            write_stamps(out, stamps)
            return
    write_vocabularies(out, prepared.frozen)
    make_folder(out / "shards")
    write_plan(out, plan, prepared.planned)
    write_stamps(out, stamps)


def _plan_before(out: Path, planned: Sequence[PlannedItem]) -> Plan | None:
    """Return the store's plan; None if it is damaged or lost, and its shards are those planned now.

    A shard's name depends on the recipe and on its items.
    """
    try:
        return layout.read_plan(out)
    except TokmillError as error:
        shards = {item.shard for item in planned}
        if any(receipt.shard in shards for receipt in read_receipts(out)):
            return None
        error.hint = "run the build with the options that it had, or start over with --fresh"
        if not (out / layout.PLAN).exists():
            what = "there are shards but no plan.json"
            raise TokmillError(what, where=str(out), hint=error.hint) from None
        raise


def write_vocabularies(out: Path, frozen: Mapping[str, Frozen]) -> None:
    for item in frozen.values():
        write_if_different(inside(make_folder(out / "vocab"), item.vocabulary.file), item.data)


def report_changes(
    out: Path, planned: Sequence[PlannedItem], how: How, changed: Mapping[str, str]
) -> None:
    """Raise `TokmillError` with the changed and removed inputs, unless the user agreed (`yes`).

    `changed`: shard → an input whose content changed although its sampled digest did not.
    """
    if not (out / "inputs.jsonl").exists():
        return
    before = list(read_planned(out))
    now = {item.name: (item.digest, item.others) for item in planned}
    lines = dict.fromkeys(f"changed: {name}" for name in changed.values())
    for item in before:
        if now.get(item.name) == (item.digest, item.others):
            continue
        path = Path(item.path)
        if path.suffix == SUFFIX and path.parent.name == "shards":
            # A shard of another store: name that store, as the shard's name tells users nothing.
            lines[f"changed or grown: {path.parent.parent}"] = None
        else:
            lines[f"{'changed' if item.name in now else 'removed'}: {item.name}"] = None
    if not lines:
        return
    shown = "\n  ".join(list(lines)[:20]) + (
        f"\n  … and {len(lines) - 20} more" * (len(lines) > 20)
    )
    if not how.yes:
        raise TokmillError(
            f"inputs have changed:\n  {shown}",
            where=str(out),
            hint="--yes makes their shards again or removes them, and keeps all others",
        )


def write_if_different(path: Path, data: bytes) -> bool:
    """Write a file unless it has the same content already; say whether it was written."""
    same = path.exists() and read_file(path) == data
    if not same:
        write_file(path, data)
    return not same


STAMPS = "cache/stamps.jsonl"

Stamp = tuple[int, ...]


class _Line(msgspec.Struct, frozen=True, array_like=True):
    path: str
    stamp: Stamp


def files_of(item: PlannedItem) -> list[Path | str]:
    """Return the files that an item is read from; none for a shard of another store."""
    if address := address_of(item.path):
        return [address]
    path = Path(item.path)
    if path.suffix == SUFFIX and path.parent.name == "shards":
        return []
    if path.is_dir():
        path = inside(path, PurePosixPath(item.name).name)
    paths = [path, *(Path(other.path) for other in item.others)]
    return [path for path in paths if path.is_file()]


def stamps_of(planned: Iterable[PlannedItem]) -> dict[str, Stamp]:
    result: dict[str, Stamp] = {}
    for item in planned:
        # A file may be read by many items: looked at once.
        if item.path in result and all(other.path in result for other in item.others):
            continue
        for file in files_of(item):
            with machine_errors("read", file):
                result[str(file)] = stamp_of(file)
    return result


def read_stamps(store: Path) -> dict[str, Stamp]:
    """Return the stamps of a store; none if they are lost or damaged."""
    try:
        lines = msgspec.json.Decoder(_Line).decode_lines(read_file(store / STAMPS))
    except (TokmillError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {path_from_text(line.path): line.stamp for line in lines}


def write_stamps(store: Path, stamps: Mapping[str, Stamp]) -> None:
    if read_stamps(store) != stamps:
        lines = [_Line(path_to_text(path), stamp) for path, stamp in stamps.items()]
        # Only a hint: if it cannot be written, the build goes on without.
        with contextlib.suppress(MachineError):
            make_folder((store / STAMPS).parent)
            write_file(store / STAMPS, msgspec.json.Encoder().encode_lines(lines))


def changed_shards(
    store: Path,
    planned: Sequence[PlannedItem],
    stamps: Mapping[str, Stamp],
    make_source: Callable[[], Source],
    *,
    quiet: bool,
) -> dict[str, str]:
    """Return shard → input whose content is not what was read, though its sampled digest is.

    Only files are read that were touched since the store's stamps were taken.
    """
    before = read_stamps(store)
    receipts: dict[str, list[Receipt]] = {}
    if before:
        for receipt in sorted(read_receipts(store), key=lambda receipt: receipt.part):
            receipts.setdefault(receipt.shard, []).append(receipt)
    touched = []
    for item in planned if receipts else ():
        paths = map(str, files_of(item) if item.shard in receipts else ())
        if any(p in stamps and before.get(p) != stamps[p] for p in paths):
            touched.append(item)
    if not touched:
        return {}
    source = make_source()
    changed: dict[str, str] = {}
    with Progress("check inputs", sum(item.size for item in touched), quiet=quiet) as bar:
        for item in touched:
            if item.shard not in changed and not _same(source, item, receipts[item.shard]):
                changed[item.shard] = item.name
            bar.advance(item.size)
    if not quiet:
        files = len({path for item in touched for path in files_of(item)})
        print(
            f"{human_count(files, 'input file')} touched since the store was built, read again: "
            + (f"{len({*changed.values()}):,} changed" if changed else "all hold what they held"),
            file=sys.stderr,
        )
    return changed


def _same(source: Source, item: PlannedItem, receipts: Sequence[Receipt]) -> bool:
    wanted = [
        one.sha256
        for receipt in receipts
        for one in receipt.whole
        if (one.name, one.start) == (item.name, item.start)
    ]
    try:
        digests = _contents(source, Item.again(item))
        return all(digest == next(digests, "") for digest in wanted)
    except MachineError:
        raise
    except TokmillError:
        # It cannot be read any more, so it has changed.
        return False


def _contents(source: Source, item: Item) -> Iterator[str]:
    """Yield the digest of an item's content, of a long stream one a part."""
    content = Content()
    for _ in source.content(item, content):
        yield content.take()[1]
    yield content.take()[1]
    while True:
        # What was all taken with the first part, as of a program.
        yield content.take()[1]
