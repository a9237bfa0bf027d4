"""Training, from top to bottom."""

from __future__ import annotations

import contextlib
import errno
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tokmill.errors import Interrupted, MachineError
from tokmill.feed.feed import Feed
from tokmill.progress import Progress, human_time
from tokmill.store.check import ShardCheck
from tokmill.tasks.task import Task
from tokmill.training.data import make_feed, open_stores, rows_a_step
from tokmill.training.engines.choose import make_engine
from tokmill.training.engines.engine import Engine
from tokmill.training.engines.optim import learning_rate
from tokmill.training.engines.reduce import add, most, over_processes
from tokmill.training.engines.rng import seed_random_states, set_torch_states, torch_states
from tokmill.training.flops import peak_flops
from tokmill.training.launch import one_a_machine, place
from tokmill.training.loader import Loader, Micro, evened
from tokmill.training.memory_budget import check_memory
from tokmill.training.meter import Meter
from tokmill.training.not_finite import PartLoss, not_finite
from tokmill.training.recipe.config import TrainConfig, notes, seconds
from tokmill.training.recipe.resolve import resolve, resume_command
from tokmill.training.runs import run as runs
from tokmill.training.runs.checkpoint import State, load_checkpoint, moves, save_checkpoint
from tokmill.training.runs.intact import newest_whole
from tokmill.training.runs.run import Run
from tokmill.training.runs.track import Tracker
from tokmill.training.runs.trackers import open_trackers
from tokmill.training.runs.warm_start import start_facts, start_from
from tokmill.training.runs.weights import AVERAGED, BEST, FINAL, drop_final, save_weights
from tokmill.training.stop import Stop
from tokmill.training.validation import Validation, validation_of

CHECKED = "checked.json"
"""In a run: which shards of its stores were right when they were read."""


