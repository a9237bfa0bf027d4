"""Schedules of small modules: PPO with each embedding beside searches, at equal evaluations.

    python benchmarks/schedules.py CACHE [--kernelbench] [--images docs/images]
        [--small | --tiny] [--seeds N] [--minutes N]

A policy learns from the modules of its recipe with so many evaluations a module as each search
gets; a result of the cache, which all share, counts as one for all alike. Then it schedules the
held-out ones, which it has never seen: without any measurement, and as the best of some. Searches
begin anew for each module. The best schedule of every contestant is measured again in a fresh
process, and that gain counts, below 1 too; what gives no result counts as 1. All times are CPU
times of one thread; means are geometric. With `--kernelbench` the policies of the first seed, and
random search, schedule shapes of KernelBench's level 1, which none has learned from.

What a contestant has found is kept in CACHE/schedules: a benchmark that was ended, or had
`--minutes`, goes on. The best so far by evaluations is drawn there as curves.svg
and curves.png; `--images FOLDER` puts the first one there too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import schedule_peers
import schedule_tables
import tokmill
from kernelbench import LEVEL_1 as KERNELBENCH
from schedule_tables import Found, Table, by_evaluation, curve_of, mean
from tokmill.base.errors import UsageError
from tokmill.base.files import make_folder
from tokmill.base.recipe import merge, read_toml
from tokmill.mlir import search
from tokmill.mlir.loops import schedule
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators
from tokmill.mlir.modules import problem as problems
from tokmill.mlir.modules.problem import Problem
from tokmill.report.pages.figures import write_csv
from tokmill.report.pages.plot import render
from tokmill.rl import evaluate_policy as evaluate
from tokmill.rl import ppo_loop as loop
from tokmill.rl.modules import check_fits
from tokmill.rl.schedule_task import SchedulesConfig
from tokmill.training.runs.run import load_task
from tokmill.training.runs.trackers import METRICS, read_metrics

PRETRAINED = {"PPO, DistilBERT, pre-trained"}
"""Those that begin with an encoder of the task masked."""


class Effort(NamedTuple):
    """How much is measured."""

    budget: int
    """Evaluations a module that is learned from."""
    tried: int
    """Evaluations of a held-out module."""
    seeds: tuple[int, ...]
    encoder: int = 400
    """Steps of the training of an encoder."""


class Contest(NamedTuple):
    """Who searches what."""

    name: str
    """Space of schedules."""
    recipes: dict[str, str]
    """Policy → its recipe; the modules are those of the first one."""
    effort: Effort
    base: str
    """What a schedule is compared with."""
    most: int | None = None
    """Modules of each kind, if not all."""

    @property
    def modules(self) -> list[str]:
        """Return the modules that are learned from."""
        return list(self._task["modules"])[: self.most]

    @property
    def held_out(self) -> list[str]:
        """Return those that are not."""
        return list(self._task["held_out"])[: self.most]

    @property
    def _task(self) -> Any:
        return read_toml(next(iter(self.recipes.values())))["task"]

    def measure(self, cache: Path) -> Measurements:
        """Return the measurements that all share."""
        return Measurements(loop.settings_of(SchedulesConfig()), self.place(cache))

    def place(self, cache: Path) -> Path:
        """Return the file of these measurements."""
        return self.folder(cache) / "measurements.sqlite"

    def folder(self, cache: Path) -> Path:
        """Return where what is found is kept."""
        return cache / "schedules"


WHOLE, SMALL, TINY = Effort(64, 16, (0, 1, 2)), Effort(24, 8, (0,)), Effort(4, 2, (0,), 10)
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
EACH = 2
"""Evaluations of each module in a step of a training."""
RANDOM, SHAPES_TRIED = "random", 16
"""The search that schedules shapes of KernelBench too, and evaluations of each of them."""
ENCODER_SCHEDULES = 100
RULE = 4
"""Of how gains are confirmed: what was kept by another one is measured again."""


def gain(result: Any, schedule: Sequence[Any]) -> float:
    """Return a speed-up; 1 for what gave no result, as the module without a schedule would run.

    Without a schedule there is no gain: what the same program seems to gain is noise.
    """
    return float(result.gain) if result.status == "ok" and schedule else 1.0


def searched(
    one: Problem, name: str, measure: Measurements, budget: int, seed: int
) -> tuple[float, list[float]]:
    """Return the gain of a search, measured again, and the best so far after each evaluation."""
    tried = list(search.SEARCHES[name](one, measure, budget, seed))
    best = max(tried, key=search.score)
    found = [max(1.0, gain(trial.result, trial.schedule)) for trial in tried]
    final = confirmed(one, best.schedule, measure) if best.result.status == "ok" else 1.0
    return final, np.maximum.accumulate(found).tolist()


def trained(contest: Contest, name: str, seed: int, cache: Path, out: Path) -> Path:
    """Train a policy with as many evaluations a module as searches get; return the run.

    A step has two evaluations of each module.
    """
    start = encoder(contest, cache) if name in PRETRAINED else ""
    value = merge(
        read_toml(contest.recipes[name]),
        {
            "task": {
                "cache": str(contest.place(cache)), "modules": contest.modules, "held_out": [],
                "bench_count": EACH * len(contest.modules),
            },
            "data": {"seed": seed},
            "run": {
                "seed": seed, "steps": contest.effort.budget // EACH, "checkpoint_every": 0,
                "log_every": 1, "start": start,
            },
        },
    )  # fmt: skip
    return tokmill.train(value, out, quiet=True).path


def policy(contest: Contest, name: str, cache: Path) -> Path:
    """Return the run of a policy with the first seed; it is trained again if it is gone."""
    seed, budget = contest.effort.seeds[0], contest.effort.budget
    words = (slug(name), str(seed), str(budget), digest(contest, name))
    kept = contest.folder(cache) / "policies" / "-".join(words)
    if not kept.exists():
        with tempfile.TemporaryDirectory() as scratch:
            run = trained(contest, name, seed, cache, Path(scratch) / "run")
            shutil.copytree(run, kept)
    return kept


def learned(contest: Contest, name: str, seed: int, cache: Path) -> dict[str, Any]:
    """Train a policy and evaluate it; return fields of `Found`."""
    begun, effort = time.process_time(), contest.effort
    with tempfile.TemporaryDirectory() as scratch:
        if seed == effort.seeds[0]:
            run = policy(contest, name, cache)
        else:
            run = trained(contest, name, seed, cache, Path(scratch) / "run")
        rows = [entry for entry in read_metrics(run / METRICS) if "reward" in entry]
        task: Any = load_task(run)
        kept = json.loads((run / loop.BEST).read_bytes())
    seconds = time.process_time() - begun
    with contest.measure(cache) as measure:
        best = [best_of(kept, problems.of_line(line), measure) for line in contest.modules]
        others = [problems.of_line(line) for line in contest.held_out]
        found = evaluate.evaluate(task, others, measure, effort.tried - 1, seed)
        return {
            "trained": best,
            "held": [best_tried(one, measure) for one in found],
            "zero": [gain(one.first.result, one.first.schedule) for one in found],
            "curve": by_evaluation([entry["best_speedup"] for entry in rows], EACH),
            "seconds": seconds,
        }


def searching(contest: Contest, name: str, seed: int, cache: Path) -> dict[str, Any]:
    """Search schedules of all modules; return fields of `Found`."""
    begun, effort = time.process_time(), contest.effort
    with contest.measure(cache) as measure:
        pairs, held = (
            [searched(problems.of_line(line), name, measure, budget, seed) for line in lines]
            for lines, budget in (
                (contest.modules, effort.budget),
                (contest.held_out, effort.tried),
            )
        )
    return {
        "trained": [one for one, _ in pairs],
        "held": [one for one, _ in held],
        "zero": [],
        "curve": curve_of([curve for _, curve in pairs]),
        "seconds": time.process_time() - begun,
    }


def encoder(contest: Contest, cache: Path) -> str:
    """Return a run of the task masked on the learned modules in the middle of random schedules."""
    steps = contest.effort.encoder
    made = digest_of([contest.modules, steps, ENCODER_SCHEDULES])
    store, run = (contest.folder(cache) / f"{name}-{made}" for name in ("operations", "encoder"))
    command = [sys.executable, "-m", "tokmill"]
    if not store.exists():
        modules = make_folder(store.with_name(f"modules-{made}"))
        for number, module in enumerate(contest.modules):
            (modules / f"{number}.mlir").write_text(generators.chain(module))
        words = [str(modules), "--schedules", str(ENCODER_SCHEDULES), "-o", str(store)]
        subprocess.run([*command, "build", "mlir", *words], check=True, stdout=sys.stderr)
    if not run.exists():
        words = ["--data", str(store), "-o", str(run), "--steps", str(steps)]
        subprocess.run([*command, "train", "mlir-fields", *words], check=True, stdout=sys.stderr)
    return str(run)


def compare(contest: Contest, cache: Path, minutes: float) -> Table:
    """Return what all contestants find; ends the process after so many minutes."""
    ends, effort = time.monotonic() + 60 * minutes, contest.effort
    kept = contest.folder(cache) / "contests.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(kept.read_text()) if kept.exists() else {}
    table: Table = {}
    # Rows of the cache if all of them are of this seed and the contestants before.
    rows = 0
    for seed in effort.seeds:
        for name in (*contest.recipes, *search.SEARCHES):
            key = f"{name}, seed {seed}, {effort.budget} and {effort.tried}, "
            key += digest(contest, name)
            if key not in known:
                if time.monotonic() > ends:
                    raise SystemExit(f"{name}, seed {seed}, and others are left: start it again")
                fresh = seed == effort.seeds[0] and rows_of(contest.place(cache)) == rows
                since, play = time.monotonic(), learned if name in contest.recipes else searching
                found = play(contest, name, seed, cache)
                wall, after = time.monotonic() - since, rows_of(contest.place(cache))
                known[key] = Found(**found, wall=wall, fresh=fresh, rows=after)._asdict()
                kept.write_text(json.dumps(known))
                trained, held = known[key]["trained"], known[key]["held"]
                say(f"{key}: {mean(trained):.2f}, held out {mean(held):.2f}, {wall:.0f} s")
            table.setdefault(name, []).append(Found(**known[key]))
            rows = known[key]["rows"] if known[key]["fresh"] else -1
    return table


def rows_of(cache: Path) -> int:
    """Return how many results a cache of measurements has."""
    if not cache.exists():
        return 0
    with contextlib.closing(sqlite3.connect(cache)) as data:
        return int(data.execute("SELECT COUNT(*) FROM results").fetchone()[0])


def shapes_of_kernelbench(contest: Contest, cache: Path) -> list[str]:
    """Return the table of policies and random search on shapes that none has learned from."""
    lines = list(KERNELBENCH.values())[: contest.most]
    effort, seed = contest.effort, contest.effort.seeds[0]
    kept = contest.folder(cache) / "kernelbench.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    found = {}
    for name in (*contest.recipes, RANDOM):
        key = f"{name}, {len(lines)} modules, {effort.budget} and {SHAPES_TRIED}, "
        key += digest(contest, name)
        if key not in known:
            since = time.monotonic()
            if name in contest.recipes:
                known[key] = on_shapes(policy(contest, name, cache), contest, lines, cache)
            else:
                with contest.measure(cache) as measure:
                    best = {
                        line: searched(problems.of_line(line), name, measure, SHAPES_TRIED, seed)[0]
                        for line in lines
                    }
                known[key] = {"zero": {}, "best": best, "refused": {}}
            kept.write_text(json.dumps(known))
            say(f"KernelBench, {key}: {time.monotonic() - since:.0f} s")
        found[name] = known[key]
    with contest.measure(cache) as measure:
        base = {line: measured_base(problems.of_line(line), measure) for line in lines}
    peers = schedule_peers.gains(base)
    for name, gains in peers.items():
        found[name] = {"zero": {}, "best": gains, "refused": {}}
    return [
        f"Shapes of KernelBench's level 1 ({len(lines)}), space `{contest.name}`: policies of seed "
        f"{seed}, as they were trained above, {SHAPES_TRIED} evaluations each. Geometric means of "
        f"how many times as fast as {contest.base}.",
        "",
        *schedule_tables.kernelbench(found, lines, SHAPES_TRIED),
    ]


def on_shapes(
    run: Path, contest: Contest, lines: Sequence[str], cache: Path
) -> dict[str, dict[str, Any]]:
    """Return what a policy finds for modules that it has room for, and which it refuses."""
    task: Any = load_task(run)
    taken, refused = [], {}
    for line in lines:
        one = problems.of_line(line)
        try:
            check_fits(one, task.model.config.sizes)
            taken.append(one)
        except UsageError as error:
            refused[line] = error.what
    with contest.measure(cache) as measure:
        found = evaluate.evaluate(task, taken, measure, SHAPES_TRIED - 1, contest.effort.seeds[0])
        return {
            "zero": {one.problem.name: gain(one.first.result, one.first.schedule) for one in found},
            "best": {one.problem.name: best_tried(one, measure) for one in found},
            "refused": refused,
        }


def digest(contest: Contest, name: str) -> str:
    """Return a word for the recipe of a contestant and the rule: with others it begins anew."""
    recipe = read_toml(contest.recipes[name]) if name in contest.recipes else {}
    return digest_of([recipe, contest.modules, contest.held_out, RULE])


def digest_of(value: Any) -> str:
    """Return a word for a value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


