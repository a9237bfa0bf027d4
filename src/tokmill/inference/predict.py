"""`tokmill predict`: the class of each record of a store or of raw inputs."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import machine_errors, read_file
from tokmill.base.progress import Progress, human_count
from tokmill.builds.build import run as build
from tokmill.builds.execution.resources import Amount
from tokmill.builds.plan import BuildRecipe, How
from tokmill.builds.scan import PACKED
from tokmill.feed.feed import Feed
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.checks.left_out import input_paths, left_out, line_of
from tokmill.store.manifest import Made
from tokmill.store.marks import is_store
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.tasks.classify import Classify
from tokmill.tasks.hidden.framing import affixes_of
from tokmill.tasks.task import to_tensors
from tokmill.tasks.task_inputs import SEGMENT, Facts
from tokmill.training.data import columns_to_read, cut_notes, open_to_evaluate
from tokmill.training.engines.devices.device import Precision, moved, pick_device
from tokmill.training.loader import micro_batches
from tokmill.training.runs.made import MADE, read_made
from tokmill.training.runs.run import VOCAB, check_engine, check_store, load_task, read_run

STDIN, NEWLINE = "-", 10
INSTEAD = {
    "next_token": "`tokmill sample RUN` continues texts, `tokmill eval RUN STORE` measures the run",
    "contrastive": "`tokmill embed RUN STORE` makes vectors",
    "signature": "`tokmill embed RUN STORE` makes vectors",
    "schedules": "`tokmill rl eval RUN MODULES` measures its schedules",
}
"""Task → what its runs are for."""


@dataclass(frozen=True)
class Predictions:
    """The classes of records (N), and their probabilities."""

    names: tuple[str, ...]
    """Of the C classes."""
    keys: dict[str, list[Any]]
    """What identifies a record: `record`, its number from 0; `line` of an input file, from 1; and
    the columns of strings that the store has."""
    probabilities: Array
    """float32 (N, C): softmax of the outputs."""
    step: int
    notes: list[str]

    @property
    def labels(self) -> list[str]:
        """The most probable class of each record."""
        return [self.names[number] for number in self.probabilities.argmax(1)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield for each record its keys, `label`, and `probabilities` by class."""
        for *key, label, share in zip(
            *self.keys.values(), self.labels, self.probabilities.tolist(), strict=True
        ):
            each = dict(zip(self.names, share, strict=True))
            yield dict(zip(self.keys, key, strict=True)) | {"label": label, "probabilities": each}


def predict(
    run: Path | str,
    input: Path | str,
    *,
    lines: bool = False,
    at: str = "",
    batch: int = 0,
    device: str = "auto",
    quiet: bool = True,
) -> Predictions:
    """Return the classes of the records of an input.

    Args:
        run: folder of a run of the task `classify`.
        input: a store; or files of the kind that the store of the run was built from, with labels
            or without; - reads lines from stdin. Files are read as the run's store was built.
        lines: each line of the input is a text, of pairs two with a tab between them.
        at: which weights (`weights_at`).
        batch: records at a time; 0: as many as in a step of the run.
        device: cpu, cuda, or auto.
        quiet: show no progress.

    Raises:
        UsageError: the run is of another task.
        TokmillError: the records would not look like those that the run has learned.
    """
    run = Path(run)
    config, facts = read_run(run)
    if config.task.kind != "classify":
        raise UsageError(
            f"the run has learned the task {config.task.kind}, and only `classify` knows classes",
            where=str(run),
            hint=INSTEAD.get(config.task.kind, "`tokmill eval RUN STORE` measures the run"),
        )
    task = load_task(run, at)
    assert isinstance(task, Classify)
    with contextlib.ExitStack() as held:
        built = lines or str(input) == STDIN or not is_store(Path(input))
        if built:
            store = held.enter_context(read_likewise(run, facts, str(input), lines))
        else:
            store = open_to_evaluate(str(input), config.data)
        check_form(run, task, facts, store)
        rows = task.records(store)
        names = [n for n in columns_to_read(task, [store]) if n != task.config.column]
        feed = Feed(rows, batch or config.data.batch, shuffle=False, columns=names)
        place = pick_device(device)
        task.to(place)
        probabilities = np.zeros((len(rows), len(task.names)), np.float32)
        bar = held.enter_context(Progress("predict", len(rows), unit="records", quiet=quiet))
        held.enter_context(ShardCheck([store] if config.data.verify and not built else []))
        for start in range(0, len(rows), feed.batch_size):
            entries = np.arange(start, min(start + feed.batch_size, len(rows)))
            read = feed.make(np.zeros_like(entries), entries)
            # No label is needed, and `prepare` wants one.
            read.values = {task.config.column: np.zeros_like(entries)}
            for part in micro_batches(task.prepare(read), config.run.micro_tokens):
                with torch.no_grad(), Precision(config.run.precision, place).autocast():
                    values = task.predicted_values(moved(to_tensors(part, place), place))
                share = torch.softmax(values.double(), 1)[:, : len(task.names)]
                probabilities[start + part.entry] = share.cpu().numpy()
            bar.advance(len(entries))
        records = rows.spans(np.arange(len(rows)), 0).record
        notes = cut_notes(rows) + (what_is_missing(store) if built else [])
        if empty := len(store) - len(rows):
            notes.append(f"{human_count(empty, 'record')} without tokens: no prediction")
        paths = set(input_paths(store).values()) if built else set()
        path = paths.pop() if len(paths) == 1 else ""
        counted = (lines and not path.lower().endswith(PACKED)) or line_of(path, 0)
        keys = keys_of(store, records, path if counted else "")
        return Predictions(task.names, keys, probabilities, task.step, notes)


