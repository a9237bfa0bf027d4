"""Schedules of small modules: PPO with each embedding beside searches, at equal evaluations.

    python benchmarks/schedules.py CACHE [--small] [--minutes N] [--space iree]

A policy learns from the modules of its recipe with so many evaluations a module as each search
gets; a result of the cache, which all share, counts as one for all alike. Then it schedules the
held-out ones, which it has never seen: without any measurement, and as the best of some. Searches
begin anew for each
module. The best schedule of every contestant is measured again in a fresh process, and what gives
no result counts as 1. All times are CPU times of one thread; means are geometric. What a contestant
has found is kept in CACHE/schedules: a benchmark that was ended, or had `--minutes`, goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import schedule_peers
import tokmill
from tokmill.mlir import search
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import problem as problems
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.space import Space, space_called
from tokmill.recipe import merge, read_toml
from tokmill.report.interval import mean_interval
from tokmill.rl import evaluate, loop
from tokmill.rl.task import SchedulesConfig
from tokmill.training.runs.run import load_task
from tokmill.training.runs.track import METRICS, read_metrics

PRETRAINED = {"PPO, DistilBERT, pre-trained"}
"""Those that begin with an encoder of the task masked."""


class Effort(NamedTuple):
    """How much is measured."""

    budget: int
    """Evaluations a module that is learned from."""
    tried: int
    """Evaluations of a held-out module."""
    seeds: tuple[int, ...]


class Contest(NamedTuple):
    """Who searches what."""

    name: str
    """Space of schedules."""
    recipes: dict[str, str]
    """Policy → its recipe; the modules are those of the first one."""
    effort: Effort
    base: str
    """What a schedule is compared with."""

    @property
    def modules(self) -> list[str]:
        """Return the modules that are learned from."""
        return list(self._task["modules"])

    @property
    def held_out(self) -> list[str]:
        """Return those that are not."""
        return list(self._task["held_out"])

    @property
    def _task(self) -> Any:
        return read_toml(next(iter(self.recipes.values())))["task"]

    def measure(self, cache: Path, space: Space | None = None) -> Measurements:
        """Return the measurements that all share; a policy has a `space` of its own."""
        settings = loop.settings_of(SchedulesConfig())
        return Measurements(settings, self.place(cache), space or space_called(self.name))

    def place(self, cache: Path) -> Path:
        """Return the file of these measurements."""
        return self.folder(cache) / "measurements.sqlite"

    def folder(self, cache: Path) -> Path:
        """Return where what is found is kept."""
        return cache / ("schedules" if self.name == "loops" else f"schedules-{self.name}")


WHOLE, SMALL = Effort(64, 16, (0, 1, 2)), Effort(24, 8, (0,))
LOOPS = Contest(
    "loops",
    {
        "PPO, LSTM": "schedules-lstm",
        "PPO, DistilBERT": "schedules-distilbert",
        "PPO, DistilBERT, pre-trained": "schedules-distilbert",
        "PPO, loop transformer": "schedules-loop-transformer",
    },
    WHOLE,
    "without a schedule",
)
IREE = Contest(
    "iree",
    {
        "PPO, LSTM": "schedules-iree",
        "PPO, DistilBERT": "schedules-iree-distilbert",
        "PPO, loop transformer": "schedules-iree-loop-transformer",
    },
    Effort(24, 8, (0, 1, 2)),
    "by IREE's default",
)
"""A compilation takes half a second and more, so less is tried."""
CONTESTS = {one.name: one for one in (LOOPS, IREE)}
POINTS = (8, 16, 24, 64)
"""Evaluations a module of the points of curves."""
RATIOS = (1.05, 1.25, 1.5, 2.0)
"""Of the performance profile: how many times slower than the best contestant."""
ENCODER_STEPS, ENCODER_SCHEDULES = 400, 100
RULE = 2
"""Of how gains are confirmed: what was kept by another one is measured again."""


class Found(NamedTuple):
    """What a contestant found with one seed: gains, a module each."""

    trained: list[float]
    """Of the best schedule of each learned module, measured again."""
    held: list[float]
    """The same of each held-out one."""
    zero: list[float]
    """Of a policy's schedule of each held-out one before anything was measured; [] of a search."""
    curve: list[float]
    """Geometric mean of the best so far of the learned modules, by evaluations of each."""
    seconds: float
    """CPU seconds of its own, without those of compiling and running."""


Table = dict[str, list[Found]]
"""Contestant → what it found, for each seed."""


def mean(gains: Sequence[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(gains))))


def gain(result: Any) -> float:
    """Return a speed-up; 1 for what gave no result, as the module without a schedule would run."""
    return result.gain if result.status == "ok" else 1.0


def searched(
    one: Problem, name: str, measure: Measurements, budget: int, seed: int
) -> tuple[float, list[float]]:
    """Return the gain of a search, measured again, and the best so far after each evaluation."""
    tried = list(search.SEARCHES[name](one, measure, budget, seed))
    best = max(tried, key=search.score)
    found = [max(1.0, gain(trial.result)) for trial in tried]
    final = confirmed(one, best.schedule, measure) if gain(best.result) > 1 else 1.0
    return final, np.maximum.accumulate(found).tolist()


