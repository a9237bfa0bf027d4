"""`tokmill predict`: the class of each record of a store, of a file or of lines."""

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
from tokmill.builds.plan import Amount, BuildRecipe, How
from tokmill.builds.remake import input_paths, left_out, line_of
from tokmill.feed.feed import Feed
from tokmill.feed.rows import Rows
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.marks import is_store
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.tasks.classify import Classify
from tokmill.tasks.task import to_tensors
from tokmill.tasks.task_inputs import (
    INPUT_FORMAT,
    Facts,
    affixes_of,
    read_input_format,
    segments_of,
)
from tokmill.training.data import columns_to_read, cut_notes, micro_batches, open_to_evaluate
from tokmill.training.engines.devices.device import Precision, moved, pick_device
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import VOCAB, check_engine, check_store, load_task, read_run

STDIN, NEWLINE = "-", 10


@dataclass(frozen=True)
class Predictions:
    """The classes of N records."""

    names: tuple[str, ...]
    keys: dict[str, list[Any]]
    """What identifies a record: `record`, its number from 0; `line` of a file of text, from 1; the
    columns of strings of the store."""
    probabilities: Array
    """float32 (N, C): softmax of the outputs."""
    step: int
    notes: list[str]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield for each record its keys, the most probable `label`, and `probabilities`."""
        keys = zip(*self.keys.values(), strict=True)
        best = self.probabilities.argmax(1).tolist()
        for key, number, share in zip(keys, best, self.probabilities.tolist(), strict=True):
            each = dict(zip(self.names, share, strict=True))
            prediction = {"label": self.names[number], "probabilities": each}
            yield dict(zip(self.keys, key, strict=True)) | prediction


def predict(
    run: Path | str, input: Path | str, *, at: str = "", device: str = "auto", quiet: bool = True
) -> Predictions:
    """Return the classes of the records of an input.

    Args:
        run: folder of a run of the task `classify`.
        input: a store; or a file that is read as the run's store was built, with labels or without;
            or -, for lines of text from stdin, of pairs with a tab between the two.
        at: which weights (`weights_at`).
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
            f"the task of the run is {config.task.kind}; only `classify` predicts classes",
            where=str(run),
            hint="`tokmill sample RUN` continues texts, `tokmill embed RUN STORE` makes vectors, "
            "`tokmill eval RUN STORE` measures any run",
        )
    task, place = load_task(run, at), pick_device(device)
    assert isinstance(task, Classify)
    with contextlib.ExitStack() as stack:
        built = not is_store(Path(input))
        if built:
            store = stack.enter_context(temporary_store(run, facts, str(input)))
        else:
            store = open_to_evaluate(str(input), config.data)
            stack.enter_context(ShardCheck([store] if config.data.verify else []))
        check_form(run, task, facts, store)
        rows = task.records(store)
        with Progress("predict", len(rows), unit="records", quiet=quiet) as bar:
            probabilities = shares(task.to(place), config, rows, place, bar)
        if not np.isfinite(probabilities).all():
            raise TokmillError(
                "the outputs are not finite: the training diverged, or weights are damaged",
                where=str(run),
                hint="take other weights, with --at best or --at STEP",
            )
        notes = [note.replace(str(store.path), str(input)) for note in cut_notes(rows)]
        notes += missing_notes(store) if built else []
        if empty := len(store) - len(rows):
            notes.append(f"{human_count(empty, 'record')} without tokens: no prediction")
        paths = set(input_paths(store).values()) if built else set()
        keys = keys_of(store, rows.spans(np.arange(len(rows)), 0).record, paths)
        return Predictions(task.names, keys, probabilities, task.step, notes)


def shares(
    task: Classify, config: TrainConfig, rows: Rows, place: torch.device, bar: Progress
) -> Array:
    """Return the probabilities of the classes, float32 (rows, C)."""
    names = [n for n in columns_to_read(task, [rows.store]) if n != task.config.column]
    feed = Feed(rows, config.data.batch, shuffle=False, columns=names)
    result = np.zeros((len(rows), len(task.names)), np.float32)
    for start in range(0, len(rows), feed.batch_size):
        entries = np.arange(start, min(start + feed.batch_size, len(rows)))
        read = feed.make(np.zeros_like(entries), entries)
        # `prepare` wants labels, and the outputs do not depend on them.
        read.values = {task.config.column: np.zeros_like(entries)}
        for part in micro_batches(task.prepare(read), config.run.micro_tokens):
            with torch.no_grad(), Precision(config.run.precision, place).autocast():
                values = task.predicted_values(moved(to_tensors(part, place), place))
            share = torch.softmax(values.double(), 1)[:, : len(task.names)]
            result[start + part.entry] = share.cpu().numpy()
        bar.advance(len(entries))
    return result