@contextlib.contextmanager
def read_likewise(run: Path, facts: Facts, source: str, lines: bool) -> Iterator[Store]:
    """Yield a temporary store of an input, read as the store of a run was built."""
    made = read_made(run)
    if made is None:
        raise TokmillError(
            "the run does not know how its records were built",
            where=str(run),
            hint="build a store with its vocabulary, and name that in place of the file",
        )
    if source != STDIN and not Path(source).exists():
        raise TokmillError("there is no such file or folder", where=source, hint="check the path")
    kind: Any = plugins.load(plugins.SOURCES, made.source)
    with tempfile.TemporaryDirectory(prefix="tokmill-predict-") as folder:
        stdin = str(Path(folder) / "stdin.txt")
        if source == STDIN:
            source, lines = stdin, True
            with machine_errors("write", stdin), open(stdin, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        text = kind.has_tokenizer and "token" in facts.vocabularies
        try:
            count = made.segments if lines else 0
            chosen: Made = kind.to_predict(made, source, count, str(run / VOCAB))
            recipe = BuildRecipe(
                source=chosen.source,
                inputs=(source,),
                out=str(Path(folder) / "store"),
                tokenizer=str(run) if text else None,
                roles=roles_of(run, facts) if text else {},
                options=chosen.options,
            )
            how = How(amount=Amount(workers=0), max_rejects=1, quiet=True)
            store = build(recipe, how)
        except TokmillError as error:
            error.where = error.where.replace(stdin, "stdin")
            if isinstance(error, UsageError) and not lines:
                error.hint = (
                    f"it is read by `build {made.source}` with the options in {run / MADE}; "
                    "--lines reads each line as a text"
                )
            raise
        check_engine(store, run / VOCAB)
        yield store


def roles_of(run: Path, facts: Facts) -> dict[str, str]:
    """Return role → special token of a run's tokenizer."""
    vocabulary = facts.vocabularies["token"]
    coder = plugins.load(plugins.CODERS, "tokenizer").from_file(run / VOCAB / vocabulary.file)
    names = {number: token for token, number in coder.specials.items()}
    return {role: names[number] for role, number in vocabulary.roles.items()}


def check_form(run: Path, task: Classify, facts: Facts, store: Store) -> None:
    """Refuse a store whose records do not look like those that a run has learned."""
    check_store(facts, store)
    made, wrong = read_made(run), ""
    segments = 1 + int(store.manifest.ranges.get(SEGMENT, (0, 0))[1])
    if made and made.segments != segments:
        wrong = f"a record has {segments} sentences, and the run has learned {made.segments}"
    for name, ids in () if task.frame else facts.prefix.items():
        before, after = (found[name] for found in affixes_of(store))
        end = facts.suffix.get(name, ())
        if before != [*ids] or (end and after != [*end]):
            wrong = f"the special tokens around a record of {name!r} are not those of the run"
    if wrong:
        raise TokmillError(
            wrong,
            where=str(store.path),
            hint="build it with the options of the run's store, which RUN/made.json shows",
        )


def keys_of(store: Store, records: Array, path: str) -> dict[str, list[Any]]:
    """Return what identifies records; see `Predictions`. `path`: the text file of all, or ""."""
    keys: dict[str, list[Any]] = {"record": records.tolist()}
    shards = [store.shard(number) for number in range(len(store.shards))]
    if path:
        newlines = np.flatnonzero(np.frombuffer(read_file(Path(path)), np.uint8) == NEWLINE)
        starts = np.concatenate([shard["start"] for shard in shards]).astype(np.int64)
        keys["line"] = (1 + np.searchsorted(newlines, starts[records])).tolist()
    for name in [name for name, column in store.schema.items() if column.dtype == "utf8"]:
        texts: list[str] = []
        for shard, entry in zip(shards, store.shards, strict=True):
            texts += shard.strings(name, 0, entry.records)
        keys[name] = [texts[record] for record in records]
    return keys


def what_is_missing(store: Store) -> list[str]:
    """Return a note on what of an input is no record."""
    missing = {**store.manifest.rejected, **store.manifest.skipped}
    if not missing:
        return []
    first = left_out(store, 1)
    line = f"; the first reject is in line {first[0].line:,}" if first and first[0].line else ""
    counts = ", ".join(f"{count:,} {reason}" for reason, count in missing.items())
    return [f"without a prediction, as they are no records: {counts}{line}"]
