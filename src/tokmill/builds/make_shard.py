"""Making shards: read the items of one, write the file, then the receipt that commits it.

They are made in this process, or in a pool of spawned ones.
"""

from __future__ import annotations

import functools
import hashlib
import math
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from ctypes import c_double
from multiprocessing.sharedctypes import RawValue, Synchronized
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tokmill import plugins
from tokmill.base.bounds import bounded
from tokmill.base.errors import TokmillError
from tokmill.base.files import inside, machine_errors, read_file, sha256_file, write_file
from tokmill.base.remote import Absent, sampled_input, stamp_of
from tokmill.builds.processes import in_processes, signals_wait
from tokmill.builds.source import Frozen, Item, Resources, Source, settle_probe
from tokmill.store.manifest import (
    Cut,
    ItemReceipt,
    Plan,
    Receipt,
    Rejects,
    shard_name,
    with_checksum,
)
from tokmill.store.schema import Records, each_drop
from tokmill.store.shards.shard import SUFFIX, Shard, ShardWriter
from tokmill.store.vocab import Vocabulary

clock = time.monotonic
"""What deadlines are compared with."""
PLAN_ANEW = "the same `tokmill build` with --yes plans anew and makes what changed again"
Deadline = Callable[[], float]
"""Gives the moment at which a shard is cut, in monotonic seconds; a signal brings it nearer."""
MOST_REJECTS = 4096
"""Rejected records that a receipt lists."""
NEVER: Deadline = functools.partial(float, "inf")
Stamps = list[tuple[int, ...]]
"""What `stamp` gives of each file of an item."""


class Work(msgspec.Struct, frozen=True):
    """Everything that a worker needs to make any shard of a build."""

    kind: str
    config: dict[str, Any]
    roots: list[str]
    vocabularies: dict[str, Vocabulary]
    store: str
    resources: Resources

    def source(self) -> Source:
        folder = Path(self.store) / "vocab"
        frozen = {
            name: Frozen(vocabulary, read_vocabulary(inside(folder, vocabulary.file), vocabulary))
            for name, vocabulary in self.vocabularies.items()
        }
        kind = plugins.load(plugins.SOURCES, self.kind)
        config = msgspec.convert(self.config, type=kind.Config)
        return kind(config, self.roots, frozen, self.resources)


def planned_work(store: Path, plan: Plan, resources: Resources | None = None) -> Work:
    return Work(
        plan.recipe["source"],
        plan.options,
        plan.inputs(),
        plan.vocabularies,
        str(store),
        resources or Resources(),
    )


def read_vocabulary(path: Path, vocabulary: Vocabulary) -> bytes:
    """Return a vocabulary's file; raises `TokmillError` if it is not the one of the plan."""
    data = read_file(path)
    if hashlib.sha256(data).hexdigest() != vocabulary.sha256:
        raise TokmillError(
            "the vocabulary is not the one of the plan",
            where=str(path),
            hint="run the build again: it writes the file again from the tokenizer",
        )
    return data


class ShardJob(msgspec.Struct, frozen=True):
    """One shard to make."""

    shard: str
    items: list[Item]
    cut: Receipt | None = None
    """That of the first part, if an earlier build was stopped in it."""

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)

    @property
    def left(self) -> int:
        """Input bytes of the items that the earlier build has not read to the end."""
        return sum(item.size for item in self.items[len(self.cut.whole) if self.cut else 0 :])


class Content:
    """A running sha256 of the content of an item."""

    def __init__(self) -> None:
        self.bytes = 0
        self._hash = hashlib.sha256()

    def update(self, data: bytes | memoryview, /) -> None:
        self.bytes += len(data)
        self._hash.update(data)

    def take(self) -> tuple[int, str]:
        """Return (bytes, digest) since the last call and start again."""
        result = self.bytes, self._hash.hexdigest()
        self.bytes, self._hash = 0, hashlib.sha256()
        return result


