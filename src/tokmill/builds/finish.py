"""The end of a build: missing shards, too many rejects, the manifest, or a partial store."""

from __future__ import annotations

import codecs
import contextlib
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from tokmill.base.errors import Interrupted, TokmillError, plain
from tokmill.base.files import write_file
from tokmill.base.inflate import CAT, inflate, packing
from tokmill.base.locks import locked
from tokmill.base.progress import Progress, human_bytes, human_count, human_share, human_time
from tokmill.base.remote import open_input
from tokmill.builds.events import Watch
from tokmill.builds.folder import TAKEN, remove_shards, sweep, write_if_different
from tokmill.builds.make_shard import ShardJob, planned_work
from tokmill.builds.plan import How, Prepared
from tokmill.builds.source import Item, Source, restore_probe
from tokmill.store.checks.probe import probe_digest
from tokmill.store.manifest import PlannedItem, Receipt, with_checksum
from tokmill.store.marks import LOCK
from tokmill.store.receipts import gather_manifest, in_order, make_manifest, planned_receipts
from tokmill.store.schema import place_in_words
from tokmill.store.store import Store

if TYPE_CHECKING:
    from tokmill.builds.parts import Parts

BYTE_ORDER = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
HEAD = 1 << 12
"""Bytes of a file by which its encoding is told."""


def hint_of_source(
    kind: type[Source], config: Any, paths: Sequence[str], why: Mapping[str, int]
) -> str:
    """Return the source's hint for inputs that gave no record, or very few; "" if it has none."""
    reason = max(why, key=lambda reason: why[reason], default="")
    if reason in kind.explained:
        advice: str = kind.why_nothing(config, paths)
        if advice:
            return advice
    return kind.hints.get(reason, "")


def hint(kind: type[Source], config: Any, paths: Sequence[str], why: Mapping[str, int]) -> str:
    """Return the hint if no record was found: that of the source, or one for the reason."""
    return hint_of_source(kind, config, paths, why) or _for_any(
        why, msgspec.to_builtins(config), paths
    )