def slug(name: str) -> str:
    """Return a name as that of a file."""
    return "-".join(re.findall(r"\w+", name.lower()))


def best_of(kept: Mapping[str, Any], one: Problem, measure: Measurements) -> float:
    """Return the gain of the best schedule that a training kept, measured again."""
    text = kept[one.name]["schedule"] if one.name in kept else ""
    return confirmed(one, schedule.read(text, one.name), measure) if text else 1.0


def best_tried(one: evaluate.Evaluated, measure: Measurements) -> float:
    """Return the gain of the best schedule of some, measured again.

    For `rl eval` what gave no result is as good as no schedule; here it is worse than any that ran,
    as it is for searches.
    """
    if one.best.result.status == "ok" and one.best.schedule:
        return gain(one.best.result, one.best.schedule)
    ran = [episode for episode in one.tried if episode.result.status == "ok"]
    if not ran:
        return 1.0
    return confirmed(one.problem, max(ran, key=lambda each: each.gain).schedule, measure)


def confirmed(one: Problem, schedule: Sequence[Any], measure: Measurements) -> float:
    """Return the gain of a schedule by the rule of `rl search` and `rl eval`."""
    return gain(search.measured_again(one, [schedule], measure)[0].result, schedule)


def measured_base(one: Problem, measure: Measurements) -> float:
    """Return the milliseconds of a module without a schedule."""
    return float(measure(one, ()).baseline / 1e6)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def draw(contest: Contest, table: Table, cache: Path, images: Path | None) -> Path:
    """Draw the best so far by evaluations; return the folder of the figure."""
    folder, seeds = contest.folder(cache), len(contest.effort.seeds)
    title = f"Best schedules so far, space {contest.name}, {len(contest.modules)} modules"
    title += f", {seeds} seeds" if seeds > 1 else ""
    figure = schedule_tables.curves(table, list(contest.recipes), title, contest.base)
    for form in ("svg", "png"):
        (folder / f"curves.{form}").write_bytes(render(figure, form))
    (folder / "curves.csv").write_text(write_csv(figure))
    if images is not None:
        images.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "curves.svg", images / f"schedules-{contest.name}.svg")
    return folder


