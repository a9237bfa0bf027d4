"""The folder of one training.

RUN/
  recipe.json            the resolved recipe; written last when a run begins
  schema.json vocab/     the store's columns and vocabularies, so that sampling needs no store
  input_format.json      the store's source and options, so that `predict` reads inputs likewise
  run-id                 a random id, which its checkpoints have too
  metrics.jsonl  checkpoints/step-…/
  sessions.jsonl         after how many steps a process began or continued it, and with how many
  model/ best/           weights at the end, and with the lowest validation loss
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tokmill import plugins
from tokmill.base.errors import MachineError, MissingExtraError, TokmillError, shell_word
from tokmill.base.files import inside, make_folder, new_folder, read_file, write_file
from tokmill.base.locks import locked
from tokmill.base.progress import human_metric
from tokmill.feed.entries import Vectors
from tokmill.models.model import Inputs
from tokmill.store.checks.probe import FILE as PROBE
from tokmill.store.checks.probe import check_coder, probe_path
from tokmill.store.manifest import canonical_digest, encode, read_json
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.task import Task, same_classes
from tokmill.tasks.task_inputs import (
    INPUT_FORMAT,
    Facts,
    affixes_of,
    column_sizes,
    input_format_of,
    segments_of,
)
from tokmill.terminal.output import html_table
from tokmill.training.engines.optimisers.optim import same_rates
from tokmill.training.launch import resume_command
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.read_recipe import FACTS, RATE, RECIPE, differences, read_recipe
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.checkpoint import RUN_ID, checkpoints, run_id
from tokmill.training.runs.trackers import METRICS, read_metrics
from tokmill.training.runs.weights import FINAL, load_from, newest_weights, step_of, weights_at

VOCAB, LOCK = "vocab", ".lock"
BEGUN = {LOCK, FACTS, VOCAB, RUN_ID, INPUT_FORMAT}
"""What a folder holds at most before it has a recipe."""


class Run:
    """A finished or stopped training.

    Args:
        path: its folder.
        step: of its newest weights.
        metrics: the last value of each metric.
        notes: what is to be told of how it was made.

    Without `step` both are read from the folder, and `TokmillError` is raised if it holds no run.
    """

    def __init__(
        self,
        path: Path | str,
        step: int | None = None,
        metrics: dict[str, float] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.path, self.notes = Path(path), notes
        if step is None:
            read_run(self.path)
            weights = newest_weights(self.path)
            step, metrics = step_of(weights) if weights else 0, last_metrics(self.path)
        self.step, self.metrics = step, metrics or {}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, step={self.step})"

    def task(self) -> Task:
        """Return the model with its newest weights, in its task, ready to evaluate."""
        return load_task(self.path)

    def history(self) -> dict[str, Array]:
        """Return metric → its values by step, float64 with NaN where a step has none; `step`:
        int64.
        """
        entries = metrics_of(self.path)
        names = dict.fromkeys(["step", *(name for entry in entries for name in entry)])
        columns = {n: np.array([e.get(n) for e in entries], np.float64) for n in names}
        return columns | {"step": columns["step"].astype(np.int64)}

    def trace(self, step: int) -> list[Any]:
        """Return what the model saw, or will see, in a step from 1: a list of `trace.Seen`.

        Raises as `training.trace.Trace`.
        """
        return plugins.require("tokmill.training.trace").Trace(self.path).step(step)

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        config, _ = read_run(self.path)
        facts = {"task": config.task.kind, "model": config.model.kind}
        shown = {n: human_metric(v) for n, v in self.metrics.items() if v is not None}
        return html_table(repr(self), facts | shown)


@contextlib.contextmanager
def open_run(out: Path, config: TrainConfig, new: bool = False) -> Iterator[None]:
    """Lock a run folder for this training; refuse one that is in use or holds other files."""
    if (out / RECIPE).exists():
        if new:
            hint = f"`{resume_command(out)}` continues it"
            if is_weights_alone(out):
                hint = f"`{start_command(out)}` begins with its weights"
            raise TokmillError(
                "the folder already holds a run",
                where=str(out),
                hint=f"{hint}; a new run needs another folder",
            )
        done = max(map(step_of, checkpoints(out)), default=0)
        if is_weights_alone(out):
            raise TokmillError(
                "the run holds weights and no checkpoint, so it cannot be continued",
                where=str(out),
                hint=f"`{start_command(out)}` begins with them",
            )
        check_resume(read_recipe(out), config, done, out)
    elif out.is_dir() and {path.name for path in out.iterdir()} - BEGUN:
        raise TokmillError(
            "the folder holds other files and no run", where=str(out), hint="name a new folder"
        )
    lock = locked(out / LOCK, "another process trains in this folder", "wait for it, or stop it")
    with new_folder(out), lock:
        try:
            yield
        except BaseException:
            # The lock of a refused run, if nothing else is there.
            with contextlib.suppress(OSError):
                if [path.name for path in out.iterdir()] == [LOCK]:
                    (out / LOCK).unlink()
            raise


def is_weights_alone(out: Path) -> bool:
    return not checkpoints(out) and newest_weights(out) is not None


def start_command(out: Path) -> str:
    return f"tokmill train STORE --from {shell_word(out)} -o NEW"


def check_resume(recipe: Mapping[str, Any], config: TrainConfig, done: int, out: object) -> None:
    """Refuse to resume with a recipe that would change the steps that are already done."""
    before = from_dict(recipe, f"{out}/{RECIPE}")
    changed = differences(msgspec.json.decode(msgspec.json.encode(before)), config)
    if changed.keys() <= RATE and same_rates(
        before.optim, before.run.steps, config.optim, config.run.steps, done
    ):
        return
    hint = "these keys decide the weights, so they cannot change within a run"
    if changed.keys() <= RATE:
        hint = f"the {done} steps that are done would have had other learning rates"
    raise TokmillError(
        "the recipe is not the one that the run began with: "
        + "; ".join(f"{key}: {values}" for key, values in changed.items()),
        where=str(out),
        hint=f"{hint}; `--from {shell_word(str(out))} -o NEW` begins a run with its weights",
    )


def facts_of(out: Path, config: TrainConfig, stores: Sequence[Store]) -> Facts:
    """Return the facts of a run's stores; a run that has begun must have the same fingerprint."""
    facts = facts_from(config, stores)
    if (out / RECIPE).exists():
        before: Facts = read_json(out / FACTS, Facts)
        check_fingerprint(out, config, stores, before)
        return before
    return facts


