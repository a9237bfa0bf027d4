"""The folder of one training, and what it takes to open it again.

RUN/
  recipe.json            the resolved recipe; written last when a run begins
  schema.json vocab/     what the store's columns and vocabularies were, so that sampling needs
                         no store
  metrics.jsonl  checkpoints/step-…/
  model/                 weights at the end, and config.json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from tokmill import plugins
from tokmill.errors import TokmillError
from tokmill.files import locked, machine_errors, make_folder, write_file
from tokmill.store.manifest import canonical_digest, encode, read_json
from tokmill.store.schema import Schema
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.task import Task, column_sizes
from tokmill.train import config as configs
from tokmill.train.checkpoint import checkpoints
from tokmill.train.config import TrainConfig
from tokmill.train.engine import MODEL, load_weights
from tokmill.train.resolve import RECIPE, read_recipe, resume_command
from tokmill.train.tensors import write_tensors
from tokmill.train.track import METRICS, read_metrics

FACTS, VOCAB, FINAL, LOCK = "schema.json", "vocab", "model", ".lock"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a run remembers of the store that it learns from."""

    fingerprint: str
    columns: dict[str, int]
    """The columns that the model reads, and the number of their ids."""
    schema: Schema
    vocabularies: dict[str, Vocabulary]
    bytes_per_token: float = 0.0


@dataclass(frozen=True)
class Run:
    """A finished or stopped training."""

    path: Path
    step: int
    metrics: dict[str, float]
    """The last value of each metric."""

    def task(self) -> Task:
        """Return the model with its newest weights, in its task, ready to evaluate."""
        return load_task(self.path)


@contextmanager
def open_run(out: Path, config: TrainConfig, resume: bool) -> Iterator[None]:
    """Hold a run folder for this training; refuse one that is taken or holds something else."""
    if (out / RECIPE).exists():
        if not resume:
            raise TokmillError(
                "the folder already holds a run",
                where=str(out),
                hint=f"`{resume_command(out)}` continues it; a new run needs another folder",
            )
        changed = configs.differences(read_recipe(out), config)
        if changed:
            raise TokmillError(
                "the recipe is not the one that the run began with: " + "; ".join(changed),
                where=str(out),
                hint="these keys decide the weights (the number of steps bends the learning rate), "
                "so a continued run would be neither; begin another folder",
            )
    elif out.is_dir() and any(path.name not in (LOCK, FACTS, VOCAB) for path in out.iterdir()):
        raise TokmillError(
            "the folder holds other files and no run", where=str(out), hint="name a new folder"
        )
    make_folder(out)
    with locked(out / LOCK, "another process trains in this folder", "wait for it, or stop it"):
        yield


def facts_of(out: Path, stores: Sequence[Store]) -> Facts:
    """Return what a run keeps of its stores; a run that has begun must know their fingerprint.

    Of several stores the first one says what ids mean; the others must agree.
    """
    store = stores[0]
    digests = [one.fingerprint for one in stores]
    facts = Facts(
        fingerprint=digests[0] if len(digests) == 1 else canonical_digest(digests),
        columns=column_sizes(store),
        schema=store.schema,
        vocabularies=store.vocabularies,
        bytes_per_token=store.bytes_per_token() or 0.0,
    )
    for other in stores[1:]:
        check_store(facts, other)
    if (out / RECIPE).exists():
        before: Facts = read_json(out / FACTS, Facts)
        check_store(before, store)
        if before.fingerprint != facts.fingerprint:
            raise TokmillError(
                f"the store is not the one that the run began with: fingerprint "
                f"{before.fingerprint[:12]} then, {facts.fingerprint[:12]} now",
                where=str(store.path),
                hint="name the old store, or begin another run",
            )
        return before
    return facts


def begin(out: Path, config: TrainConfig, store: Store, facts: Facts) -> None:
    """Write what a run folder keeps of recipe and store; of the store only the first time."""
    if not (out / RECIPE).exists():
        make_folder(out / VOCAB)
        for vocabulary in store.vocabularies.values():
            with machine_errors("read", store.path / VOCAB / vocabulary.file):
                data = (store.path / VOCAB / vocabulary.file).read_bytes()
            write_file(out / VOCAB / vocabulary.file, data)
        write_file(out / FACTS, encode(facts))
    write_file(out / RECIPE, encode(config))


def check_store(facts: Facts, store: Store) -> None:
    """Refuse a store whose ids mean something else than those of the run."""
    for name, mine in facts.vocabularies.items():
        other = store.vocabularies.get(name)
        if other is None or other.sha256 != mine.sha256:
            found = f"{other.size} ids, {other.sha256[:12]}" if other else "none"
            raise TokmillError(
                f"the vocabulary {name!r} differs: the run has {mine.size} ids, "
                f"{mine.sha256[:12]} ({mine.file}); the store has {found}",
                where=str(store.path),
                hint="build the store with the run's vocabulary, which lies in RUN/vocab",
            )
    for name, size in facts.columns.items():
        if name not in store.schema:
            raise TokmillError(f"the store has no column {name!r}", where=str(store.path))
        largest = int(store.manifest.ranges.get(name, (0, 0))[1])
        if largest >= size:
            raise TokmillError(
                f"the column {name!r} holds the id {largest}; the run knows 0 to {size - 1}",
                where=str(store.path),
                hint="train on the store with the larger ids, or give both one vocabulary",
            )


def make_task(config: TrainConfig, columns: Mapping[str, int]) -> Task:
    """Return the model in its task, weights drawn from the recipe's seed."""
    torch.manual_seed(config.run.seed)
    model = plugins.load(plugins.MODELS, config.model.kind)(config.model, columns)
    task: Task = plugins.load(plugins.TASKS, config.task.kind)(config.task, model, columns)
    return task


def load_task(run: Path | str) -> Task:
    """Return the task of a run with its final weights, or those of its newest checkpoint."""
    run = Path(run)
    if not (run / RECIPE).exists():
        raise TokmillError(
            "the folder holds no run", where=str(run), hint="`tokmill train STORE -o RUN` makes one"
        )
    facts: Facts = read_json(run / FACTS, Facts)
    place = newest_weights(run)
    if place is None:
        raise TokmillError(
            "the run has no weights yet", where=str(run), hint="wait for its first checkpoint"
        )
    task = make_task(configs.from_dict(read_recipe(run), str(run / RECIPE)), facts.columns)
    load_weights(task, place / MODEL)
    return task.eval()


def newest_weights(run: Path) -> Path | None:
    """Return the folder of a run's final weights, or its newest checkpoint; None: there is none."""
    places = [run / FINAL, *reversed(checkpoints(run))]
    return next((place for place in places if (place / MODEL).exists()), None)


def unfinished_at(run: Path) -> tuple[int, int] | None:
    """Return (step of the newest checkpoint, steps in all) of an unfinished run; else None."""
    place = newest_weights(run)
    if place is None or place == run / FINAL:
        return None
    return int(place.name.partition("-")[2]), int(read_recipe(run)["run"]["steps"])


def save_final(run: Path, task: Task, config: TrainConfig, step: int) -> None:
    """Write the weights of a finished run; config.json, written last, says that they are whole."""
    folder = make_folder(run / FINAL)
    write_tensors(folder / MODEL, task.state_dict())
    facts = {"step": step, "model": config.model, "task": config.task, "columns": task.sizes}
    write_file(folder / "config.json", encode(facts))


def last_metrics(run: Path) -> dict[str, float]:
    """Return the last value of each metric of a run."""
    latest: dict[str, float] = {}
    for entry in read_metrics(run / METRICS) if (run / METRICS).exists() else []:
        latest.update(entry)
    return latest
