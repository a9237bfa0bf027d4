"""Training, from top to bottom."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tokmill.errors import Interrupted, TokmillError
from tokmill.feed.feed import Batch, Feed
from tokmill.progress import Progress, human_time
from tokmill.tasks.task import Task
from tokmill.train import run as runs
from tokmill.train.checkpoint import (
    State,
    checkpoints,
    load_checkpoint,
    machine,
    save_checkpoint,
)
from tokmill.train.config import TrainConfig, seconds
from tokmill.train.data import make_feed, open_stores
from tokmill.train.engine import Engine, make_engine
from tokmill.train.loader import Loader, micro_batches
from tokmill.train.optim import learning_rate
from tokmill.train.resolve import resolve, resume_command
from tokmill.train.rng import seed_random_states
from tokmill.train.run import Run, save_final
from tokmill.train.stop import Stop
from tokmill.train.track import JsonLines, Tracker
from tokmill.train.validation import Validation, open_validation


def train_model(
    recipe: Path | str | Mapping[str, Any] | None,
    out: Path | str,
    *,
    options: Mapping[str, Any] | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Train a model and return its run.

    Args:
        recipe: a TOML file, the folder of a store (all else default), or a recipe as nested dicts;
            None with `resume`: the run's own.
        out: folder of the run.
        options: nested dicts over the recipe, such as `{"run": {"steps": 100}}`.
        resume: continue the run in `out` from its newest checkpoint; begin where there is none.
        quiet: print nothing.

    Raises:
        Interrupted: a signal or the time limit came; a checkpoint was saved.
        UsageError: the recipe is wrong.
        TokmillError: the folder or a store was refused, or the loss is no number any more.
    """
    out = Path(out)
    config = resolve(recipe, out, options or {}, resume)
    with Stop(seconds(config.run.max_time)) as stop, runs.open_run(out, config, resume):
        stores = open_stores(config.data)
        facts = runs.facts_of(out, stores)
        seed_random_states(config.run.seed)
        task = runs.make_task(config, facts.columns)
        feed = make_feed(config, task, stores, list(facts.columns))
        validation = open_validation(config, facts, task)
        engine = make_engine(config.run)
        engine.prepare(task, config.optim)
        runs.begin(out, config, stores[0], facts)
        state, metrics = State(), JsonLines(out)
        for newest in checkpoints(out)[-1:]:
            state = load_checkpoint(newest, engine)
        metrics.forget_after(state.step)
        Training(config, out, task, feed, validation, engine, state, [metrics], stop, quiet).run()
        engine.finish()
        return Run(out, state.step, runs.last_metrics(out))