class _Part:
    """The part of a shard that is being made."""

    def __init__(self, source: Source, limits: Mapping[str, int], folder: Path) -> None:
        self.writer = ShardWriter(source.schema, dict(limits), folder)
        self.items: list[ItemReceipt] = []
        self.skipped = Counter[str]()
        self.rejected = Counter[str]()
        self.rejects: list[Rejects] = []
        self.notes = Counter[str]()
        self.item_skipped = self.item_rejected = 0

    def take_over(self, receipt: Receipt, path: Path) -> None:
        """Begin with the whole items of a shard that was cut."""
        cut, shard, start = receipt.cut or Cut(0), Shard(path), 0
        for item in receipt.whole:
            batch = shard.records(start, start + item.records, self.writer.schema)
            self.writer.add(batch, len(self.items))
            self.items.append(item)
            start += item.records
        self.skipped, self.rejected = Counter(cut.skipped), Counter(cut.rejected)
        self.rejects = receipt.rejects[: cut.rejects]
        self.notes.update(cut.notes)

    def so_far(self) -> Cut:
        """Return what is kept if the next item is cut."""
        counts = dict(self.rejected), dict(self.skipped), dict(self.notes)
        return Cut(len(self.items), len(self.rejects), *counts)

    def add(self, batch: Records) -> None:
        number = len(self.items)
        self.writer.add(batch, number)
        skipped, rejected = Counter(batch.skipped), Counter[str]()
        for some in batch.drops:
            (rejected if some.rejected else skipped)[some.reason] += len(some.offsets)
        room = MOST_REJECTS - len(self.rejects)
        if room and rejected:
            drops = [drop for drop in each_drop(batch.drops) if drop.rejected]
            self.rejects += [
                Rejects(number, drop.offset, drop.offset, 1, drop.reason) for drop in drops[:room]
            ]
        self.item_skipped += skipped.total()
        self.item_rejected += rejected.total()
        self.skipped.update(skipped)
        self.rejected.update(rejected)
        self.notes.update(batch.notes)

    def end_item(self, item: Item, content: Content, before: tuple[int, int]) -> None:
        read, digest = content.take()
        self.items.append(
            ItemReceipt(
                name=item.name,
                start=item.start,
                stop=item.stop,
                bytes=read,
                sha256=digest,
                records=self.writer.records - before[0],
                tokens=self.writer.tokens - before[1],
                skipped=self.item_skipped,
                rejected=self.item_rejected,
            )
        )
        self.item_skipped = self.item_rejected = 0

    def commit(
        self,
        folder: Path,
        shard: str,
        part: int,
        last: bool,
        cut: Cut | UnsetType = UNSET,
        done: float | None = None,
    ) -> Receipt:
        path = inside(folder, f"{shard_name(shard, part)}{SUFFIX}")
        size, digest = self.writer.write(path)
        receipt = Receipt(
            shard=shard,
            part=part,
            last=last,
            records=self.writer.records,
            tokens=self.writer.tokens,
            bytes=size,
            sha256=digest,
            ranges=self.writer.ranges,
            items=self.items,
            rejects=self.rejects,
            rejected=dict(sorted(self.rejected.items())),
            skipped=dict(sorted(self.skipped.items())),
            notes=dict(sorted(self.notes.items())),
            cut=cut,
            done=UNSET if done is None else round(done, 6),
        )
        write_file(path.with_suffix(".json"), with_checksum(receipt))
        return receipt


class InputChanged(TokmillError):
    """An input has changed since the build was planned. The plan stays, so the next build reports
    the change."""


def make_shard(
    source: Source,
    task: ShardJob,
    vocabularies: Mapping[str, Vocabulary],
    folder: Path,
    deadline: Deadline = NEVER,
    count: Callable[[int], None] | None = None,
) -> list[Receipt]:
    """Read the items of a shard, write it into `folder`, and return its receipts.

    There is one receipt, except for an item that is a long stream: it makes a part with a receipt
    after every 64 MiB of text. `count` is called with the size of each item that was read. At the
    deadline the records so far are committed, in a receipt with `cut`; one step of a source (at
    most 2 MiB of text, or one program) is always finished. What such a shard has of whole items is
    not read again.
    """
    limits = {
        name: vocabularies[column.vocab].size
        for name, column in source.schema.items()
        if column.vocab is not None and column.vocab in vocabularies
    }
    receipts: list[Receipt] = []
    number = task.items[0].parts_done if len(task.items) == 1 else 0
    part = _Part(source, limits, folder)
    path = inside(folder, f"{task.shard}{SUFFIX}")
    # A damaged shard is made from its beginning.
    if task.cut is not None and sha256_file(path) == task.cut.sha256:
        part.take_over(task.cut, path)
    for item in task.items[len(part.items) :]:
        with bounded(item.path, item.size, limit=source.is_bounded):
            so_far = part.so_far()
            unchanged = check_unchanged(item)
            content = Content()
            before = (part.writer.records, part.writer.tokens)
            batches = source.read(item, content)
            for batch in batches:
                part.add(batch)
                if batch.ends_part:
                    part.end_item(item, content, before)
                    receipts.append(part.commit(folder, task.shard, number, last=False))
                    number += 1
                    part = _Part(source, limits, folder)
                    before, so_far = (0, 0), part.so_far()
                if clock() > deadline():
                    # Its reader is closed before the digest is taken.
                    if isinstance(batches, Generator):
                        batches.close()
                    part.end_item(item, content, before)
                    last_receipt = part.commit(
                        folder, task.shard, number, last=False, cut=so_far, done=batch.done
                    )
                    return [*receipts, last_receipt]
            check_unchanged(item, unchanged)
            part.end_item(item, content, before)
            if count is not None:
                count(item.size)
    receipts.append(part.commit(folder, task.shard, number, last=True))
    return receipts


