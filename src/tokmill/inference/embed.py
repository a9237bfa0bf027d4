"""`tokmill embed`: a vector per record from a run's hidden states, as an overlay."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from tokmill.base.errors import MachineError, UsageError
from tokmill.base.files import machine_errors, make_folder, sha256_file
from tokmill.base.progress import Progress, live
from tokmill.builds.build import run as build
from tokmill.builds.plan import Amount, BuildRecipe, How
from tokmill.builds.selection.overlay_values import OverlaySource, shard_identity
from tokmill.builds.source import Hash, Item, Resources
from tokmill.feed.entries import Vectors as ReadVectors
from tokmill.inference.vectors import BATCH_TOKENS, Vectors, refuse_vectors
from tokmill.models.heads import Pool, check_pool
from tokmill.store.checks.background_check import ShardCheck
from tokmill.store.manifest import Overlay, canonical_digest
from tokmill.store.receipts import read_receipts
from tokmill.store.schema import Array, Column, Records
from tokmill.store.store import Store
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import Facts
from tokmill.training.engines.devices.device import Precision, keep_freed_memory, pick_device
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import (
    affix_notes,
    check_store,
    check_vectors,
    inputs_of,
    load_task,
    read_run,
    task_type,
)
from tokmill.training.runs.weights import step_of, weights_at

COLUMN = "embedding"
EMPTY = "records without tokens have zeros"
_bar: ContextVar[Progress | None] = ContextVar("bar", default=None)
"""The bar that counts tokens. The build makes the source itself, so it cannot be an argument."""


class Embedded(msgspec.Struct, frozen=True):
    """The result of `embed_store`."""

    store: str
    overlay: str
    records: int
    width: int
    empty: int
    """Records without tokens, whose vector is 0."""
    model: str
    """Digest of the weights and of the settings of the model."""
    step: int
    """Step of the training at which the weights were saved."""
    pool: str


def embed(
    run: Path | str, store: Path | str, *, pool: Pool | Literal["auto"] = "auto", at: str = ""
) -> Array:
    """Return a vector of each record of a store, float32 (records, width).

    They are kept in the store as an overlay, so the next call only reads them. Arguments and errors
    are those of `embed_store`.
    """
    built = embed_store(run, store, pool=pool, at=at, quiet=not live())
    return Store(store, [built.overlay]).column(COLUMN)


def embed_store(
    run: Path | str,
    store: Path | str,
    *,
    pool: Pool | Literal["auto"] = "auto",
    at: str = "",
    name: str = "",
    device: str = "auto",
    batch_tokens: int = BATCH_TOKENS,
    fresh: bool = False,
    quiet: bool = True,
) -> Embedded:
    """Write a vector per record: the model's hidden states, pooled over all tokens of the record.

    Args:
        run: folder of a run.
        store: folder of a finished store with the run's vocabularies.
        pool: mean; last; signature; auto: as the run was trained (`Task.pool_of`), else mean.
        at: which weights (`weights_at`): "", "last", "best" or a step.
        name: of the overlay; by default pooling and digest of the model.
        device: cpu, cuda, or auto.
        batch_tokens: positions that are read at a time; changes vectors only by rounding.
        fresh: make an existing overlay again from the beginning.
        quiet: show no progress.

    Raises:
        TokmillError: there are no such weights, the store is not finished, a shard is damaged, or
            its ids have another meaning than the run's.
        UsageError: an option is unknown.
        Interrupted: it was stopped; the same call continues it.
    """
    if pool != "auto":
        check_pool(pool)
    config = EmbedConfig(
        run=str(run), pool=pool, at=at, name=name, device=device, batch_tokens=batch_tokens
    )
    source = EmbedSource(config, [str(store)], {}, Resources())
    folder = source.folder(config, [str(store)])
    facts = source.model.facts
    asked = facts.measures.continues and not quiet
    for note in affix_notes(facts, source.base) if asked else ():
        print(f"note: {note}", file=sys.stderr)
    done = 0 if fresh else source.tokens_done(folder)
    total = source.base.tokens
    with Progress("embed", total, unit="tokens", done=done, quiet=quiet) as bar:
        empty = _build(config, str(store), fresh, bar)
    if not fresh and done == total and not quiet:
        print("all vectors exist already: there was nothing to do", file=sys.stderr)
    assert isinstance(source.overlay, Overlay)
    return Embedded(
        store=str(store),
        overlay=folder.name,
        records=len(source.base),
        width=source.schema[COLUMN].width,
        empty=empty,
        **{key: source.overlay.about[key] for key in ("model", "step", "pool")},
    )


def _build(config: EmbedConfig, store: str, fresh: bool, bar: Progress) -> int:
    """Build the overlay; return the number of records without tokens."""
    token = _bar.set(bar)
    try:
        options = msgspec.to_builtins(config)
        recipe = BuildRecipe(source="embed", inputs=(store,), options=options)
        # yes: if the store has grown, its overlay is extended without a question.
        how = How(amount=Amount(workers=0), fresh=fresh, yes=True, quiet=True)
        return build(recipe, how).manifest.notes.get(EMPTY, 0)
    finally:
        _bar.reset(token)


class EmbedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that reads the records, and how its hidden states become vectors."""

    run: str = ""
    """Folder of the run."""
    pool: Pool | Literal["auto"] = "auto"
    """How hidden states become one vector; auto: as the run was trained, else mean."""
    at: str = ""
    """The weights: best, a step, or last."""
    name: str = ""
    """Name of the overlay; by default pooling and digest of the model."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    batch_tokens: int = BATCH_TOKENS
    """Positions per batch; changes vectors only by rounding."""


class EmbedSource(OverlaySource):
    """The vectors of a store's records as its column `embedding`."""

    Config: ClassVar[type[msgspec.Struct]] = EmbedConfig

    config: EmbedConfig

    def prepare(self) -> None:
        super().prepare()
        config = self.config
        self.device = pick_device(config.device)
        self.model = model_of(config)
        self.config = msgspec.structs.replace(config, run=str(self.model.run))
        if config.batch_tokens < 1:
            raise UsageError(
                f"batch_tokens: {config.batch_tokens} is below 1", hint="it must be at least 1"
            )
        check_store(self.model.facts, self.base)
        read = self.model.vectors(self.base)
        check_vectors(self.model.facts, read)
        self.reads = {name: vector.store.content for name, vector in read.items()}
        width = self.model.width
        self.schema = {COLUMN: Column("f4", per="record", width=width)}
        self.check_columns("`build overlay` gives the column another name")
        about = {"model": self.model.digest, "step": self.model.step}
        about |= {"pool": self.model.pool, "width": width}
        self.overlay = Overlay(base=self.base.fingerprint, about=about)
        self.command = self._command()
        self._vectors: Vectors | None = None

    @classmethod
    def name_of(cls, config: Any) -> str:
        """Return the given name, or one made of the pooling and the model's digest."""
        model = None if config.name else model_of(config)
        return f"{model.pool}-{model.digest[:12]}" if model else str(config.name)

    def identity(self) -> dict[str, Any]:
        """Return options for the plan: the model's digest; device and batch size only round."""
        kept = {"run": self.model.digest, "at": "", "name": "", "device": "", "batch_tokens": 0}
        # Vectors that the model reads come from other stores.
        return kept | {"pool": self.model.pool} | ({"reads": self.reads} if self.reads else {})

    def items(self) -> Iterator[Item]:
        for number in range(len(self.base.shards)):
            yield self.item(number)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        number, _ = self.place(item)
        digest.update(self.base.shards[number].sha256.encode())
        scratch = make_folder(self.folder(self.config, [str(self.base.path)]) / "cache")
        # Mapped from a temporary file, because it may be larger than the memory.
        shape = (self.base.shards[number].records, self.model.width)
        vectors = scratch_array(scratch, shape)
        none = np.zeros(0, np.int64)
        for _ in self.fill(number, vectors):
            # No record is complete before all are, but a time limit can end the shard here.
            nothing = np.zeros((0, self.model.width), np.float32)
            yield Records(np.zeros(1, np.int64), {COLUMN: nothing}, none, done=0.0)
        for batch in self.records(number, {COLUMN: vectors}):
            if empty := int(np.count_nonzero(np.diff(batch.offsets) == 0)):
                batch.notes = {EMPTY: empty}
            yield batch

    def fill(self, number: int, vectors: Array) -> Iterator[None]:
        """Fill the vectors of one shard's records; yields after each batch of them.

        Raises `TokmillError` if the shard is damaged.
        """
        if self._vectors is None:
            self._vectors = self._load()
        bar = _bar.get()
        watched = [self.base] if self.model.verify else []
        # The shard is compared with its digest before its vectors are committed: they would stay
        # when the shard is made again.
        with ShardCheck(watched, shards=[number]):
            for tokens in self._vectors.fill(self.base, number, vectors):
                if bar:
                    bar.advance(tokens)
                yield

    def tokens_done(self, folder: Path) -> int:
        """Return the number of tokens in shards whose vectors are in the overlay's folder."""
        tokens = {shard_identity(entry): entry.tokens for entry in self.base.shards}
        items = (item for receipt in read_receipts(folder) for item in receipt.items)
        return sum(tokens.get(item.name, 0) for item in items)

    def _load(self) -> Vectors:
        if self.device.type == "cpu":
            keep_freed_memory()
        return Vectors(
            load_model(self.config, self.model),
            Precision(self.model.precision, self.device),
            self.model.pool,
            self.config.batch_tokens,
        )

    def _command(self) -> str:
        config = self.config
        words = ["tokmill", "embed", config.run, str(self.base.path.absolute())]
        words += ["--pool", self.model.pool, "--name", self.name_of(config)]
        return shlex.join([*words, *(["--at", config.at] if config.at else [])])


