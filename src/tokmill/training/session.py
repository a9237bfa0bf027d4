"""A training from start to end: all that every training needs, whatever it learns from.

A session has the folder and its lock, an engine, the task, checkpoints, trackers, the clock and
the conditions to stop. The data of each step come from a loop (`plugins.LOOPS`): rows of stores
(`loop.py`), or an environment that the task acts in.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from tokmill import plugins
from tokmill.base.errors import Interrupted, TokmillError
from tokmill.base.files import append_line
from tokmill.base.progress import Progress, human_facts, human_metric, human_time
from tokmill.base.stop import Stop
from tokmill.models.model import Inputs
from tokmill.tasks.task import Task
from tokmill.training.budget.memory import check_memory
from tokmill.training.data import Micro, PartLoss, open_stores, with_epochs
from tokmill.training.engines.compared_step import compare_step
from tokmill.training.engines.devices.device import (
    seed_random_states,
    set_torch_states,
    torch_states,
)
from tokmill.training.engines.engine import Engine, add, make_engine, over_processes
from tokmill.training.engines.optimisers.optim import learning_rate
from tokmill.training.launch import one_error_per_machine, place, resume_command
from tokmill.training.recipe.config import MOST_STEPS, TrainConfig
from tokmill.training.recipe.resolve import notes, resolve, seconds
from tokmill.training.runs import run as runs
from tokmill.training.runs.checkpoint import (
    State,
    check_shared,
    load_checkpoint,
    moves,
    newest_whole,
    save_checkpoint,
)
from tokmill.training.runs.run import Run
from tokmill.training.runs.trackers import (
    METRICS,
    SESSIONS,
    Meter,
    Tracker,
    open_trackers,
    rows_by_step,
)
from tokmill.training.runs.weights import (
    BEST,
    FINAL,
    drop_final,
    save_weights,
    start_facts,
    start_from,
    step_of,
)


class Loop(Protocol):
    """The source of a session's data, step after step. Every process has one.

    Its arguments are the recipe, the task, the stores (none, if it reads none), their facts, the
    engine and the run's folder. It is made before the engine gets the task.
    """

    reads_stores: ClassVar[bool]
    unit: ClassVar[str]
    """What `next` counts, for the line of progress: tokens, for instance."""
    evaluates: bool
    """Whether there is something to `measure`."""
    environment: Mapping[str, Any]
    """What `check` returns."""
    notes: Sequence[str]
    """What is printed when a run begins."""

    @staticmethod
    def rows_a_step(config: TrainConfig, world: int) -> int:
        """Return the rows of a step over all processes, for an estimate of the memory."""
        ...

    @staticmethod
    def check(config: TrainConfig) -> Mapping[str, Any]:
        """Raise `TokmillError` for what a recipe names besides stores and cannot be used.

        `--dry-run` calls it; nothing is written. Returns what is known of the environment that
        takes the place of stores, for people: names and numbers, with shares as floats.
        """
        ...

    def steps(self, steps: range) -> AbstractContextManager[None]:
        """Return a context in which these steps are done."""
        ...

    def next(self) -> tuple[float, float]:
        """Get ready for a step.

        Returns this process's part of what the loss is divided by, and of the tokens that are read
        (or moves that are made), for the speed.

        The run may be stopped between this and `learn`, so nothing may change here that a
        checkpoint keeps.
        """
        ...

    def learn(self, session: Session, total: int) -> tuple[dict[str, float], int]:
        """Do a step, with `Session.update` once or several times.

        total: the first that `next` returned, summed over all processes. Returns the arguments of
        `Task.report`: sums over all processes, and what they count.
        """
        ...

    def not_finite(self, step: int, norm: float, losses: Sequence[PartLoss]) -> TokmillError:
        """Return the error of an update that is not finite; every process calls this."""
        ...

    def measure(self, quiet: bool) -> dict[str, float]:
        """Return the metrics of an evaluation, `loss` among them, with the weights as they are.

        quiet: show no progress.
        """
        ...


def train(
    recipe: Path | str | Mapping[str, Any] | None,
    out: Path | str,
    *,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Run:
    """Train a model and return its run.

    Args:
        recipe: a TOML file, the folder of a store (all else default), or a recipe as nested dicts;
            None: that of the run in `out`.
        out: folder of the run; a run that lies there is continued from its newest checkpoint.
        options: nested dicts over the recipe, such as `{"run": {"steps": 100}}`; `settings` may
            list files of settings in JSON, which go below the others.
        quiet: print nothing but notes on doubtful settings of the recipe.

    Raises:
        Interrupted: a signal or the time limit came; a checkpoint was saved.
        UsageError: the recipe is wrong.
        TokmillError: the folder or a store was refused, or the loss is not a number any more.
    """
    out = Path(out)
    with one_error_per_machine():
        world = place().world
        config = with_epochs(asked := resolve(recipe, out, options or {}, world), world)
    until = time.monotonic() + seconds(config.run.max_time)
    with (
        make_engine(config.run, config.engine) as engine,
        Stop(until, ends_at_second=place().world == 1) as stop,
        engine.lead(runs.open_run(out, config)),
    ):
        if engine.world > 1:
            check_shared(out, engine)
        kind: Any = plugins.load(plugins.LOOPS, runs.task_type(config).loop)
        stores = open_stores(config.data) if kind.reads_stores else []
        facts = runs.facts_of(out, config, stores)
        newest = newest_whole(out, engine)
        start = Path(config.run.start) if config.run.start and not newest else None
        if start:
            facts = start_facts(start, facts)
        inputs = runs.inputs_of(config, facts)
        if engine.rank == 0:
            check_size(config, inputs, kind.rows_a_step(config, engine.world), engine, asked)
        seed_random_states(config.run.seed)
        task = runs.make_task(config, inputs)
        if start:
            for note in start_from(task, start, facts, config):
                say_once(engine, note)
        loop: Loop = kind(config, task, stores, facts, engine, out)
        engine.prepare(task, config.optim)
        if engine.rank == 0:
            runs.begin(out, config, stores, facts, engine.files)
        state = load_checkpoint(newest, engine, config.run.seed, task) if newest else State()
        tracking = open_trackers(out, config, state.step, engine.rank)
        with tracking as trackers:
            Session(config, out, task, loop, engine, state, trackers, stop, quiet).run()
        return Run(out, state.step, runs.last_metrics(out))


def check_size(
    config: TrainConfig, inputs: Inputs, rows: int, engine: Engine, asked: TrainConfig
) -> None:
    """Refuse what does not fit into memory; say where the epochs end a run before its steps."""
    check_memory(config, inputs, rows, engine.world, place().local_world)
    if config.run.steps < asked.run.steps < MOST_STEPS:
        end = f"run.epochs = {config.run.epochs:g} end the run after {config.run.steps:,} steps"
        say_once(engine, f"{end}, before run.steps = {asked.run.steps:,}")


MOST_SHOWN = 6
"""Metrics of an evaluation in its line of progress."""


@dataclass
class Session:
    """An open training: all that its steps need."""

    config: TrainConfig
    out: Path
    task: Task
    loop: Loop
    engine: Engine
    state: State
    trackers: list[Tracker]
    stop: Stop
    quiet: bool

    def run(self) -> None:
        """Do the steps that are left; then write a checkpoint and the final weights."""
        run, state, engine = self.config.run, self.state, self.engine
        flops = self.task.flops_per_token(self.task.length)
        peak = run.peak_flops * engine.world
        self.meter = Meter(state, run.steps, flops, peak, self.loop.unit)
        self.loss, self.saved = math.nan, state.step or -1
        self.print_start()
        progress = Progress(
            "train",
            run.steps,
            unit="steps",
            done=state.step,
            extra=lambda: f"loss {self.loss:.4f}{self.meter.line()}",
            quiet=self.quiet or engine.rank > 0,
        )
        with self.loop.steps(range(state.step, run.steps)), progress:
            while state.step < run.steps:
                count, read = self.loop.next()
                total, stopping, read = engine.total([count, bool(self.stop.reason), read])
                if stopping:
                    self.interrupt()
                self.step(int(total))
                self.meter.read += int(read)
                progress.advance(1)
                last = state.step == run.steps
                if state.step % run.log_every == 0 or state.step == 1 or last:
                    self.log_step()
                if self.loop.evaluates and (last or due(state.step, run.eval_every)):
                    self.evaluate()
                if last or due(state.step, run.checkpoint_every):
                    self.save()
        self.write(FINAL)

    def print_start(self) -> None:
        """Say how the run begins, and remove final weights if more steps follow."""
        steps, state = self.config.run.steps, self.state
        if state.step >= steps:
            self.say("the run is finished")
        elif state.step:
            self.say(f"resumes from its checkpoint{moves(state, self.engine)}")
        if state.step < steps and self.engine.rank == 0:
            session: dict[str, Any] = {"step": state.step, "processes": self.engine.world}
            if on := getattr(self.loop, "validated_on", ""):
                session["validation"] = on
            append_line(self.out / SESSIONS, json.dumps(session).encode())
            if self.loop.evaluates:
                self.find_best(session.get("validation"))
            drop_final(self.out)
            for note in () if state.step else (*notes(self.config), *self.loop.notes):
                say_once(self.engine, note)
        found = (state.best_step, state.best_loss or 0.0) if self.engine.rank == 0 else (0, 0.0)
        step, loss = self.engine.total(found)
        state.best_step, state.best_loss = int(step), loss if step else None
        if not state.step and self.loop.environment:
            shown = human_facts(self.loop.environment)
            self.say("; ".join(f"{name}: {value}" for name, value in shown.items()))

    def find_best(self, rows: str | None) -> None:
        """Forget the best weights of other validation rows; those of these rows may be kept."""
        state, rows_at, kept = self.state, rows_by_step(self.out), 0
        losses = {
            int(entry["step"]): entry["val_loss"]
            for entry in runs.metrics_of(self.out)
            if entry.get("val_loss") is not None and rows_at(int(entry["step"])) == rows
        }
        if state.best_step not in losses:
            with suppress(TokmillError):
                kept = step_of(self.out / BEST)
            is_best = kept == min(losses, key=losses.__getitem__, default=0)
            state.best_step, state.best_loss = (kept, losses.get(kept)) if is_best else (0, None)

    def step(self, total: int) -> None:
        """Do a step, whose loss counts `total` targets over all processes."""
        self.lr = learning_rate(self.config.optim, self.state.step, self.config.run.steps)
        self.random, self.extra, self.changed = torch_states(), self.task.extra_state(), False
        self.sums, self.count = self.loop.learn(self, total)
        self.state.step += 1
        self.state.tokens += total

    def update(self, parts: Sequence[Micro], total: int) -> dict[str, float]:
        """Change the weights once, by a loss that counts `total` targets over all processes.

        `parts`: the micro-batches of this process, as many in each. Returns the task's sums over
        all processes.
        """
        sums, losses = self.gradients(parts, 1 / max(total, 1))
        self.norm = self.engine.step(self.lr)
        summed = over_processes(self.engine, sums)
        self.loss = summed["loss"] / max(total, 1)
        if not (math.isfinite(self.loss) and math.isfinite(self.norm)):
            self.refuse(losses)
        self.changed = True
        return summed

    def gradients(
        self, parts: Sequence[Micro], scale: float
    ) -> tuple[dict[str, Tensor], list[PartLoss]]:
        """Run forward and backward; return the task's sums, and the loss of each micro-batch."""
        if self.task.compares:
            sums = compare_step(self.engine, self.task, [one.tensors for one in parts], scale)
            return sums, [(np.concatenate([one.entries for one in parts]), sums["loss"])]
        sums, losses = {}, []
        for number, part in enumerate(parts, 1):
            sums_of_part = self.engine.micro(part.tensors, number == len(parts), scale)
            losses.append((part.entries, sums_of_part["loss"]))
            add(sums, sums_of_part)
        return sums, losses

    def refuse(self, losses: Sequence[PartLoss]) -> None:
        """Raise the error of an update that is not finite; save the state from before it."""
        error = self.loop.not_finite(self.state.step, self.norm, losses)
        if not self.changed:
            # A checkpoint is never taken in the middle of a step.
            set_torch_states(self.random)
            self.task.load_extra_state(self.extra)
            self.save()
        raise error

    def log_step(self) -> None:
        report = self.task.report(self.sums, self.count) if self.count else {}
        self.log({**report, "lr": self.lr, "grad_norm": self.norm, **self.meter.report()})

    def evaluate(self) -> None:
        """Measure the weights; keep the best ones."""
        with self.meter.aside():
            report = self.loop.measure(self.quiet or self.engine.rank > 0)
            self.log({f"val_{name}": value for name, value in report.items()})
            best = math.inf if self.state.best_loss is None else self.state.best_loss
            if self.config.run.best and report["loss"] < best:
                self.state.best_step, self.state.best_loss = self.state.step, report["loss"]
                self.write(BEST, report["loss"])
        self.say(f"validation {in_a_line(report)}")

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
                save_checkpoint(self.out, self.engine, self.state, self.config.run.keep, self.task)
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
        """Print a line of progress on stderr."""
        if not self.quiet and self.engine.rank == 0:
            spent = human_time(self.meter.seconds)
            print(f"step {self.state.step}: {text} ({spent})", file=sys.stderr)


def say_once(engine: Engine, note: str) -> None:
    """Print a note on stderr in the first process, in quiet runs too."""
    if engine.rank == 0:
        print(f"note: {note}", file=sys.stderr)


def in_a_line(metrics: Mapping[str, float]) -> str:
    """Return the first metrics as text, fractions to 4 places, and how many more there are."""
    shown = [f"{name} {human_metric(value)}" for name, value in list(metrics.items())[:MOST_SHOWN]]
    more = len(metrics) - len(shown)
    return ", ".join(shown) + (f", and {more} more in {METRICS}" if more else "")


def due(step: int, every: int) -> bool:
    """Say whether something that is done every `every` steps is due; 0: never."""
    return every > 0 and step % every == 0