def learned(contest: Contest, name: str, seed: int, cache: Path, start: str) -> Found:
    """Train a policy with as many evaluations a module as searches get, and evaluate it.

    A step has two evaluations of each module.
    """
    recipe, count, effort = contest.recipes[name], 2 * len(contest.modules), contest.effort
    place = str(contest.place(cache))
    value = merge(
        read_toml(recipe),
        {
            "task": {"cache": place, "bench_count": count, "held_out": []},
            "data": {"seed": seed},
            "run": {
                "seed": seed, "steps": effort.budget // 2, "checkpoint_every": 0, "log_every": 1,
                "start": start,
            },
        },
    )  # fmt: skip
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        run = tokmill.train(value, Path(scratch) / "run", quiet=True).path
        rows = [entry for entry in read_metrics(run / METRICS) if "reward" in entry]
        task: Any = load_task(run)
        kept = json.loads((run / loop.BEST).read_bytes())
    seconds = time.process_time() - begun
    with contest.measure(cache, task.space) as measure:
        best = [best_of(kept, problems.of_line(line), measure) for line in contest.modules]
        others = [problems.of_line(line) for line in contest.held_out]
        found = evaluate.evaluate(task, others, measure, effort.tried - 1, seed)
    return Found(
        trained=best,
        held=[max(1.0, one.best.gain) for one in found],
        zero=[one.first.gain for one in found],
        curve=[entry["best_speedup"] for entry in rows for _ in range(2)],
        seconds=seconds,
    )


def searching(contest: Contest, name: str, seed: int, cache: Path) -> Found:
    """Search schedules of all modules."""
    begun, effort = time.process_time(), contest.effort
    with contest.measure(cache) as measure:
        pairs, held = (
            [searched(problems.of_line(line), name, measure, budget, seed) for line in lines]
            for lines, budget in (
                (contest.modules, effort.budget),
                (contest.held_out, effort.tried),
            )
        )
    return Found(
        trained=[max(1.0, one) for one, _ in pairs],
        held=[max(1.0, one) for one, _ in held],
        zero=[],
        curve=curve_of([curve for _, curve in pairs]),
        seconds=time.process_time() - begun,
    )


def encoder(contest: Contest, cache: Path) -> str:
    """Return a run of the task masked on the learned modules in the middle of random schedules."""
    store, run = (contest.folder(cache) / name for name in ("operations", "encoder"))
    command = [sys.executable, "-m", "tokmill"]
    if not store.exists():
        words = [*contest.modules, "--schedules", str(ENCODER_SCHEDULES), "-o", str(store)]
        subprocess.run([*command, "build", "mlir", *words], check=True)
    if not run.exists():
        words = ["--data", str(store), "-o", str(run), "--steps", str(ENCODER_STEPS)]
        subprocess.run([*command, "train", "mlir-fields", *words], check=True)
    return str(run)


