"""The build: freeze vocabularies, plan, make the missing shards, finish.

Same plan and same bytes in give byte-identical shards, for any workers and any number of kills.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import c_double
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from tokmill.base import recipe
from tokmill.base.errors import Interrupted, MachineError, TokmillError, UsageError, plain
from tokmill.base.files import machine_errors, new_folder, remove
from tokmill.base.locks import locked
from tokmill.base.progress import Progress, human_bytes, human_count, human_time, live
from tokmill.base.stop import Stop
from tokmill.builds import make_shard as make
from tokmill.builds.events import Watch
from tokmill.builds.finish import PART_WAIT, Rejects, finish, missing_tasks, stop_early
from tokmill.builds.folder import TAKEN, check_folder, clear, place_plan, sweep, unless_failed
from tokmill.builds.make_shard import ShardJob, Terms, make_shards, planned_work
from tokmill.builds.plan import BuildRecipe, How, Prepared, choose, folder_of, prepare
from tokmill.builds.scan import in_words
from tokmill.store import manifest as layout
from tokmill.store.manifest import Manifest, Plan, PlannedItem, Receipt
from tokmill.store.marks import LOCK
from tokmill.store.receipts import planned_receipts
from tokmill.store.store import Store

if TYPE_CHECKING:
    from tokmill.builds.parts import Parts

NAMED = 5
"""Files that a line of the output names."""
UNGUARDED = (
    b"error: each worker process runs this script again, and so began the build again\n"
    b'hint: put its calls below `if __name__ == "__main__":`, or take no workers: '
    b"how=How(amount=Amount(workers=0))\n"
)


def build(
    kind: str,
    inputs: Iterable[str | Path] | str | Path,
    out: str | Path = "",
    *,
    tokenizer: str | Path | None = None,
    roles: Mapping[str, str] | None = None,
    how: How | None = None,
    **options: Any,
) -> Store:
    """Build a store, or continue, grow or simply open one that is there.

    `options` are the source's keys; `out` is left out for an overlay, which lies in its store.
    Raises `TokmillError` when the inputs or an existing store do not fit, `Interrupted` when it was
    stopped and can be continued.
    """
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    chosen = BuildRecipe(
        source=kind,
        inputs=tuple(str(path) for path in inputs),
        out=str(out),
        tokenizer=None if tokenizer is None else str(tokenizer),
        roles=dict(roles or {}),
        options=options,
    )
    return run(chosen, how or How(quiet=not live()))


def _builtin(value: Any) -> object:
    """Return a number of numpy as one of Python; other things become text, which is refused."""
    return value.item() if hasattr(value, "item") else str(value)


def run(chosen: BuildRecipe, how: How) -> Store:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker runs the caller's script again before it has work: a traceback would hide this.
        os.write(2, UNGUARDED)
        os._exit(UsageError.exit_code)
    # Whoever makes one in Python is not checked by msgspec.
    how = recipe.convert(How, msgspec.to_builtins(how, enc_hook=_builtin), "how")
    if how.part and not 1 <= how.part[0] <= how.part[1]:
        raise UsageError(f"there is no part {how.part[0]} of {how.part[1]}", hint="1 to n, of n")
    if not 0 <= how.max_rejects <= 1:
        raise UsageError(f"--max-rejects {how.max_rejects:g} is not a share", hint="from 0 to 1")
    out = folder_of(chosen)
    if how.push and (how.part is None or not chosen.out):
        what = "--push is for parts of a store, --part i/n"
        raise UsageError(what, hint="`tokmill store push STORE ADDRESS` publishes a whole store")
    with machine_errors("read", out):
        check_folder(out)
    prepared = prepare(chosen)
    if not how.quiet:
        if isinstance(prepared.plan.left_out, dict):
            print(f"left out of the folders: {in_words(prepared.plan.left_out)}", file=sys.stderr)
            if isinstance(prepared.plan.not_text, list):
                print(f"not text: {first_of(prepared.plan.not_text, NAMED)}", file=sys.stderr)
        names = list(dict.fromkeys(item.name for item in prepared.planned))
        if remark := prepared.kind.remark(names, prepared.config):
            print(f"note: {plain(remark)}", file=sys.stderr)
    lock = locked(
        out / LOCK,
        TAKEN,
        "wait for it, or choose another folder",
        wait=PART_WAIT if how.part else 0,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(new_folder(out))
        stack.enter_context(lock)
        if how.fresh:
            clear(out)
        if how.part is None:
            stack.enter_context(unless_failed(out))
        place_plan(out, prepared, how)
        if how.part is not None:
            # Parts on other machines make shards at the same time; only planning and finishing
            # need the lock.
            stack.close()
        return execute_plan(out, prepared, how)


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first names as one text, safe to print, and the number of the others."""
    more = len(names) - most
    shown = ", ".join(plain(name).replace("\n", "\\n") for name in names[:most])
    return shown + (f" and {more:,} more (`tokmill inspect STORE` lists them)" if more > 0 else "")