@dataclass
class Training:
    """All that a step needs."""

    config: TrainConfig
    out: Path
    task: Task
    feed: Feed
    validation: Validation | None
    engine: Engine
    state: State
    trackers: list[Tracker]
    stop: Stop
    quiet: bool

    def run(self) -> None:
        """Do the steps that are left; then write a checkpoint and the final weights."""
        run, state, engine = self.config.run, self.state, self.engine
        self.loss, self.saved, self.seconds_before = math.nan, state.step or -1, state.seconds
        self.started = self.logged_at = time.monotonic()
        self.logged_tokens = state.tokens
        if state.step >= run.steps:
            self.say("the run is finished: nothing is left to do")
        elif state.step:
            before, now = state.machine, machine(engine)
            rounding = "" if before == now else f" (was {before}, is {now}: equal up to rounding)"
            self.say(f"continues from its checkpoint{rounding}")
        progress = Progress(
            "train",
            run.steps,
            unit="steps",
            done=state.step,
            extra=lambda: f"loss {self.loss:.4f}",
            quiet=self.quiet or engine.rank > 0,
        )
        rest = range(state.step, run.steps)
        loader = Loader(self.feed, self.task, rest, engine.rank, engine.world, ahead=run.prefetch)
        with loader, progress:
            while state.step < run.steps:
                batch, count = loader.next()
                total, stopping = engine.total([count, bool(self.stop.reason)])
                if stopping:
                    self.interrupt()
                self.step(batch, int(total))
                progress.advance(1)
                last = state.step == run.steps
                if state.step % run.log_every == 0 or state.step == 1 or last:
                    self.log_step()
                if self.validation and (last or due(state.step, run.eval_every)):
                    self.evaluate(self.validation)
                if last or due(state.step, run.checkpoint_every):
                    self.save()
        if engine.rank == 0:
            save_final(self.out, self.task, self.config, state.step)

    def step(self, batch: Batch, total: int) -> None:
        """Learn from one batch, whose loss counts `total` targets over all processes."""
        self.lr = learning_rate(self.config.optim, self.state.step, self.config.run.steps)
        sums: dict[str, Tensor] = {}
        parts = list(micro_batches(batch, self.config.run.micro_tokens))
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            add(sums, self.engine.micro(part, last, 1 / max(total, 1)))
        self.norm = self.engine.step(self.lr)
        self.sums, self.count = self.add_up(sums), total
        self.loss = self.sums["loss"] / max(total, 1)
        if not (math.isfinite(self.norm) and math.isfinite(self.loss)):
            self.refuse_nan()
        self.state.step += 1
        self.state.tokens += total

    def add_up(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return a task's sums over all processes as numbers."""
        values = self.engine.total([value.item() for value in sums.values()])
        return dict(zip(sums, values, strict=True))

    def log_step(self) -> None:
        """Write the metrics of the last step."""
        now = time.monotonic()
        self.count_seconds()
        rate = (self.state.tokens - self.logged_tokens) / max(now - self.logged_at, 1e-9)
        self.logged_at, self.logged_tokens = now, self.state.tokens
        self.log(
            {
                **self.task.report(self.sums, self.count),
                "lr": self.lr,
                "grad_norm": self.norm,
                "tokens": self.state.tokens,
                "tokens_per_second": round(rate, 1),
                "seconds": round(self.state.seconds, 3),
            }
        )

    def evaluate(self, validation: Validation) -> None:
        """Measure the loss on rows of the validation store; each process takes its part."""
        sums: dict[str, Tensor] = {}
        count = 0
        for batch in validation.batches(self.task, self.engine.rank, self.engine.world):
            count += self.task.count(batch)
            for part in micro_batches(batch, self.config.run.micro_tokens):
                add(sums, self.engine.evaluate(part))
        total = self.engine.total([count])[0]
        report = self.task.report(self.add_up(sums), total, validation.bytes_per_token)
        self.log({f"val_{name}": value for name, value in report.items()})
        self.say("validation " + ", ".join(f"{name} {value:.4f}" for name, value in report.items()))

    def log(self, values: Mapping[str, float]) -> None:
        """Hand metrics of the last step to all trackers."""
        if self.engine.rank == 0:
            for tracker in self.trackers:
                tracker.log(self.state.step, values)

    def save(self) -> None:
        """Write a checkpoint, if there is none of this step."""
        if self.saved != self.state.step:
            self.count_seconds()
            save_checkpoint(self.out, self.engine, self.state, self.config.run.keep)
            self.saved = self.state.step

    def count_seconds(self) -> None:
        """Bring the time spent up to date."""
        self.state.seconds = self.seconds_before + time.monotonic() - self.started

    def interrupt(self) -> None:
        """Save, and leave with exit code 3."""
        self.save()
        raise Interrupted(
            f"stopped by {self.stop.reason or 'another process'} at step {self.state.step} of "
            f"{self.config.run.steps}; checkpoint saved",
            where=str(self.out),
            hint=f"`{resume_command(self.out)}` continues",
        )

    def refuse_nan(self) -> None:
        """Leave with the weights as they were before this step."""
        epoch, rows = self.feed.rows_of(self.state.step, self.engine.rank, self.engine.world)
        named = ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
        raise TokmillError(
            f"the loss is {self.loss} and the gradient's norm {self.norm} at step "
            f"{self.state.step} (epoch {epoch[0]}, rows {named})",
            where=str(self.out),
            hint="a smaller optim.lr or a longer optim.warmup helps most often; "
            "the last checkpoint is from before",
        )

    def say(self, text: str) -> None:
        """Print talk to stderr."""
        if not self.quiet and self.engine.rank == 0:
            spent = human_time(self.seconds_before + time.monotonic() - self.started)
            print(f"step {self.state.step}: {text} ({spent})", file=sys.stderr)


def add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add sums by name, on the device."""
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def due(step: int, every: int) -> bool:
    """Say whether something that comes every so many steps comes now; 0: never."""
    return every > 0 and step % every == 0