def check_fingerprint(
    out: Path, config: TrainConfig, stores: Sequence[Store], before: Facts
) -> None:
    """Refuse stores that are not those which a run began with."""
    for store in stores[:1]:
        check_store(before, task_type(config).token_store(config.task, store))
    now = fingerprint_of(config, stores)
    if before.fingerprint != now:
        raise TokmillError(
            f"the store is not the one that the run began with: fingerprint "
            f"{before.fingerprint[:12]} then, {now[:12]} now",
            where=str(stores[0].path if stores else out),
            hint="name the old store, or begin another run",
        )


def fingerprint_of(config: TrainConfig, stores: Sequence[Store]) -> str:
    """Return the digest of all that is read of the stores; of several, one of their digests."""
    task = task_type(config)
    digests = [
        content_of(
            store,
            [
                task.token_store(config.task, store),
                *(vector.store for vector in task.vectors(config.task, store).values()),
            ],
        )
        for store in stores
    ]
    return canonical_digest(digests) if len(digests) > 1 else "".join(digests)


def facts_from(config: TrainConfig, stores: Sequence[Store]) -> Facts:
    """Return the facts of stores: the first one defines the meaning of ids, the others must agree.

    If a store refers to another one for its tokens (`Task.token_store`), the facts are those of the
    latter, and the fingerprint is of both. Without stores the facts are empty.
    """
    if not stores:
        return measured(config, Facts(fingerprint="", columns={}, schema={}, vocabularies={}))
    task = task_type(config)
    tokens = [task.token_store(config.task, store) for store in stores]
    vectors = [task.vectors(config.task, store) for store in stores]
    store = tokens[0]
    prefix, suffix = affixes_of(store)
    labels = [task.label_classes(config.task, one) for one in stores]
    facts = Facts(
        fingerprint=fingerprint_of(config, stores),
        columns=column_sizes(store),
        schema=store.schema,
        vocabularies=store.vocabularies,
        bytes_per_token=store.bytes_per_token() or 0.0,
        vectors={name: vector.width for name, vector in vectors[0].items()},
        vector_models={name: vector.model for name, vector in vectors[0].items() if vector.model},
        classes={
            name: same_classes([(one, own[name]) for one, own in zip(stores, labels, strict=True)])
            for name in labels[0]
        },
        prefix={name: tuple(ids) for name, ids in prefix.items()},
        suffix={name: tuple(ids) for name, ids in suffix.items()},
    )
    for other, read in zip(tokens[1:], vectors[1:], strict=True):
        check_store(facts, other)
        check_vectors(facts, read)
    return measured(config, facts)