def curve_of(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean over modules after each evaluation a module."""
    return [mean(column) for column in zip(*curves, strict=True)]


def compare(contest: Contest, cache: Path, minutes: float) -> Table:
    """Return what all contestants find; ends the process after so many minutes."""
    ends, effort = time.monotonic() + 60 * minutes, contest.effort
    kept = contest.folder(cache) / "contests.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(kept.read_text()) if kept.exists() else {}
    table: Table = {}
    for seed in effort.seeds:
        for name in (*contest.recipes, *search.SEARCHES):
            made = digest(contest, name)
            key = f"{name}, seed {seed}, {effort.budget} and {effort.tried}, {made}"
            if key not in known:
                if time.monotonic() > ends:
                    raise SystemExit(f"{name}, seed {seed}, and others are left: start it again")
                if name in contest.recipes:
                    start = encoder(contest, cache) if name in PRETRAINED else ""
                    found = learned(contest, name, seed, cache, start)
                else:
                    found = searching(contest, name, seed, cache)
                known[key] = found._asdict()
                kept.write_text(json.dumps(known))
                say(f"{key}: {mean(found.trained):.2f}, held out {mean(found.held):.2f}")
            table.setdefault(name, []).append(Found(**known[key]))
    return table


def digest(contest: Contest, name: str) -> str:
    """Return a word for the recipe of a contestant and the rule: with others it begins anew."""
    recipe = read_toml(contest.recipes[name]) if name in contest.recipes else {}
    said = json.dumps([recipe, contest.modules, contest.held_out, RULE])
    return hashlib.sha256(said.encode()).hexdigest()[:8]


def best_of(kept: Mapping[str, Any], one: Problem, measure: Measurements) -> float:
    """Return the gain of the best schedule that a training kept, measured again."""
    known = kept.get(one.name)
    if known is None or known["speedup"] <= 1:
        return 1.0
    return max(1.0, confirmed(one, measure.space.read(known["schedule"], one.name), measure))


def confirmed(one: Problem, schedule: Sequence[Any], measure: Measurements) -> float:
    """Return the gain of a schedule by the rule of `rl search` and `rl eval`."""
    return gain(search.confirmed(one, [schedule], measure).result)


def measured_base(one: Problem, measure: Measurements) -> float:
    """Return the milliseconds of a module without a schedule."""
    return float(measure(one, ()).baseline / 1e6)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def shown(values: Sequence[Sequence[float]]) -> str:
    """Return the geometric mean of all modules, and its interval over seeds."""
    middle, half = mean_interval([math.log(mean(gains)) for gains in values])
    text = f"{math.exp(middle):.2f}"
    if half is None:
        return text
    return f"{text} ({math.exp(middle - half):.2f} to {math.exp(middle + half):.2f})"


def beside(gains: Mapping[str, float], lines: Sequence[str]) -> str:
    """Return how many times as fast as the baseline a peer is; on how many modules."""
    found = [gains[line] for line in lines if line in gains]
    if not found:
        return "–"
    return f"{mean(found):.2f}" + (f" (on {len(found)})" if len(found) < len(lines) else "")


def profile(table: Table) -> list[str]:
    """Return the rows of a performance profile (Dolan and Moré, 2002).

    A problem is a learned module with a seed.
    """
    names = list(table)
    gains = np.array([[one.trained for one in table[name]] for name in names])
    behind = gains.max(axis=0) / gains
    return [
        f"| {name} | " + " | ".join(f"{np.mean(one <= ratio):.0%}" for ratio in RATIOS) + " |"
        for name, one in zip(names, behind, strict=True)
    ]


def main(cache: Path, contest: Contest = LOOPS, minutes: float = math.inf) -> list[str]:
    """Return the lines of the section."""
    budget, held_budget, seeds = contest.effort
    modules, held_out = contest.modules, contest.held_out
    table = compare(contest, cache, minutes)
    with contest.measure(cache) as measure:
        lines_of = (*modules, *held_out)
        base = {line: measured_base(problems.of_line(line), measure) for line in lines_of}
        trials = dict.fromkeys(modules, budget) | dict.fromkeys(held_out, held_budget)
        times = schedule_peers.gains(base, trials, contest.folder(cache), measure)
    points = [point for point in POINTS if point <= budget]
    lines = [
        f"`python benchmarks/schedules.py CACHE`, space `{contest.name}`: {len(modules)} modules "
        f"to learn from, {budget} evaluations each, and {len(held_out)} held-out ones, "
        f"{held_budget} each; "
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}. Geometric means of how many times as "
        f"fast as {contest.base}, CPU time of one thread; in brackets the 95 % interval over "
        "seeds.",
        "",
        "| contestant | learned modules | held out, no measurement | slower | "
        f"held out, best of {held_budget} | "
        + " | ".join(f"after {point}" for point in points)
        + " | own CPU s |",
        "|---|---|---|---|---|" + "---|" * (len(points) + 1),
    ]
    for name, found in table.items():
        learns = name in contest.recipes
        zero = shown([one.zero for one in found]) if learns else "–"
        slower = f"{np.mean([g < 1 for one in found for g in one.zero]):.0%}" if learns else "–"
        curve = [f"{mean([one.curve[point - 1] for one in found]):.2f}" for point in points]
        lines.append(
            f"| {name} | {shown([one.trained for one in found])} | {zero} | {slower} | "
            f"{shown([one.held for one in found])} | {' | '.join(curve)} | "
            f"{np.mean([one.seconds for one in found]):.0f} |"
        )
    for name, known in times.items():
        lines.append(
            f"| {name} | {beside(known, modules)} | {beside(known, held_out)} | – | "
            f"{beside(known, held_out)} |" + " – |" * (len(points) + 1)
        )
    lines += [
        "",
        '"after n": the best so far after n evaluations a learned module, not measured again. '
        '"slower": the share of held-out modules that the policy\'s first schedule makes slower. '
        "A search knows nothing of other modules; a policy has spent its evaluations on the "
        "learned ones before it sees a held-out one.",
        "",
        "Performance profile: the share of learned modules whose best schedule takes at most so "
        "many times the time of the best contestant's.",
        "",
        "| contestant | " + " | ".join(f"{ratio:g} ×" for ratio in RATIOS) + " |",
        "|---|" + "---|" * len(RATIOS),
        *profile(table),
        "",
        f"Learned: {', '.join(f'`{line}`' for line in modules)}. Held out: "
        f"{', '.join(f'`{line}`' for line in held_out)}.",
    ]
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("cache", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--space", choices=list(CONTESTS), default="loops")
    given = parser.parse_args()
    contest = CONTESTS[given.space]
    if given.small:
        contest = contest._replace(effort=SMALL)
    print("\n".join(main(given.cache, contest, given.minutes)))