def train(
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
        quiet: print nothing but notes on what is seldom meant in a recipe.

    Raises:
        Interrupted: a signal or the time limit came; a checkpoint was saved.
        UsageError: the recipe is wrong.
        TokmillError: the folder or a store was refused, or the loss is no number any more.
    """
    out = Path(out)
    with one_a_machine():
        config = resolve(recipe, out, options or {}, resume)
    with (
        make_engine(config.run, config.engine) as engine,
        Stop(seconds(config.run.max_time)) as stop,
        engine.lead(runs.open_run(out, config, resume)),
    ):
        stores = open_stores(config.data)
        facts = runs.facts_of(out, stores)
        newest = newest_whole(out, engine)
        start = Path(config.run.start) if config.run.start and not newest else None
        if start:
            facts = start_facts(start, facts)
        inputs = runs.inputs_of(config, facts)
        if engine.rank == 0:
            rows = rows_a_step(config.data, config.task.length, engine.world)
            check_memory(config, inputs, rows, engine.world, place().local_world)
        seed_random_states(config.run.seed)
        task = runs.make_task(config, inputs)
        if start:
            start_from(task, start, facts, config)
        feed = make_feed(config, task, stores, engine.world)
        validation = validation_of(config, facts, task)
        engine.prepare(task, config.optim)
        if engine.rank == 0:
            runs.begin(out, config, stores[0], facts, engine.files)
        state = load_checkpoint(newest, engine, config.run.seed) if newest else State()
        read = [*stores, *([validation.feed.sources[0].store] if validation else [])]
        # One of the processes that share a machine's files looks at them.
        watched = read if config.data.verify and place().local_rank == 0 else []
        with (
            say_how_to_go_on(out),
            open_trackers(out, config, state.step, engine.rank) as trackers,
            ShardCheck(watched, out / CHECKED if engine.rank == 0 else None) as check,
        ):
            Training(
                config, out, task, feed, validation, engine, state, trackers, stop, quiet, check
            ).run()
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
    check: ShardCheck

    def run(self) -> None:
        """Do the steps that are left; then write a checkpoint and the final weights."""
        run, state, engine = self.config.run, self.state, self.engine
        flops = self.task.flops_per_token(self.task.length)
        self.meter = Meter(state, run.steps, flops, peak_flops(run, engine.device) * engine.world)
        self.loss, self.saved = math.nan, state.step or -1
        self.greet()
        progress = Progress(
            "train",
            run.steps,
            unit="steps",
            done=state.step,
            extra=lambda: f"loss {self.loss:.4f}{self.meter.line()}",
            quiet=self.quiet or engine.rank > 0,
        )
        rest = range(state.step, run.steps)
        loader = Loader(
            self.feed,
            self.task,
            rest,
            engine.rank,
            engine.world,
            micro_tokens=run.micro_tokens,
            device=engine.device,
            ahead=run.prefetch,
            trim=not run.compile,  # each shape would be compiled for itself
        )
        with loader, progress:
            while state.step < run.steps:
                parts, count = loader.next()
                self.check.tell()
                total, stopping = engine.total([count, bool(self.stop.reason)])
                if stopping:
                    self.interrupt()
                self.step(evened(self.task, parts, most(engine, len(parts))), int(total))
                progress.advance(1)
                last = state.step == run.steps
                if state.step % run.log_every == 0 or state.step == 1 or last:
                    self.log_step()
                if self.validation and (last or due(state.step, run.eval_every)):
                    self.evaluate(self.validation)
                if last or due(state.step, run.checkpoint_every):
                    self.save()
        self.check.finish()
        if self.engine.average:
            with self.engine.averaged():
                self.write(AVERAGED)
        self.write(FINAL)

    def greet(self) -> None:
        """Say how the run begins, and put away final weights that will not be final any more."""
        steps, state = self.config.run.steps, self.state
        if state.step >= steps:
            self.say("the run is finished: nothing is left to do")
        elif state.step:
            self.say(f"continues from its checkpoint{moves(state, self.engine)}")
        if state.step < steps and self.engine.rank == 0:
            drop_final(self.out)
            for note in () if state.step else notes(self.config):
                print(f"note: {note}", file=sys.stderr)

    def step(self, parts: list[Micro], total: int) -> None:
        """Learn from one batch, whose loss counts `total` targets over all processes."""
        self.lr = learning_rate(self.config.optim, self.state.step, self.config.run.steps)
        sums: dict[str, Tensor] = {}
        losses: list[PartLoss] = []
        self.random = torch_states()
        for number, part in enumerate(parts, 1):
            made = self.engine.micro(part.tensors, number == len(parts), 1 / max(total, 1))
            losses.append((part.entries, made["loss"]))
            add(sums, made)
        skipped = self.engine.skipped
        self.norm = self.engine.step(self.lr)
        self.sums, self.count = over_processes(self.engine, sums), total
        self.loss = self.sums["loss"] / max(total, 1)
        overflowed = self.engine.skipped > skipped
        if not (math.isfinite(self.loss) and (overflowed or math.isfinite(self.norm))):
            self.refuse(losses)
        self.state.step += 1
        self.state.tokens += total

    def refuse(self, losses: list[PartLoss]) -> None:
        """Leave with the weights as they were before a step that is not finite."""
        step, run = self.state.step, str(self.out)
        error = not_finite(self.feed, self.task, self.engine, step, self.norm, losses, run)
        set_torch_states(self.random)
        self.save()
        raise error

    def log_step(self) -> None:
        """Write the metrics of the last step."""
        report = self.task.report(self.sums, self.count)
        if self.config.run.precision == "fp16":
            report["skipped_steps"] = self.engine.skipped
        self.log({**report, "lr": self.lr, "grad_norm": self.norm, **self.meter.report()})

    def evaluate(self, validation: Validation) -> None:
        """Measure the loss on the validation store, of the average too; keep the best weights."""
        with self.meter.aside():
            report = self.measure(validation)
            if self.engine.average:
                with self.engine.averaged():
                    found = self.measure(validation)
                report |= {f"{name}_ema": value for name, value in found.items()}
            self.log({f"val_{name}": value for name, value in report.items()})
            best = math.inf if self.state.best_loss is None else self.state.best_loss
            if self.config.run.best and report["loss"] < best:
                self.state.best_step, self.state.best_loss = self.state.step, report["loss"]
                self.write(BEST, report["loss"])
        self.say("validation " + ", ".join(f"{name} {value:.4f}" for name, value in report.items()))

    def measure(self, validation: Validation) -> dict[str, float]:
        """Return the metrics of the weights as they are now on the validation store."""
        return validation.measure(self.task, self.engine, self.config.run.micro_tokens)[0]

    def write(self, name: str, loss: float | None = None) -> None:
        """Write the weights as they are now under a name in the run."""
        weights = self.engine.weights()
        if self.engine.rank == 0:
            save_weights(self.out / name, self.task, self.config, self.state.step, loss, weights)

    def log(self, values: Mapping[str, float]) -> None:
        """Hand metrics of the last step to all trackers."""
        for tracker in self.trackers:
            tracker.log(self.state.step, values)

    def save(self) -> None:
        """Write a checkpoint, if there is none of this step."""
        if self.saved != self.state.step:
            self.state.seconds = self.meter.seconds
            with self.meter.aside():
                save_checkpoint(self.out, self.engine, self.state, self.config.run.keep)
            self.saved = self.state.step

    def interrupt(self) -> None:
        """Save, and leave with exit code 3."""
        self.save()
        raise Interrupted(
            f"stopped by {self.stop.reason or 'another process'} at step {self.state.step} of "
            f"{self.config.run.steps}; checkpoint saved",
            where=str(self.out),
            hint=f"`{resume_command(self.out)}` continues",
        )

    def say(self, text: str) -> None:
        """Print talk to stderr."""
        if not self.quiet and self.engine.rank == 0:
            spent = human_time(self.meter.seconds)
            print(f"step {self.state.step}: {text} ({spent})", file=sys.stderr)


@contextlib.contextmanager
def say_how_to_go_on(out: Path) -> Iterator[None]:
    """Where a disk is full, name the command that goes on once there is room."""
    try:
        yield
    except MachineError as error:
        number = error.__cause__.errno if isinstance(error.__cause__, OSError) else 0
        if number not in (errno.ENOSPC, errno.EDQUOT):
            raise
        hint = f"free some space, then `{resume_command(out)}` continues from the newest checkpoint"
        raise MachineError(error.what, where=error.where, hint=hint) from error


def due(step: int, every: int) -> bool:
    """Say whether something that comes every so many steps comes now; 0: never."""
    return every > 0 and step % every == 0