def parts_at(address: str, out: Path, plan: Plan, planned: Sequence[PlannedItem]) -> Parts:
    from tokmill.builds.parts import Parts

    return Parts(address, out, plan, planned)


def say_rate(bar: Progress, receipts: Iterable[Receipt]) -> None:
    """Print how long a build with a time limit took, and how fast it was."""
    records = sum(receipt.records for receipt in receipts) / max(bar.done, 1) * bar.rate
    print(
        f"the whole build took {human_time(bar.seconds)}, {human_bytes(bar.rate)}/s, "
        f"{records:,.0f} records/s",
        file=sys.stderr,
    )


def execute_plan(out: Path, prepared: Prepared, how: How) -> Store:
    plan, planned = prepared.plan, prepared.planned
    parts = parts_at(how.push, out, plan, planned) if how.push else None
    receipts, tasks = missing(out, planned, how, parts)
    if not tasks:
        if not how.quiet:
            print("no shard was missing: nothing was left to do", file=sys.stderr)
        return finish(out, prepared, receipts, how, parts)
    if how.part is None and not is_complete(out):
        # It names the shards that were cut, which are now replaced.
        remove(out / layout.MANIFEST)
    watch = Watch(out)
    workers, resources = choose(how.amount, len(tasks))
    resources = msgspec.structs.replace(resources, scratch=str(out.absolute() / "cache"))
    watch.event("begin", workers=workers, shards=len(tasks), plan_id=plan.plan_id)
    limit = how.limit_seconds
    until_limit = math.inf if limit is None else make.clock() + limit
    stop = Stop(until_limit, note="" if how.quiet else STOPPING)
    done_before = plan.input_bytes - sum(task.left for task in tasks)
    bar = Progress("build", plan.input_bytes, done=done_before, quiet=how.quiet)
    grace = grace_of(limit)
    terms = Terms(workers, stop.until, grace, lambda read: bar.reach(bar.already + read))
    work = planned_work(out, plan, resources)
    bar.extra = watch.text
    begun = {receipt.shard for receipt in receipts}
    rejects = Rejects(out, how.max_rejects, prepared)
    rejects.add(receipts)
    with (
        stopped_at_once(out, watch, swept=bool(workers) and how.part is None),
        stop,
        bar,
        contextlib.closing(make_shards(work, terms, until(tasks, stop.until))) as done,
    ):
        for task, new in done:
            if not new:
                continue
            if task.shard in begun:
                again = {receipt.name for receipt in new}
                receipts = [receipt for receipt in receipts if receipt.name not in again]
            receipts += new
            if parts is not None:
                parts.send(new)
            bar.advance(read_of(task, new) - task.size + task.left)
            watch.event("shard", shard=task.shard, bytes=task.size, rate=round(bar.rate))
            rejects.add(new)
    if make.clock() >= stop.until.value and missing_tasks(planned, receipts):
        name = stop.signal or ("a signal" if limit is None else "")
        watch.event("interrupted" if name else "time limit")
        return stop_early(out, how, bar, watch, name)
    if limit is not None and not how.quiet:
        say_rate(bar, receipts)
    store = finish(out, prepared, receipts, how, parts)
    watch.event("done", complete=not store.partial, rate=round(bar.rate))
    if stop.signal:
        raise Interrupted(
            f"stopped by {stop.signal}; this store was finished",
            where=str(out),
            hint="run the same command again: it continues",
        )
    return store


