"""Find input files that changed although their sampled digests are the same.

A store keeps size, times and inode of each file in `cache/stamps.jsonl`. These stamps are a hint:
they are part of no identity, and may be lost. If a stamp differs, the file is read again and
compared with the digests in the receipts.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import (
    address_of,
    inside,
    machine_errors,
    make_folder,
    path_from_text,
    path_to_text,
    read_file,
    write_file,
)
from tokmill.base.progress import Progress, human_count
from tokmill.base.remote import stamp_of
from tokmill.builds.make_shard import Content
from tokmill.builds.source import Item, Source
from tokmill.store.manifest import PlannedItem, Receipt
from tokmill.store.receipts import read_receipts
from tokmill.store.shards.shard import SUFFIX

FILE = "cache/stamps.jsonl"

Stamp = tuple[int, ...]
"""A result of `stamp`."""


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
    """Return file → what tells whether it was touched."""
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
        lines = msgspec.json.Decoder(_Line).decode_lines(read_file(store / FILE))
    except (TokmillError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {path_from_text(line.path): line.stamp for line in lines}


def write_stamps(store: Path, stamps: Mapping[str, Stamp]) -> None:
    """Write the stamps of a store if they have changed."""
    if read_stamps(store) != stamps:
        lines = [_Line(path_to_text(path), found) for path, found in stamps.items()]
        # Only a hint: if it cannot be written, the build goes on without.
        with contextlib.suppress(MachineError):
            make_folder((store / FILE).parent)
            write_file(store / FILE, msgspec.json.Encoder().encode_lines(lines))


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
