"""Schedules of small modules: PPO with each embedding beside searches, at equal evaluations.

    python benchmarks/schedules.py CACHE

A policy learns from the modules of its recipe with so many evaluations a module as each search
gets; a result of the cache, which all share, counts as one for all alike. Then it schedules the
held-out ones, which it has never seen: without any measurement, and as the best of some. Searches
begin anew for each module. The best schedule of every contestant is measured again in a fresh
process, and that gain counts, below 1 too; what gives no result counts as 1. All times are CPU
times of one thread; means are geometric. The policies of the first seed, and
random search, schedule shapes of KernelBench's level 1, which none has learned from.

What a contestant has found is kept in CACHE/schedules: a benchmark that was ended goes on. The best
so far by evaluations is drawn there as curves.svg, of which docs/images/schedules-loops.svg is a
copy.
"""

import hashlib
import json
import re
import shutil
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
from tokmill.base.files import make_folder
from tokmill.base.recipe import merge, read_toml
from tokmill.mlir import search
from tokmill.mlir.loops import schedule
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators
from tokmill.mlir.modules import problem as problems
from tokmill.mlir.modules.problem import Problem
from tokmill.report.pages.plot import render
from tokmill.rl import evaluate_policy as evaluate
from tokmill.rl import ppo_loop as loop
from tokmill.rl.schedule_task import SchedulesConfig
from tokmill.training.runs.run import load_task
from tokmill.training.runs.trackers import METRICS, read_metrics

PRETRAINED = {"PPO, DistilBERT, pre-trained"}
"""Those that begin with an encoder of the task masked."""


class Contest(NamedTuple):
    """Where what is found is kept."""

    folder: Path

    @property
    def cache(self) -> Path:
        return self.folder / "measurements.sqlite"

    def measure(self) -> Measurements:
        return Measurements(loop.settings_of(SchedulesConfig()), self.cache)


BUDGET, TRIED = 64, 16
"""Evaluations of a module that is learned from, and of a held-out one."""
SEEDS = (0, 1, 2)
RECIPES = {
    "PPO, LSTM": "schedules-lstm",
    "PPO, DistilBERT": "schedules-distilbert",
    "PPO, DistilBERT, pre-trained": "schedules-distilbert",
    "PPO, loop transformer": "schedules-loop-transformer",
}
TASK: Any = read_toml(RECIPES["PPO, LSTM"])["task"]
LEARNED, HELD_OUT = list(TASK["modules"]), list(TASK["held_out"])
BASE = "without a schedule"
"""What a schedule is compared with."""
EACH = 2
"""Evaluations of each module in a step of a training."""
RANDOM, SHAPES_TRIED = "random", 16
"""The search that schedules shapes of KernelBench too, and evaluations of each of them."""
ENCODER_SCHEDULES, ENCODER_STEPS = 100, 400
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


def trained(contest: Contest, name: str, seed: int, out: Path) -> Path:
    """Train a policy with as many evaluations a module as searches get; return the run.

    A step has two evaluations of each module.
    """
    start = encoder(contest) if name in PRETRAINED else ""
    value = merge(
        read_toml(RECIPES[name]),
        {
            "task": {
                "cache": str(contest.cache), "modules": LEARNED, "held_out": [],
                "bench_count": EACH * len(LEARNED),
            },
            "data": {"seed": seed},
            "run": {
                "seed": seed, "steps": BUDGET // EACH, "checkpoint_every": 0,
                "log_every": 1, "start": start,
            },
        },
    )  # fmt: skip
    return tokmill.train(value, out, quiet=True).path


def policy(contest: Contest, name: str, seed: int) -> Path:
    """Return the run of a policy; it is trained again if it is gone."""
    words = (slug(name), str(seed), str(BUDGET), digest(name))
    kept = contest.folder / "policies" / "-".join(words)
    if not kept.exists():
        with tempfile.TemporaryDirectory() as scratch:
            run = trained(contest, name, seed, Path(scratch) / "run")
            shutil.copytree(run, kept)
    return kept


def learned(contest: Contest, name: str, seed: int) -> dict[str, Any]:
    begun = time.process_time()
    run = policy(contest, name, seed)
    rows = [entry for entry in read_metrics(run / METRICS) if "reward" in entry]
    task: Any = load_task(run)
    kept = json.loads((run / loop.BEST).read_bytes())
    seconds = time.process_time() - begun
    with contest.measure() as measure:
        best = [best_of(kept, problems.of_line(line), measure) for line in LEARNED]
        others = [problems.of_line(line) for line in HELD_OUT]
        found = evaluate.evaluate(task, others, measure, TRIED - 1, seed)
        return {
            "trained": best,
            "held": [best_tried(one, measure) for one in found],
            "zero": [gain(one.first.result, one.first.schedule) for one in found],
            "curve": by_evaluation([entry["best_speedup"] for entry in rows], EACH),
            "seconds": seconds,
        }


def searching(contest: Contest, name: str, seed: int) -> dict[str, Any]:
    """Search schedules of all modules; return fields of `Found`."""
    begun = time.process_time()
    with contest.measure() as measure:
        pairs, held = (
            [searched(problems.of_line(line), name, measure, budget, seed) for line in lines]
            for lines, budget in (
                (LEARNED, BUDGET),
                (HELD_OUT, TRIED),
            )
        )
    return {
        "trained": [one for one, _ in pairs],
        "held": [one for one, _ in held],
        "zero": [],
        "curve": curve_of([curve for _, curve in pairs]),
        "seconds": time.process_time() - begun,
    }


