"""The loss of a run on any store, measured as the training loop measures it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tokmill.train.config import DataConfig
from tokmill.train.data import open_store
from tokmill.train.engine import make_engine
from tokmill.train.run import load_task, read_run
from tokmill.train.validation import open_validation
from tokmill.train.weights import step_of, weights_at


def evaluate(
    run: Path | str,
    store: Path | str,
    *,
    at: str = "",
    rows: int = 0,
    batch: int = 0,
    device: str = "auto",
    partial: bool = False,
) -> dict[str, Any]:
    """Return the loss of a run on a store, and what follows from it.

    Args:
        run: folder of a run.
        store: folder of a store with the run's vocabulary.
        at: which weights (`weights_at`): "", "last", "best" or a step.
        rows: evenly spaced rows that are taken; 0: all, every token once.
        batch: rows at a time; 0: as many as in a step of the run.
        device: cpu, cuda, or auto.
        partial: take a store whose build has not finished.

    Returns:
        run, store, fingerprint, step, rows, tokens (targets), and the task's metrics: loss in nats
        a token, perplexity, bits_per_byte where the store knows its bytes.

    Raises:
        TokmillError: there are no such weights, or the store's ids mean something else.
    """
    run, opened = Path(run), open_store(str(store), DataConfig(partial=partial))
    config, facts = read_run(run)
    task = load_task(run, at)
    validation = open_validation(opened, facts, task, batch=batch or config.data.batch, rows=rows)
    with make_engine(replace(config.run, device=device, engine="single", compile=False)) as engine:
        engine.prepare(task, config.optim)
        metrics, tokens = validation.measure(task, engine, config.run.micro_tokens)
    return {
        "run": str(run),
        "store": str(store),
        "fingerprint": opened.fingerprint,
        "step": step_of(weights_at(run, at)),
        "rows": validation.size,
        "tokens": tokens,
        **metrics,
    }