def check_unchanged(item: Item, before: Stamps | None = None) -> Stamps:
    """Refuse an input that has changed since the plan, or since the stamps `before`.

    Returns the `stamp` of each of its files; none for a folder.
    """
    if Path(item.path).is_dir():
        return []
    files = [(item.path, item.digest), *((other.path, other.digest) for other in item.others)]
    now = [_checked(path, digest) for path, digest in files]
    for (path, _), old, new in zip(files, before or now, now, strict=True):
        if new != old:
            what = "the file has changed while it was read"
            raise InputChanged(what, where=path, hint=PLAN_ANEW)
    return now


def _checked(path: str, digest: str) -> tuple[int, ...]:
    try:
        with machine_errors("read", path):
            now = stamp_of(path)
    except Absent:
        what = "the file was removed after the build was planned"
        raise InputChanged(what, where=path, hint=PLAN_ANEW) from None
    if sampled_input(path)[1] != digest:
        what = "the file has changed since the build was planned"
        raise InputChanged(what, where=path, hint=PLAN_ANEW)
    return now


_work: Work | None = None
_source: Source | None = None
_count: Callable[[int], None] | None = None
_deadline = NEVER


def start_worker(
    work: Work, count: Callable[[int], None] | None = None, deadline: Deadline = NEVER
) -> None:
    """Set the build for which this process works; `count` is called with the bytes read."""
    global _work, _source, _count, _deadline
    _work, _source, _count, _deadline = work, None, count, deadline


def make_in_worker(task: ShardJob) -> list[Receipt]:
    """Make one shard in a process that `start_worker` prepared.

    After the deadline only its first one is begun; of another there is no receipt.
    """
    global _source
    assert _work is not None
    work = _work
    if _source is not None and clock() > _deadline():
        return []
    if _source is None:
        # Not in `start_worker`: there an error would look like a worker that was killed.
        _source = work.source()
        settle_probe(_source, Path(work.store))
    source = _source
    folder = Path(work.store) / "shards"
    return make_shard(source, task, work.vocabularies, folder, _deadline, _count)


class Terms(NamedTuple):
    """What the making of shards keeps to; nothing of it changes a byte of the store."""

    workers: int = 0
    """Processes, at most; 0: only this one."""
    deadline: c_double = RawValue("d", math.inf)
    """Monotonic seconds at which each worker commits its whole records; a signal may change it."""
    grace: float = 1.0
    """Seconds after the deadline at which workers that have not committed are killed."""
    report: Callable[[int], None] | None = None
    """Called with the input bytes of all items that were read completely, including those of
    unfinished shards."""


def make_shards(
    work: Work, terms: Terms, tasks: Iterable[ShardJob]
) -> Generator[tuple[ShardJob, list[Receipt]], None, None]:
    """Make shards and yield their receipts in the order in which they are finished.

    With workers there is always one more task than workers, and every task that is taken is
    finished. At the deadline each worker commits its whole records; one that is still in a long
    step when the grace is over is killed.
    """
    report, deadline = terms.report, terms.deadline
    if not terms.workers:
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            if report is not None:
                report(done)

        start_worker(work, count, lambda: deadline.value)
        for task in tasks:
            yield task, make_in_worker(task)
        return
    with signals_wait():
        read = multiprocessing.get_context("spawn").Value("q")
    yield from in_processes(
        make_in_worker,
        tasks,
        terms.workers,
        start=_start,
        argument=(work, read, deadline),
        name=lambda task: task.items[0].path,
        deadline=lambda: deadline.value + terms.grace,
        tick=None if report is None else lambda: report(reached(read)),
        hint="most often memory ran out: try --preset memory or --memory 1GB; "
        "run the same command again and it continues",
    )


def reached(read: Synchronized[int]) -> int:
    """Return the bytes that workers have counted, without the lock.

    A worker that was killed while it held the lock never releases it.
    """
    value: int = read.get_obj().value
    return value


def _start(given: tuple[Work, Synchronized[int], c_double]) -> None:
    work, read, deadline = given

    def stop(number: int, frame: FrameType | None) -> None:
        # A signal to the whole group may reach this process before its parent.
        deadline.value = min(deadline.value, time.monotonic())

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)

    def count(size: int) -> None:
        with read.get_lock():
            read.value += size

    start_worker(work, count, lambda: deadline.value)