def missing(
    out: Path, planned: Sequence[PlannedItem], how: How, parts: Parts | None
) -> tuple[list[Receipt], list[ShardJob]]:
    """Return the receipts of whole shards, and the shards that this process is to make."""
    if how.part is None:
        sweep(out)
    damaged: list[Path] = []
    receipts = planned_receipts(out, planned, damaged)
    if damaged and not how.quiet:
        what = human_count(len(damaged), "receipt")
        print(f"{what} damaged, made again with the shard: {damaged[0]}", file=sys.stderr)
    tasks = missing_tasks(planned, receipts)
    if how.part is not None:
        number, of = how.part
        tasks = [task for task in tasks if int(task.shard, 16) % of == number - 1]
    if parts is not None:
        parts.send(receipts)
        receipts += parts.receipts({task.shard for task in tasks})
        left = {task.shard for task in missing_tasks(planned, receipts)}
        tasks = [task for task in tasks if task.shard in left]
    if how.limit_seconds is not None:
        # Names are digests, so the first ones are a random sample of the input.
        tasks.sort(key=lambda task: task.shard)
    # A shard that was cut is completed, under the same name.
    return [receipt for receipt in receipts if receipt.cut is UNSET], tasks


@contextlib.contextmanager
def stopped_at_once(out: Path, watch: Watch, *, swept: bool) -> Iterator[None]:
    """End an interrupted build with what it kept; with `swept`, remove files of killed workers."""
    try:
        yield
    except KeyboardInterrupt:
        watch.event("interrupted")
        raise Interrupted(
            "ended at once; what was committed before is kept",
            where=str(out),
            hint="run the same command again: it continues",
        ) from None
    except MachineError:
        # If one worker fails, the others are killed; remove their files, as the disk may be full.
        if swept:
            with contextlib.suppress(MachineError):
                sweep(out)
        raise


def is_complete(out: Path) -> bool:
    """Say whether a store has the manifest of a whole build, which holds while the store grows."""
    with contextlib.suppress(TokmillError):
        return layout.read_checked(out / layout.MANIFEST, Manifest).complete
    return False


STOPPING = "stopping: the step at hand is finished; a second signal ends at once\n"
GRACE = 0.2
"""Time that workers get after a time limit to commit whole records, as a share of the limit."""
LEAST_GRACE = 1.0
"""Seconds that they get at least."""
GRACE_OF_SIGNAL = 20.0
"""Seconds that they get after a signal; clusters kill 30 seconds after theirs."""


def grace_of(limit: float | None) -> float:
    """Return the seconds after a time limit or a signal at which unfinished workers are killed."""
    return GRACE_OF_SIGNAL if limit is None else max(LEAST_GRACE, GRACE * limit)


def read_of(task: ShardJob, receipts: Sequence[Receipt]) -> int:
    """Return about how many input bytes of a task its receipts cover."""
    last = receipts[-1]
    if last.cut is UNSET:
        return task.size
    ended = last.items[-1]
    place = [(item.name, item.start) for item in task.items].index((ended.name, ended.start))
    share = 1.0 if last.done is UNSET else last.done
    return sum(item.size for item in task.items[:place]) + round(task.items[place].size * share)


def until(tasks: Iterable[ShardJob], deadline: c_double) -> Iterator[ShardJob]:
    """Yield tasks until the deadline has passed (always the first)."""
    for number, task in enumerate(tasks):
        if number and make.clock() >= deadline.value:
            return
        yield task
