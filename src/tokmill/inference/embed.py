"""`tokmill embed`: a vector a record from a run's hidden states, as an overlay or an .npy file."""

from __future__ import annotations

import io
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from tokmill.builds.overlay import OverlaySource, shard_identity
from tokmill.builds.prepare import BuildRecipe, How
from tokmill.builds.resources import Amount
from tokmill.builds.run import run as build
from tokmill.builds.source import Frozen, Hash, Item, Resources
from tokmill.errors import Interrupted, TokmillError, UsageError
from tokmill.files import machine_errors, make_folder, sha256_file, write_file
from tokmill.inference.vectors import BATCH_TOKENS, Vectors
from tokmill.models.pooling import Pool, check_pool
from tokmill.progress import Progress
from tokmill.store.check import ShardCheck
from tokmill.store.manifest import Overlay, canonical_digest
from tokmill.store.schema import Array, Column, Records
from tokmill.store.store import read_receipts
from tokmill.tasks.inputs import Facts
from tokmill.training.engines.allocator import keep_freed_memory
from tokmill.training.engines.device import pick_device
from tokmill.training.engines.precision import Precision
from tokmill.training.runs.run import check_store, inputs_of, load_task, read_run
from tokmill.training.runs.weights import step_of, weights_at

COLUMN = "embedding"
EMPTY = "records without tokens have zeros"
_bar: ContextVar[Progress | None] = ContextVar("bar", default=None)
"""Counts tokens while the build, whose own bar counts shards, makes its source itself."""


class Embedded(msgspec.Struct, frozen=True):
    """What `embed` wrote."""

    store: str
    overlay: str
    """Name of the overlay; empty where a file was written."""
    file: str
    """The .npy file; empty where an overlay was written."""
    records: int
    width: int
    empty: int
    """Records without tokens, whose vector is 0."""
    model: str
    """Digest of the weights and of what decides what they compute."""
    step: int
    """Step of the training after which these were the weights."""
    pool: str


def embed(
    run: Path | str,
    store: Path | str,
    *,
    pool: Pool = "mean",
    at: str = "",
    name: str = "",
    npy: Path | str | None = None,
    device: str = "auto",
    batch_tokens: int = BATCH_TOKENS,
    fresh: bool = False,
    quiet: bool = True,
) -> Embedded:
    """Write a vector a record: the model's hidden states, pooled over all tokens of the record.

    Args:
        run: folder of a run.
        store: folder of a finished store with the run's vocabularies.
        pool: mean; last; or attention, a mean weighted by softmax(q · h / sqrt(D)), where q is the
            query that the run has learned, else the record's last hidden state.
        at: which weights (`weights_at`): "", "last", "best", "average" or a step.
        name: of the overlay; without it pooling and digest of the model.
        npy: write this file alone, float32 (records, D), and leave the store as it is.
        device: cpu, cuda, or auto.
        batch_tokens: positions that are read at a time; changes vectors by rounding alone.
        fresh: make an overlay that is there again from the beginning, or write over a file.
        quiet: show no progress.

    Raises:
        TokmillError: there are no such weights, the file is there, the store is not finished, a
            shard is damaged, or its ids mean something else than the run's.
        UsageError: an option is not known, a file has a name, or `npy` is no place for one.
        Interrupted: it was stopped; an overlay goes on when the same is called again.
    """
    check_pool(pool)
    if npy is not None and name:
        raise UsageError("an .npy file is written alone, and no overlay", hint="leave --name out")
    if npy is not None:
        check_target(Path(npy), fresh)
    config = EmbedConfig(
        run=str(run), pool=pool, at=at, name=name, device=device, batch_tokens=batch_tokens
    )
    source = EmbedSource(config, [str(store)], {}, Resources())
    folder = source.folder(config, [str(store)])
    done = 0 if npy is not None or fresh else source.tokens_done(folder)
    total = source.base.tokens
    with Progress("embed", total, unit="tokens", done=done, quiet=quiet) as bar:
        token = _bar.set(bar)
        try:
            if npy is not None:
                empty = write_npy(source, Path(npy))
            else:
                options = msgspec.to_builtins(config)
                made = BuildRecipe(source="embed", inputs=(str(store),), options=options)
                # An overlay of a store that has grown follows it without a question.
                how = How(amount=Amount(workers=0), fresh=fresh, yes=True, quiet=True)
                empty = build(made, how).manifest.notes.get(EMPTY, 0)
        finally:
            _bar.reset(token)
    if npy is None and not fresh and done == total and not quiet:
        print("all vectors are there: nothing was left to do", file=sys.stderr)
    assert isinstance(source.overlay, Overlay)
    return Embedded(
        store=str(store),
        overlay="" if npy is not None else folder.name,
        file="" if npy is None else str(npy),
        records=len(source.base),
        width=source.schema[COLUMN].width,
        empty=empty,
        **{key: source.overlay.about[key] for key in ("model", "step", "pool")},
    )


class EmbedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which model reads the records, and how its hidden states become vectors."""

    run: str = ""
    """Folder of the run."""
    pool: Pool = "mean"
    """How hidden states become one vector."""
    at: str = ""
    """The weights: best, average, a step, or last."""
    name: str = ""
    """Name of the overlay; without it pooling and digest of the model."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    batch_tokens: int = BATCH_TOKENS
    """Positions that are read at a time; changes vectors by rounding alone."""


class EmbedSource(OverlaySource):
    """The vectors of a store's records as its column `embedding`."""

    Config: ClassVar[type[msgspec.Struct]] = EmbedConfig

    def __init__(
        self,
        config: Any,
        inputs: Sequence[str],
        vocabularies: Mapping[str, Frozen],
        resources: Resources,
    ) -> None:
        super().__init__(inputs)
        self.device = pick_device(config.device)
        self.model = known_model(config)
        self.config: EmbedConfig = msgspec.structs.replace(config, run=str(self.model.run))
        if config.batch_tokens < 1:
            raise UsageError(f"{config.batch_tokens} positions are no batch", hint="1 or more")
        check_store(self.model.facts, self.base)
        width = self.model.width
        self.schema = {COLUMN: Column("f4", per="record", width=width)}
        self.check_columns("`--npy FILE` writes vectors outside of the store")
        about = {"model": self.model.digest, "step": self.model.step}
        about |= {"pool": config.pool, "width": width}
        self.overlay = Overlay(base=self.base.fingerprint, about=about)
        self.command = self._command()
        self._vectors: Vectors | None = None

    @classmethod
    def name_of(cls, config: Any) -> str:
        """Return the name that is given, or one of the pooling and the model's digest."""
        return str(config.name or f"{config.pool}-{known_model(config).digest[:12]}")

    def identity(self) -> dict[str, Any]:
        """Return the model by its digest; a device and the size of a batch only round."""
        return {"run": self.model.digest, "at": "", "name": "", "device": "", "batch_tokens": 0}

    def items(self) -> Iterator[Item]:
        """Yield the shards of the store."""
        for number in range(len(self.base.shards)):
            yield self.item(number)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        """Yield the vectors of one shard's records."""
        number, _ = self.place(item)
        digest.update(self.base.shards[number].sha256.encode())
        scratch = make_folder(self.folder(self.config, [str(self.base.path)]) / "cache")
        vectors = self.empty(number, scratch)
        none = np.zeros(0, np.int64)
        for _ in self.fill(number, vectors):
            # No record is whole before all are, but a time limit may end the shard here.
            nothing = np.zeros((0, self.model.width), np.float32)
            yield Records(np.zeros(1, np.int64), {COLUMN: nothing}, none, done=0.0)
        for batch in self.records(number, {COLUMN: vectors}):
            if empty := int(np.count_nonzero(np.diff(batch.offsets) == 0)):
                batch.notes = {EMPTY: empty}
            yield batch

    def empty(self, number: int, scratch: Path) -> Array:
        """Return room for the vectors of one shard's records, (records, D) float32.

        It is a file in `scratch` that is lost: what a shard needs may be larger than the memory.
        """
        return lost_array(scratch, (self.base.shards[number].records, self.model.width))

    def fill(self, number: int, vectors: Array) -> Iterator[None]:
        """Fill the vectors of one shard's records; yields after each batch of them.

        Raises `TokmillError` where the shard is not what was built.
        """
        if self._vectors is None:
            self._vectors = self._load()
        bar = _bar.get()
        watched = [self.base] if self.model.verify else []
        # The shard is compared with its digest before anybody gets vectors of it: once committed,
        # they would stay when the shard is repaired.
        with ShardCheck(watched, shards=[number]):
            for tokens in self._vectors.fill(self.base, number, vectors):
                if bar:
                    bar.advance(tokens)
                yield

    def tokens_done(self, folder: Path) -> int:
        """Return the tokens of the shards whose vectors stand in an overlay's folder."""
        tokens = {shard_identity(entry): entry.tokens for entry in self.base.shards}
        items = (item for receipt in read_receipts(folder) for item in receipt.items)
        return sum(tokens.get(item.name, 0) for item in items)

    def _load(self) -> Vectors:
        if self.device.type == "cpu":
            keep_freed_memory()
        return Vectors(
            load_task(self.model.run, self.config.at),
            Precision(self.model.precision, self.device),
            self.config.pool,
            self.config.batch_tokens,
        )

    def _command(self) -> str:
        config = self.config
        words = ["tokmill", "embed", config.run, str(self.base.path.absolute())]
        words += ["--pool", config.pool, "--name", self.name_of(config)]
        return shlex.join([*words, *(["--at", config.at] if config.at else [])])