def encoding_of(head: bytes) -> str:
    """Return the name of UTF-16 or UTF-32 as iconv has it if text begins so, else "".

    Without a byte order mark the zero bytes of ASCII characters tell.
    """
    for name in ("UTF-32", "UTF-16"):
        if head.startswith(BYTE_ORDER[name]):
            return name
    for width in (4, 2) if len(head) >= 8 else ():
        zeros = [head[place::width].count(0) > len(head) // (2 * width) for place in range(width)]
        if sum(zeros) == width - 1 and not (zeros[0] and zeros[-1]):
            return f"UTF-{8 * width}{'BE' if zeros[0] else 'LE'}"
    return ""


def conversion(path: str) -> str:
    """Return how to convert a file that is not UTF-8: the command, where its encoding is known."""
    with open_input(path) as file:
        head = file.read(HEAD)
    packed = packing(head)
    encoding = encoding_of(next(inflate(path, kind=packed), b"")[:HEAD] if packed else head)
    name = f"iconv -f {encoding or 'LATIN1'} -t UTF-8"
    quoted = shlex.quote(path)
    command = f"{CAT[packed]} {quoted} | {name} > NEW" if packed else f"{name} {quoted} > NEW"
    unsure = "" if encoding else " (or another encoding: `iconv -l` lists them)"
    return f"convert it, as with `{command}`{unsure}"


def _for_any(why: Mapping[str, int], options: Mapping[str, Any], paths: Sequence[str]) -> str:
    if "utf8" in why and max(why.values()) == why["utf8"]:
        other = ", or --invalid-utf8 replace" * ("invalid_utf8" in options)
        return f"it is not UTF-8: {conversion(paths[0])}{other}"
    if "missing" in why:
        fields = ", ".join(map(repr, options.get("fields", ())))
        return f"no record has one of the fields {fields}: name yours with --field"
    if "json" in why:
        return "is this JSON Lines? Plain text is built with `tokmill build text`"
    if "too long" in why:
        if options.get("record") == "separator":
            return "the separator that ends records does not occur: --record line reads lines"
        return "a record has at most 64 MiB of text, and this one has no end: split it before"
    if "too short" in why:
        return "all records are shorter than the minimum: allow shorter ones"
    return "is it the right kind of input?"


PART_WAIT = 60.0
"""Seconds that a part waits for the lock, which others hold while they plan and finish."""
JUDGED_FROM = {"records": 1000, "items": 100}
"""Number of records or items before which the share of rejects is not judged; with a limit of 0 it
is judged at once."""
MOST_OF_FEW = 0.5
"""Largest share of rejects among fewer records, unless a larger share is allowed."""


def enough(share: float) -> str:
    """Return a value for --max-rejects that allows at least twice `share`."""
    wanted = min(1.0, 2 * share)
    return f"{next(most for most in (0.05, 0.1, 0.2, 0.5, 1.0) if most >= wanted):g}"


class Rejects:
    """Counts rejects while a build runs, and ends a build with too many.

    Their share is that of the records, or of the items if a source rejects whole items
    (`rejects_items`), as x86 does with programs.
    """

    def __init__(self, out: Path, most: float, prepared: Prepared) -> None:
        self.out, self.most, self.prepared = out, most, prepared
        self.unit = "items" if prepared.kind.rejects_items else "records"
        self.seen = self.rejected = 0
        self.reasons: dict[str, int] = {}
        self.example = ""

    def add(self, receipts: Iterable[Receipt], *, all_of_them: bool = False) -> None:
        """Count more receipts; raise `TokmillError` if too large a share was rejected.

        Few records are judged only at the end (`all_of_them`), and only if more than half of them
        were rejected. Few items are not judged: each rejected program is reported by itself.
        """
        for receipt in receipts:
            runs, reasons = receipt.rejects, dict(receipt.rejected)
            if self.unit == "records":
                self.seen += receipt.records + sum(reasons.values())
            elif receipt.part == 0:
                self.seen += len(receipt.items)
                # For an item without records, its first reject is the reason.
                first = {run.item: run for run in reversed(runs)}
                runs = [first[i] for i in sorted(first) if not receipt.items[i].records]
                reasons = dict(Counter(run.reason for run in runs))
            else:
                runs, reasons = [], {}
            self.rejected += sum(reasons.values())
            for reason, count in reasons.items():
                self.reasons[reason] = self.reasons.get(reason, 0) + count
            if runs and not self.example:
                place = place_in_words(runs[0].first, self.prepared.kind.places)
                at = f", {place}" if self.unit == "records" else ""
                self.example = f"{receipt.items[runs[0].item].name}{at} ({runs[0].reason})"
        most = self.most
        judged = self.seen >= JUDGED_FROM[self.unit] or not most
        if all_of_them and not judged and self.unit == "records":
            judged, most = True, max(self.most, MOST_OF_FEW)
        if judged and self.rejected > most * self.seen:
            counts = ", ".join(f"{n:,} {reason}" for reason, n in sorted(self.reasons.items()))
            raise TokmillError(
                f"{self.rejected:,} of {self.seen:,} {self.unit} were rejected ({counts}), more "
                f"than {human_share(most)}; the first: {self.example}",
                where=str(self.out),
                hint=self._hint()
                if 2 * self.rejected > self.seen
                else "correct the input, or allow more with "
                f"--max-rejects {enough(self.rejected / self.seen)}",
            )

    def _hint(self) -> str:
        advice = hint_of_source(*_about(self.prepared), self.reasons)
        advice = f"{advice};" if advice else "is it the right kind of input?"
        return f"{advice} --max-rejects 1 keeps the others"


def missing_tasks(planned: Sequence[PlannedItem], receipts: Iterable[Receipt]) -> list[ShardJob]:
    """Return the shards that have no complete set of receipts, in plan order."""
    parts: dict[str, set[int]] = {}
    complete: dict[str, int] = {}
    cut: dict[str, Receipt] = {}
    for receipt in receipts:
        if receipt.cut is not UNSET:
            if receipt.part == 0:
                cut[receipt.shard] = receipt
            continue
        parts.setdefault(receipt.shard, set()).add(receipt.part)
        if receipt.last:
            complete[receipt.shard] = receipt.part + 1
    groups: dict[str, list[PlannedItem]] = {}
    for item in planned:
        groups.setdefault(item.shard, []).append(item)
    tasks = []
    for shard, items in groups.items():
        have = parts.get(shard, set())
        if complete.get(shard) == len(have):
            continue
        done = next(i for i in range(len(have) + 1) if i not in have) if len(items) == 1 else 0
        again = [Item.again(item, done) for item in items]
        tasks.append(ShardJob(shard, again, cut.get(shard)))
    return tasks


def finish(
    out: Path, prepared: Prepared, receipts: Sequence[Receipt], how: How, parts: Parts | None
) -> Store:
    """Write the manifest and remove shards that are not in the plan, if no shard is missing.

    With `how.part`, the part that ends last does this; with `parts`, at their address.
    """
    plan = prepared.plan
    if how.part is not None:
        # Other parts have made shards meanwhile.
        receipts = planned_receipts(out, prepared.planned)
    if parts is not None:
        receipts = parts.all([receipt for receipt in receipts if receipt.cut is UNSET])
    if missing_tasks(prepared.planned, receipts):
        return Store(out)
    ordered = in_order(prepared.planned, receipts)
    with contextlib.ExitStack() as locks:
        if how.part is not None:
            locks.enter_context(locked(out / LOCK, TAKEN, "wait for it", wait=PART_WAIT))
        sweep(out)
        restore_probe(out, plan, planned_work(out, plan).source)
        manifest = make_manifest(plan, ordered, complete=True, probe=probe_digest(out))
        rejects = Rejects(out, how.max_rejects, prepared)
        rejects.add(ordered, all_of_them=manifest.records > 0)
        remark = prepared.kind.outcome(prepared.config, plan.inputs(), manifest)
        if manifest.records == 0:
            why = {**manifest.skipped, **manifest.rejected}
            counts = ", ".join(f"{count:,} {reason}" for reason, count in why.items())
            raise TokmillError(
                f"no record was found ({counts or 'the input is empty'})",
                where=", ".join(prepared.recipe.inputs),
                hint=remark or hint(*_about(prepared), why),
            )
        if remark and not how.quiet:
            print(f"note: {plain(remark)}", file=sys.stderr)
        if parts is not None:
            parts.finish(manifest)
            return Store(parts.address)
        write_if_different(out / "manifest.json", with_checksum(manifest))
        kept = {entry.name for entry in manifest.shards}
        remove_shards(out / "shards", kept)
    return Store(out)


def _about(prepared: Prepared) -> tuple[type[Source], msgspec.Struct, list[str]]:
    paths = list(islice(dict.fromkeys(item.path for item in prepared.planned), 4))
    return prepared.kind, prepared.config, paths


def stop_early(out: Path, how: How, bar: Progress, watch: Watch, name: str) -> Store:
    """End a build at its time limit: leave a partial store, and estimate the whole build.

    At a signal, given by its `name`, raise `Interrupted`. A store that grows stays what it was.
    """
    manifest = gather_manifest(out)
    grows = (out / "manifest.json").exists()
    if not grows and how.part is None:
        write_file(out / "manifest.json", with_checksum(manifest))
    share, rate, took = max(bar.done, 1) / max(bar.total, 1), bar.rate, human_time(bar.seconds)
    if name:
        raise Interrupted(
            f"stopped by {name} at {human_share(share)} of the input; kept: "
            f"{human_count(manifest.records, 'record')}",
            where=str(out),
            hint="run the same command again: it continues",
        )
    if not manifest.records:
        if not how.quiet:
            faster = "" if how.amount.workers == 0 else ", or --workers 0, which begins at once"
            print(
                f"time limit reached after {took}, before one record was whole: "
                f"nothing is kept.\nhint: give it more time{faster}",
                file=sys.stderr,
            )
        return Store(out)
    if not how.quiet:
        memory = human_bytes(watch.peak_memory)
        print(
            f"time limit reached after {took}: {human_share(share)} of the input at "
            f"{human_bytes(rate)}/s, {manifest.records / max(bar.done, 1) * rate:,.0f} "
            "records/s.\nThe whole input would take "
            f"{human_time(bar.total / max(rate, 1))}, "
            f"{human_bytes(manifest.bytes / share)} on disk and about {memory} of memory.\n"
            "What was made is kept: the same command without --max-time goes on.",
            file=sys.stderr,
        )
    return Store(out)