def encoder(contest: Contest) -> str:
    """Return a run of the task masked on the learned modules in the middle of random schedules."""
    made = digest_of([LEARNED, ENCODER_STEPS, ENCODER_SCHEDULES])
    store, run = (contest.folder / f"{name}-{made}" for name in ("operations", "encoder"))
    command = [sys.executable, "-m", "tokmill"]
    if not store.exists():
        modules = make_folder(store.with_name(f"modules-{made}"))
        for number, module in enumerate(LEARNED):
            (modules / f"{number}.mlir").write_text(generators.chain(module))
        words = [str(modules), "--schedules", str(ENCODER_SCHEDULES), "-o", str(store)]
        subprocess.run([*command, "build", "mlir", *words], check=True, stdout=sys.stderr)
    if not run.exists():
        words = ["--data", str(store), "-o", str(run), "--steps", str(ENCODER_STEPS)]
        subprocess.run([*command, "train", "mlir-fields", *words], check=True, stdout=sys.stderr)
    return str(run)


def compare(contest: Contest) -> Table:
    kept = contest.folder / "contests.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(kept.read_text()) if kept.exists() else {}
    table: Table = {}
    for seed in SEEDS:
        for name in (*RECIPES, *search.SEARCHES):
            key = f"{name}, seed {seed}, {BUDGET} and {TRIED}, "
            key += digest(name)
            if key not in known:
                since = time.monotonic()
                found = (learned if name in RECIPES else searching)(contest, name, seed)
                wall = time.monotonic() - since
                known[key] = Found(**found, wall=wall)._asdict()
                kept.write_text(json.dumps(known))
                trained, held = known[key]["trained"], known[key]["held"]
                say(f"{key}: {mean(trained):.2f}, held out {mean(held):.2f}, {wall:.0f} s")
            table.setdefault(name, []).append(Found(**known[key]))
    return table


def shapes_of_kernelbench(contest: Contest) -> list[str]:
    """Return the table of policies and random search on shapes that none has learned from."""
    lines = list(KERNELBENCH.values())
    seed = SEEDS[0]
    kept = contest.folder / "kernelbench.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    found = {}
    for name in (*RECIPES, RANDOM):
        key = f"{name}, {len(lines)} modules, {BUDGET} and {SHAPES_TRIED}, "
        key += digest(name)
        if key not in known:
            since = time.monotonic()
            if name in RECIPES:
                known[key] = on_shapes(policy(contest, name, seed), contest, lines)
            else:
                with contest.measure() as measure:
                    best = {
                        line: searched(problems.of_line(line), name, measure, SHAPES_TRIED, seed)[0]
                        for line in lines
                    }
                known[key] = {"zero": {}, "best": best}
            kept.write_text(json.dumps(known))
            say(f"KernelBench, {key}: {time.monotonic() - since:.0f} s")
        found[name] = known[key]
    for name, gains in schedule_peers.gains(bases(contest, lines)).items():
        found[name] = {"zero": {}, "best": gains}
    return [
        f"Shapes of KernelBench's level 1 ({len(lines)}), space `loops`: the policies of seed "
        f"{seed} above, {SHAPES_TRIED} evaluations each. Geometric means of the speed-up over "
        "no schedule.",
        "",
        *schedule_tables.kernelbench(found, lines, SHAPES_TRIED),
    ]


def on_shapes(run: Path, contest: Contest, lines: Sequence[str]) -> dict[str, dict[str, float]]:
    task: Any = load_task(run)
    modules = [problems.of_line(line) for line in lines]
    with contest.measure() as measure:
        found = evaluate.evaluate(task, modules, measure, SHAPES_TRIED - 1, SEEDS[0])
        return {
            "zero": {one.problem.name: gain(one.first.result, one.first.schedule) for one in found},
            "best": {one.problem.name: best_tried(one, measure) for one in found},
        }


def digest(name: str) -> str:
    """Return a word for the recipe of a contestant and the rule: with others it begins anew."""
    recipe = read_toml(RECIPES[name]) if name in RECIPES else {}
    return digest_of([recipe, LEARNED, HELD_OUT, RULE])


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


def slug(name: str) -> str:
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


def bases(contest: Contest, lines: Sequence[str]) -> dict[str, float]:
    """Return the milliseconds of modules without a schedule."""
    with contest.measure() as measure:
        return {line: measure(problems.of_line(line), ()).baseline / 1e6 for line in lines}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(cache: Path) -> list[str]:
    contest = Contest(cache / "schedules")
    table = compare(contest)
    title = f"Best schedules so far, space loops, {len(LEARNED)} modules, {len(SEEDS)} seeds"
    figure = schedule_tables.curves(table, list(RECIPES), title, BASE)
    (contest.folder / "curves.svg").write_bytes(render(figure, "svg"))
    peers = schedule_peers.gains(bases(contest, (*LEARNED, *HELD_OUT)))
    lines = [
        f"`python benchmarks/schedules.py CACHE`, space `loops`: {len(LEARNED)} training "
        f"modules, {BUDGET} evaluations each, and {len(HELD_OUT)} held-out ones, "
        f"{TRIED} each; {len(SEEDS)} seeds. Geometric means of the "
        "speed-up over no schedule, CPU time of one thread; in brackets the 95 % confidence "
        "interval over seeds.",
        "",
        *schedule_tables.contest(table, peers, LEARNED, HELD_OUT, TRIED),
        "",
        schedule_tables.LEGEND,
        '"after n": the best so far after n evaluations per training module, not measured '
        "again. A search uses only its own module; a policy has used its evaluations on the "
        "training modules before it meets a held-out one. IREE's flags are its default, O3, data "
        "tiling and im2col.",
        "",
        f"Training: {', '.join(f'`{line}`' for line in LEARNED)}. Held out: "
        f"{', '.join(f'`{line}`' for line in HELD_OUT)}.",
    ]
    return [*lines, "", *shapes_of_kernelbench(contest)]


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]))))