class Known(NamedTuple):
    """What is known of a run's model without its weights in memory."""

    run: Path
    digest: str
    step: int
    width: int
    precision: str
    verify: bool
    facts: Facts


def known_model(config: EmbedConfig) -> Known:
    """Return what is known of the model that a recipe names."""
    if not config.run:
        raise UsageError("no run was named", hint="--run RUN")
    run = Path(config.run).absolute()
    recipe, facts = read_run(run)
    if inputs_of(recipe, facts).vectors:
        raise UsageError(
            "the model reads vectors of other records, and `tokmill embed` feeds tokens alone",
            where=str(run),
            hint="name a run whose model reads tokens",
        )
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
    return Known(
        run,
        canonical_digest(decides),
        step_of(file.parent),
        recipe.model.dim,
        recipe.run.precision,
        recipe.data.verify,
        facts,
    )


@lru_cache(maxsize=8)
def _digest(path: Path, changed: int, size: int) -> str:
    return sha256_file(path)


def lost_array(folder: Path, shape: tuple[int, int]) -> Array:
    """Return zeros, float32, in a file without a name, which is gone when nobody uses it."""
    if not shape[0]:
        return np.zeros(shape, np.float32)
    with machine_errors("write", folder), tempfile.TemporaryFile(dir=folder) as file:
        # A full disk is told now; a map of a file with holes would end in a signal.
        os.posix_fallocate(file.fileno(), 0, 4 * shape[0] * shape[1])
        return np.memmap(file, np.float32, "r+", shape=shape)


def check_target(path: Path, fresh: bool) -> None:
    """Refuse a path to which no .npy file is to be written, before hours of work.

    Raises `UsageError` for what can be none, `TokmillError` for a file that is there, unless
    `fresh`.
    """
    if path.suffix != ".npy":
        raise UsageError(
            "vectors are written to an .npy file", where=str(path), hint="--npy vectors.npy"
        )
    with machine_errors("read", path):
        has_folder, is_folder, there = path.parent.is_dir(), path.is_dir(), path.exists()
    if not has_folder:
        raise UsageError("there is no such folder", where=str(path.parent), hint="make it first")
    if is_folder:
        raise UsageError("it is a folder", where=str(path), hint="name another file")
    if there and not fresh:
        raise TokmillError(
            "the file is there already",
            where=str(path),
            hint="name another file, or write over it with --fresh",
        )


def write_npy(source: EmbedSource, path: Path) -> int:
    """Write all vectors to a file, atomically; return the number of records without tokens.

    Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    base, empty = source.base, 0
    head = io.BytesIO()
    shape = (len(base), source.model.width)
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )

    def chunks() -> Iterator[bytes | memoryview]:
        nonlocal empty
        yield head.getvalue()
        for number in range(len(base.shards)):
            empty += int(np.count_nonzero(np.diff(base.shard(number)["offsets"]) == 0))
            found = source.empty(number, path.parent)
            for _ in source.fill(number, found):
                pass
            vectors = np.ascontiguousarray(found, "<f4")
            yield vectors.reshape(-1).view(np.uint8).data

    try:
        write_file(path, chunks())
    except KeyboardInterrupt:
        raise Interrupted(
            "it was interrupted, and no file was written",
            where=str(path),
            hint="without --npy an overlay is written, which goes on where it was stopped",
        ) from None
    return empty