def measured(config: TrainConfig, facts: Facts) -> Facts:
    measures = task_type(config).measures(config.task, inputs_of(config, facts))
    return msgspec.structs.replace(facts, measures=measures)


def content_of(store: Store, read: Sequence[Store]) -> str:
    others = [other.content for other in read if other is not store]
    return canonical_digest([store.content, *others]) if others else store.content


def begin(
    out: Path,
    config: TrainConfig,
    stores: Sequence[Store],
    facts: Facts,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the recipe, and when the run begins also its id and the facts of its stores.

    The first store defines the meaning of ids. `files`: further files, by name.
    """
    if not (out / RECIPE).exists():
        make_folder(out / VOCAB)
        if not run_id(out):
            write_file(out / RUN_ID, secrets.token_hex(16))
        for store in stores[:1]:
            tokens = task_type(config).token_store(config.task, store)
            copy_vocabularies(tokens, out)
            check_engine(tokens, out / VOCAB)
            if form := input_format_of(tokens.path):
                form = msgspec.structs.replace(form, segments=segments_of(tokens))
                write_file(out / INPUT_FORMAT, encode(form))
        write_file(out / FACTS, encode(facts))
    for name, data in (files or {}).items():
        write_file(inside(out, name), data)
    write_file(out / RECIPE, encode(config))


def copy_vocabularies(store: Store, out: Path) -> None:
    for vocabulary in store.vocabularies.values():
        path = inside(store.path / VOCAB, vocabulary.file)
        data = read_file(path)
        write_file(inside(out / VOCAB, vocabulary.file), data)
    if isinstance(store.manifest.probe, str):
        write_file(out / VOCAB / PROBE, read_file(probe_path(store.path)))


def check_engine(store: Store, folder: Path) -> None:
    """Compare the installed tokenizer with the store's probe, if the package is installed."""
    if isinstance(store.manifest.probe, str) and "token" in store.vocabularies:
        with contextlib.suppress(MissingExtraError):
            kind = plugins.load(plugins.CODERS, "tokenizer")
            check_tokenizer(
                kind.from_file(inside(folder, store.vocabularies["token"].file)), folder
            )


def check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Refuse a tokenizer whose ids differ from those of the engine that built the run's store.

    `folder`: the run's vocabularies. A tokenizer that cannot run here is not refused.
    """

    def encode(text: str) -> list[int] | None:
        try:
            return tokenizer.encode(text, specials="plain")
        except TokmillError:
            return None

    check_coder(folder / PROBE, encode, list(tokenizer.specials))


def _same_vocabulary(vocabulary: Vocabulary) -> str:
    if vocabulary.coder == "tokenizer":
        return (
            "build it with the same vocabulary: `tokmill build … --tokenizer` takes the folder of "
            "a run or of a store"
        )
    return "build it with the vocabularies of the run: `tokmill build x86 … --vocab RUN/vocab`"


def affix_notes(facts: Facts, store: Store) -> list[str]:
    """Return notes on a store whose records do not begin as those that a run has learned from."""
    here = affixes_of(store)[0] if facts.prefix else {}
    return [
        f"{name}: the records of the store begin with the special tokens {here[name] or 'none'}, "
        f"those that the run has learned with {[*ids] or 'none'}: `tokmill build … --template add` "
        "writes those of the tokenizer"
        for name, ids in facts.prefix.items()
        if list(ids) != here.get(name, list(ids))
    ]


def check_store(facts: Facts, store: Store) -> None:
    """Refuse a store whose ids have another meaning than those of the run.

    Only the vocabularies of columns that the run reads are compared.
    """
    if not facts.columns.keys() <= store.schema.keys():
        raise TokmillError(
            f"the run was trained on the columns {', '.join(facts.columns)}; the store has "
            f"{', '.join(column_sizes(store)) or 'no column of ids'}",
            where=str(store.path),
            hint="take a store of the same kind: `tokmill inspect` shows the columns of each",
        )
    read = {facts.schema[name].vocab or "" for name in facts.columns if name in facts.schema}
    for name, vocabulary in facts.vocabularies.items():
        if name not in read:
            continue
        other = store.vocabularies.get(name)
        if other is None or other.sha256 != vocabulary.sha256:
            there = f"{other.size} ids, {other.sha256[:12]}" if other else "none"
            raise TokmillError(
                f"the vocabulary {name!r} differs: the run has {vocabulary.size} ids, "
                f"{vocabulary.sha256[:12]} ({vocabulary.file}); the store has {there}",
                where=str(store.path),
                hint=_same_vocabulary(vocabulary),
            )
    for name, size in facts.columns.items():
        largest = int(store.manifest.ranges.get(name, (0, 0))[1])
        if largest >= size:
            raise TokmillError(
                f"the column {name!r} holds the id {largest}; the run knows 0 to {size - 1}",
                where=str(store.path),
                hint="train on the store with the larger ids, or give both the same vocabulary",
            )


def check_vectors(facts: Facts, vectors: Mapping[str, Vectors]) -> None:
    """Refuse vectors of another width than those of the run, or of another model."""
    for name, vector in vectors.items():
        where = str(vector.store.path)
        if vector.width != facts.vectors.get(name):
            raise TokmillError(
                f"the vectors {vector.name!r} are {vector.width} wide; the run has learned with "
                f"{facts.vectors.get(name)}",
                where=where,
                hint="embed the blocks with the model whose vectors the run has learned with",
            )
        learned = facts.vector_models.get(name, "")
        if learned and vector.model and vector.model != learned:
            raise TokmillError(
                f"the vectors {vector.name!r} were made by the model {vector.model[:12]}; the run "
                f"has learned with those of {learned[:12]}",
                where=where,
                hint="`tokmill embed` with that model makes them; --set task.overlay=NAME names "
                "the overlay where there are several",
            )


def inputs_of(config: TrainConfig, facts: Facts) -> Inputs:
    """Return the inputs of a recipe's model for a store with these facts."""
    return task_type(config).inputs(config.task, facts)


def task_type(config: TrainConfig) -> type[Task]:
    return plugins.load(plugins.TASKS, config.task.kind)


def make_task(config: TrainConfig, inputs: Inputs) -> Task:
    """Return a new task with its model; weights are drawn from the recipe's seed."""
    torch.manual_seed(config.run.seed)
    model = plugins.load(plugins.MODELS, config.model.kind)(config.model, inputs)
    return task_type(config)(config.task, model, inputs)


def load_task(run: Path | str, at: str = "") -> Task:
    """Return the task of a run with its weights at a point (`weights_at`), ready to evaluate.

    A training may replace or remove the weights that were found: then newer ones are taken.
    """
    run = Path(run)
    config, facts = read_run(run)
    file = weights_at(run, at)
    task = make_task(config, inputs_of(config, facts))
    while True:
        try:
            task.step = step_of(file.parent)
            load_from(task, file)
            if task.step == step_of(file.parent):
                return task.eval()
        except MachineError:
            if file.exists():
                raise
        file = weights_at(run, at)


def read_run(run: Path) -> tuple[TrainConfig, Facts]:
    if not (run / RECIPE).exists():
        raise TokmillError(
            "the folder holds no run" if run.exists() else "there is no such folder",
            where=str(run),
            hint="`tokmill train STORE -o RUN` makes one",
        )
    config = from_dict(read_recipe(run), str(run / RECIPE))
    facts: Facts = read_json(run / FACTS, Facts)
    return config, facts


def unfinished_at(run: Path) -> tuple[int, int] | None:
    """Return (step of the newest checkpoint, steps in all) of an unfinished run; else None."""
    place = newest_weights(run)
    if place is None or place == run / FINAL:
        return None
    return step_of(place), int(read_recipe(run)["run"]["steps"])


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Return the lines of a run's metrics.jsonl."""
    return read_metrics(run / METRICS) if (run / METRICS).exists() else []


def last_metrics(run: Path) -> dict[str, float]:
    latest: dict[str, float] = {}
    for entry in metrics_of(run):
        latest.update(entry)
    return latest