@contextlib.contextmanager
def temporary_store(run: Path, facts: Facts, path: str) -> Iterator[Store]:
    """Yield a temporary store of a file, or of lines from stdin, read as that of a run was."""
    form = read_input_format(run)
    if form is None:
        raise TokmillError(
            "the run does not know how its records were built",
            where=str(run),
            hint="build a store with its vocabulary, and name that in place of the file",
        )
    lines = path == STDIN
    if not lines and not Path(path).is_file():
        raise TokmillError("this is neither a store nor a file", where=path, hint="name one")
    with tempfile.TemporaryDirectory(prefix="tokmill-predict-") as folder:
        if lines:
            path = str(Path(folder) / "stdin.txt")
            with machine_errors("write", path), open(path, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        kind: Any = plugins.load(plugins.SOURCES, form.source)
        try:
            chosen = kind.to_predict(form, path, form.segments * lines)
            text = kind.has_tokenizer and "token" in facts.vocabularies
            vocab = {"vocab": str(run / VOCAB)} if form.options.get("vocab") else {}
            recipe = BuildRecipe(
                source=chosen.source,
                inputs=(path,),
                out=str(Path(folder) / "store"),
                tokenizer=str(run) if text else None,
                roles=form.roles,
                options=chosen.options | vocab,
            )
            store = build(recipe, How(amount=Amount(workers=0), max_rejects=1, quiet=True))
        except TokmillError as error:
            if lines:
                error.where = error.where.replace(path, "stdin")
                error.hint = error.hint.replace(path, "FILE")
            if isinstance(error, UsageError) and not lines:
                options = f"`build {form.source}` with the options in {run / INPUT_FORMAT}"
                error.hint = f"it is read by {options}; - reads lines of text from stdin"
            raise
        check_engine(store, run / VOCAB)
        yield store


def check_form(run: Path, task: Classify, facts: Facts, store: Store) -> None:
    """Refuse a store whose records do not look like those that a run has learned."""
    check_store(facts, store)
    form, segments, wrong = read_input_format(run), segments_of(store), ""
    if form and form.segments != segments:
        wrong = f"a record has {segments} sentences, and the run has learned {form.segments}"
    before, after = ({}, {}) if task.frame else affixes_of(store)
    for name, ids in before.items():
        end = [*facts.suffix.get(name, ())]
        if ids != [*facts.prefix.get(name, ids)] or (end and after[name] != end):
            wrong = f"the special tokens around a record of {name!r} are not those of the run"
    if wrong:
        hint = f"build it with the options of the run's store: {run / INPUT_FORMAT}"
        raise TokmillError(wrong, where=str(store.path), hint=hint)


def keys_of(store: Store, records: Array, paths: set[str]) -> dict[str, list[Any]]:
    """Return what identifies records; see `Predictions`. `paths`: the files that they are from."""
    keys: dict[str, list[Any]] = {"record": records.tolist()}
    shards = [store.shard(number) for number in range(len(store.shards))]
    if len(paths) == 1 and line_of(path := paths.pop(), 0):
        newlines = np.flatnonzero(np.frombuffer(read_file(Path(path)), np.uint8) == NEWLINE)
        starts = np.concatenate([shard["start"] for shard in shards]).astype(np.int64)
        keys["line"] = (1 + np.searchsorted(newlines, starts[records])).tolist()
    for name in [name for name, column in store.schema.items() if column.dtype == "utf8"]:
        sized = zip(shards, store.shards, strict=True)
        texts = [text for shard, of in sized for text in shard.strings(name, 0, of.records)]
        keys[name] = [texts[record] for record in records]
    return keys


def missing_notes(store: Store) -> list[str]:
    """Return notes on what of a file is not a record, or was cut off while it was read."""
    missing = {**store.manifest.rejected, **store.manifest.skipped}
    counts = ", ".join(f"{count:,} {reason}" for reason, count in missing.items())
    first = next(iter(left_out(store, 1)), None)
    where = f"; the first reject is in line {first.line:,}" if first and first.line else ""
    noted = store.manifest.notes.items()
    cut = [f"{note}: {count:,}" for note, count in noted if "cut" in note and count]
    return cut + ([f"left out, as they are not records: {counts}{where}"] if missing else [])