def main(
    cache: Path,
    contest: Contest = LOOPS,
    minutes: float = math.inf,
    kernelbench: bool = False,
    images: Path | None = None,
) -> list[str]:
    """Return the lines of the section."""
    budget, tried, seeds, _ = contest.effort
    modules, held_out = contest.modules, contest.held_out
    table = compare(contest, cache, minutes)
    say(f"curves: {draw(contest, table, cache, images)}")
    with contest.measure(cache) as measure:
        lines_of = (*modules, *held_out)
        base = {line: measured_base(problems.of_line(line), measure) for line in lines_of}
    peers = schedule_peers.gains(base)
    lines = [
        f"`python benchmarks/schedules.py CACHE`, space `{contest.name}`: {len(modules)} modules "
        f"to learn from, {budget} evaluations each, and {len(held_out)} held-out ones, "
        f"{tried} each; "
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}. Geometric means of how many times as "
        f"fast as {contest.base}, CPU time of one thread; in brackets the 95 % interval over "
        "seeds.",
        "",
        *schedule_tables.contest(table, peers, modules, held_out, tried),
        "",
        schedule_tables.LEGEND,
        '"after n": the best so far after n evaluations a learned module, not measured again. '
        "A search knows nothing of other modules; a policy has spent its evaluations on the "
        "learned ones before it sees a held-out one. IREE's flags are its default, O3, data tiling "
        "and im2col.",
        "",
        schedule_tables.duration(table),
        "",
        f"Learned: {', '.join(f'`{line}`' for line in modules)}. Held out: "
        f"{', '.join(f'`{line}`' for line in held_out)}.",
    ]
    return lines + (["", *shapes_of_kernelbench(contest, cache)] if kernelbench else [])


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cache", type=Path)
    parser.add_argument("--small", action="store_true", help="one seed, fewer evaluations")
    parser.add_argument("--tiny", action="store_true", help="two modules, to see that all works")
    parser.add_argument("--seeds", type=int, help="how many seeds")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--kernelbench", action="store_true", help="its shapes too")
    parser.add_argument("--images", type=Path, help="a folder that gets the curves too")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    contest = LOOPS
    if given.small:
        contest = contest._replace(effort=SMALL)
    if given.tiny:
        contest = contest._replace(effort=TINY, most=2)
    if given.seeds:
        seeds = tuple(range(given.seeds))
        contest = contest._replace(effort=contest.effort._replace(seeds=seeds))
    found = main(given.cache, contest, given.minutes, given.kernelbench, given.images)
    print("\n".join(found))