class EmbeddingModel(NamedTuple):
    """Facts of a run's model that are known without loading its weights."""

    run: Path
    digest: str
    step: int
    width: int
    pool: Pool
    precision: str
    verify: bool
    facts: Facts
    config: TrainConfig

    def vectors(self, store: Store) -> dict[str, ReadVectors]:
        """Return the vectors that the model reads beside a store's tokens."""
        return task_type(self.config).vectors(self.config.task, store)


def model_of(config: EmbedConfig) -> EmbeddingModel:
    if not config.run:
        raise UsageError("no run is named", hint="--run RUN")
    run = Path(config.run).absolute()
    recipe, facts = read_run(run)
    pool = task_type(recipe).pool_of(recipe.task) if config.pool == "auto" else config.pool
    reads = inputs_of(recipe, facts)
    if reads.vectors and pool != "signature":
        refuse_vectors(reads, str(run))
    file = weights_at(run, config.at)
    with machine_errors("read", file):
        stamp = file.stat()
    decides = {
        "weights": _digest(file, stamp.st_ctime_ns, stamp.st_size),
        "model": recipe.model,
        "task": recipe.task,
        "columns": facts.columns,
        "precision": recipe.run.precision,
    }
    return EmbeddingModel(
        run,
        canonical_digest(decides),
        step_of(file.parent),
        recipe.model.dim,
        pool,
        recipe.run.precision,
        recipe.data.verify,
        facts,
        recipe,
    )


def load_model(config: EmbedConfig, model: EmbeddingModel) -> Task:
    """Return the task of a model; raises `MachineError` if its weights are newer ones by now."""
    task = load_task(model.run, config.at)
    if model_of(config).digest != model.digest:
        raise MachineError(
            "a training has replaced the weights meanwhile",
            where=str(model.run),
            hint="run the command again, or name a step that stays: --at STEP",
        )
    return task


@lru_cache(maxsize=8)
def _digest(path: Path, changed: int, size: int) -> str:
    return sha256_file(path)


def scratch_array(folder: Path, shape: tuple[int, int]) -> Array:
    """Return zeros, float32, mapped from a file without a name, which is freed with the array."""
    if not shape[0]:
        return np.zeros(shape, np.float32)
    with machine_errors("write", folder), tempfile.TemporaryFile(dir=folder) as file:
        # A full disk is an error now; a later write to a sparse file would end in a signal.
        os.posix_fallocate(file.fileno(), 0, 4 * shape[0] * shape[1])
        return np.memmap(file, np.float32, "r+", shape=shape)
