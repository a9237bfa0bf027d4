"""Vectors of bytes that are in no store: machine code or text, as `tokmill embed` makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tokmill.base.errors import TokmillError, UsageError
from tokmill.inference.coders import Coder, load_coder
from tokmill.inference.embed import COLUMN, EmbedConfig, known_model, load_known
from tokmill.inference.embed import embed as make_overlay
from tokmill.inference.vectors import BATCH_TOKENS, Vectors, groups
from tokmill.models.pooling import Pool
from tokmill.store.schema import Array
from tokmill.store.store import Store
from tokmill.training.engines.devices.device import Precision, pick_device

Ids = dict[str, Array]
"""Column → the ids of one sequence."""


def embed(
    run: Path | str, store: Path | str, *, pool: Pool | Literal["auto"] = "auto", at: str = ""
) -> Array:
    """Return a vector of each record of a store, float32 (records, width).

    They are kept in the store as an overlay, so the next call only reads them. Arguments and errors
    are those of `tokmill.inference.embed.embed`.
    """
    made = make_overlay(run, store, pool=pool, at=at)
    return Store(store, [made.overlay]).column(COLUMN)


class Embedder:
    """The coder and the model of a run: bytes to ids, and ids to vectors.

    Args:
        run: folder of a run.
        pool: as of `embed`; auto: as the run was trained, else mean.
        at: which weights (`weights_at`).
        device: cpu, cuda, or auto.
        batch_tokens: positions that are read at a time; changes vectors only by rounding.

    Raises `TokmillError` if the run has no vocabularies or no such weights.
    """

    def __init__(
        self,
        run: Path | str,
        *,
        pool: str = "auto",
        at: str = "",
        device: str = "auto",
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        config = EmbedConfig(run=str(run), pool=pool, at=at)  # type: ignore[arg-type]
        model = known_model(config)
        task = load_known(config, model)
        self._load = partial(load_coder, model.run, model.facts, [*task.sizes])
        self._own = threading.local()
        if self.coder is None:
            raise TokmillError(
                "the run cannot read bytes: its store had no vocabulary for each column",
                where=str(run),
                hint="serve a run that was trained on a store of text or of x86 code",
            )
        self.run, self.step, self.pool = model.run, model.step, model.pool
        precision = Precision(model.precision, pick_device(device))
        self.vectors = Vectors(task, precision, model.pool, batch_tokens)
        self.vectors.frame = task.frame
        self.affixes = ({}, {}) if task.frame else (model.facts.prefix, model.facts.suffix)
        self.width = model.width

    @property
    def coder(self) -> Coder | None:
        """The coder of this thread: it keeps what it has encoded, and has no lock for that."""
        if not hasattr(self._own, "coder"):
            _, self._own.coder = self._load()
        coder: Coder | None = self._own.coder
        return coder

    def encode(self, data: bytes | str) -> Ids:
        """Return the ids of a sequence; raises `TokmillError` if it is not what the run reads.

        For a run on x86 code it is 64-bit instructions, in hexadecimal if it is a string; for one
        on text a string, or UTF-8.
        """
        assert self.coder is not None
        if isinstance(data, str):
            ids = self.coder.encode(data)
        else:
            ids = self.coder.encode_bytes(data)
        if not all(map(len, ids.values())):
            raise UsageError("it has no tokens", hint="send an instruction or a word")
        # As records of the training store; a frame is put around each segment later.
        prefix, suffix = self.affixes
        return {
            name: np.asarray([*prefix.get(name, ()), *values, *suffix.get(name, ())], np.int64)
            for name, values in ids.items()
        }

    def embed(self, sequences: Sequence[Ids], before: Callable[[], None] = lambda: None) -> Array:
        """Return the vectors of sequences of ids, float32 (n, width).

        `before` is called before each pass of the model, and may call `embed` itself.
        """
        lengths = np.asarray([len(next(iter(one.values()))) for one in sequences], np.int64)
        vectors = np.zeros((len(sequences), self.width), np.float32)
        for rows in groups(lengths, self.vectors.batch_tokens):
            here = lengths[rows]
            columns = {name: np.zeros((len(rows), int(here[0])), np.int64) for name in sequences[0]}
            for place, row in enumerate(rows.tolist()):
                for name, ids in sequences[row].items():
                    columns[name][place, : len(ids)] = ids
            with torch.no_grad():
                vectors[rows] = self.vectors.pooled(columns, here, before).float().cpu().numpy()
        return vectors
