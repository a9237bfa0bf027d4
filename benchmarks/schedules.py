"""Schedules of small modules: PPO with each embedding beside searches, at equal evaluations.

    python benchmarks/schedules.py CACHE [--small]

A policy learns from `TRAIN` with so many evaluations a module as each search gets; a result of the
cache, which all share, counts as one for all alike. Then the policy schedules `HELD_OUT`, which it
has never seen: without any measurement, and as the best of some. Searches begin anew for each
module. The best schedule of every contestant is measured again in a fresh process, and what gives
no result counts as 1. All times are CPU times of one thread; means are geometric.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tokmill
from tokmill.mlir import search
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import problem as problems
from tokmill.mlir.modules.problem import Problem
from tokmill.recipe import merge, read_toml
from tokmill.report.interval import mean_interval
from tokmill.rl import evaluate, loop
from tokmill.training.runs.run import load_task, read_run
from tokmill.training.runs.track import METRICS, read_metrics

RECIPES = {
    "PPO, LSTM": "schedules-lstm",
    "PPO, DistilBERT": "schedules-distilbert",
    "PPO, loop transformer": "schedules-loop-transformer",
}
SEARCHES = ("random", "greedy", "beam", "evolution")
SHAPES = read_toml("schedules-lstm")["task"]
TRAIN, HELD_OUT = SHAPES["modules"], SHAPES["held_out"]
"""The shapes that are learned from, and those that are not: recipes/rl/schedules-lstm.toml."""


class Effort(NamedTuple):
    """How much is measured."""

    budget: int
    """Evaluations a module that is learned from."""
    tried: int
    """Evaluations of a held-out module."""
    seeds: tuple[int, ...]


WHOLE, SMALL = Effort(64, 16, (0, 1, 2)), Effort(24, 8, (0,))
POINTS = (4, 8, 16, 24, 32, 64)
"""Evaluations a module of the points of curves."""
Table = dict[str, list[list[float]]]
"""Contestant → for each seed the gains of all modules."""


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
    final = gain(measure(one, best.schedule, again=True)) if gain(best.result) > 1 else 1.0
    return final, np.maximum.accumulate(found).tolist()


def learned(
    folder: Path, recipe: str, cache: Path, budget: int, seed: int
) -> tuple[Path, list[float]]:
    """Train a policy with `budget` evaluations a module; return its run, and the best so far.

    A step has two evaluations of each module.
    """
    count = 2 * len(TRAIN)
    value = merge(
        read_toml(recipe),
        {
            "task": {"cache": str(cache), "bench_count": count, "held_out": []},
            "data": {"seed": seed},
            "run": {"seed": seed, "steps": budget // 2, "checkpoint_every": 0, "log_every": 1},
        },
    )
    run = tokmill.train(value, folder / f"{recipe}-{seed}", quiet=True).path
    curve = [entry["best_speedup"] for entry in read_metrics(run / METRICS) if "reward" in entry]
    return run, [one for one in curve for _ in range(2)]


def curve_of(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean over modules after each evaluation a module."""
    return [mean(column) for column in zip(*curves, strict=True)]


def compare(cache: Path, effort: Effort) -> dict[str, Any]:
    """Return all that is measured."""
    budget, held_budget, seeds = effort
    train = [problems.of_line(line) for line in TRAIN]
    others = [problems.of_line(line) for line in HELD_OUT]
    place = cache / "schedules" / "measurements.sqlite"
    kinds = ("trained", "zero", "held")
    tables: dict[str, Table] = {kind: {} for kind in kinds}
    curves: dict[str, list[list[float]]] = {}
    spent: dict[str, float] = {}
    evaluations = hits = 0
    with tempfile.TemporaryDirectory() as scratch:
        for seed in seeds:
            for name, recipe in RECIPES.items():
                begun = time.process_time()
                run, curve = learned(Path(scratch), recipe, place, budget, seed)
                spent[name] = spent.get(name, 0.0) + time.process_time() - begun
                curves.setdefault(name, []).append(curve)
                config, _ = read_run(run)
                task: Any = load_task(run)
                kept = json.loads((run / loop.BEST).read_bytes())
                with Measurements(loop.settings_of(config.task), place) as measure:
                    best = [best_of(kept, one, measure) for one in train]
                    found = evaluate.evaluate(task, others, measure, held_budget - 1, seed)
                    hits, evaluations = hits + measure.hits, evaluations + measure.evaluations
                for kind, gains in (
                    ("trained", best),
                    ("zero", [one.first.gain for one in found]),
                    ("held", [max(1.0, one.best.gain) for one in found]),
                ):
                    tables[kind].setdefault(name, []).append(gains)
                zero, tried = (tables[kind][name][-1] for kind in ("zero", "held"))
                say(
                    f"{name}, seed {seed}: {mean(best):.2f}; held out {mean(zero):.2f}, "
                    f"{mean(tried):.2f}; {time.process_time() - begun:.0f} s of its own"
                )
            for name in SEARCHES:
                begun = time.process_time()
                with Measurements(loop.settings_of(config.task), place) as measure:
                    pairs = [searched(one, name, measure, budget, seed) for one in train]
                    held = [searched(one, name, measure, held_budget, seed)[0] for one in others]
                    hits, evaluations = hits + measure.hits, evaluations + measure.evaluations
                spent[name] = spent.get(name, 0.0) + time.process_time() - begun
                curves.setdefault(name, []).append(curve_of([curve for _, curve in pairs]))
                tables["trained"].setdefault(name, []).append([max(1.0, one) for one, _ in pairs])
                tables["held"].setdefault(name, []).append([max(1.0, one) for one in held])
                found_for = [mean(tables[kind][name][-1]) for kind in ("trained", "held")]
                say(f"{name}, seed {seed}: {found_for[0]:.2f}; held out {found_for[1]:.2f}")
        with Measurements(loop.settings_of(config.task), place) as measure:
            base = {one.name: measured_base(one, measure) for one in (*train, *others)}
    return {"tables": tables, "curves": curves, "spent": spent, "base": base}


def best_of(kept: Mapping[str, Any], one: Problem, measure: Measurements) -> float:
    """Return the gain of the best schedule that a training kept, measured again."""
    known = kept.get(one.name)
    if known is None or known["speedup"] <= 1:
        return 1.0
    taken = actions.read(known["schedule"], one.name)
    return max(1.0, gain(measure(one, taken, again=True)))


def measured_base(one: Problem, measure: Measurements) -> float:
    """Return the milliseconds of a module without a schedule."""
    return float(measure(one, ()).baseline / 1e6)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def peers(lines: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return peer → module → milliseconds, in a process with one thread and OpenBLAS's choice."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("OPENBLAS_CORETYPE", None)
    code = "import schedules, sys; schedules.time_peers(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *lines],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        check=True,
        capture_output=True,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def time_peers(lines: Sequence[str]) -> None:
    """Print the CPU times of numpy and torch as JSON."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {"numpy": {}, "torch": {}}
    for line in lines:
        for name, made in (("numpy", numpy_of(line)), ("torch", torch_of(line))):
            if made is not None:
                found[name][line] = least(made)
    print(json.dumps(found))


def least(function: Callable[[], Any]) -> float:
    """Return the least CPU milliseconds of a call, over half a second."""
    function()
    times, begun = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begun < 0.5:
        start = time.thread_time_ns()
        function()
        times.append(time.thread_time_ns() - start)
    return min(times) / 1e6


def numpy_of(line: str) -> Callable[[], Any] | None:
    """Return a module in numpy; None: numpy has no such operation."""
    parts = [part.split() for part in line.split(",")]
    name, sizes = parts[0][0], [int(one) for one in parts[0][1:]]
    random = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return random.random(shape, np.float32)

    if name == "matmul":
        left, right, out = array(sizes[0], sizes[2]), array(sizes[2], sizes[1]), None
        out = np.empty((sizes[0], sizes[1]), np.float32)
        if len(parts) == 1:
            return lambda: np.matmul(left, right, out=out)
        return lambda: np.maximum(np.matmul(left, right, out=out), 0, out=out)
    if name == "add":
        one, two = array(*sizes), array(*sizes)
        total = np.empty(sizes, np.float32)
        return lambda: np.add(one, two, out=total)
    if name == "reduce":
        given = array(*sizes)
        return lambda: given.sum(-1)
    return None


def torch_of(line: str) -> Callable[[], Any] | None:
    """Return a module in torch; None: it is not written here."""
    import torch
    from torch.nn import functional as F

    parts = [part.split() for part in line.split(",")]
    name, sizes = parts[0][0], [int(one) for one in parts[0][1:]]
    if name == "matmul":
        left, right = torch.rand(sizes[0], sizes[2]), torch.rand(sizes[2], sizes[1])
        if len(parts) == 1:
            return lambda: left @ right
        return lambda: (left @ right).relu_()
    if name == "add":
        one, two = torch.rand(sizes), torch.rand(sizes)
        return lambda: one + two
    if name == "reduce":
        given = torch.rand(sizes)
        return lambda: given.sum(-1)
    stride = int(sizes[5]) if len(sizes) > 5 else 1
    if name in ("conv_2d_nchw", "conv_2d_nhwc"):
        batch, channels, side, filters, width = sizes[:5]
        form = torch.channels_last if name.endswith("nhwc") else torch.contiguous_format
        image = torch.rand(batch, channels, side, side).contiguous(memory_format=form)
        kernel = torch.rand(filters, channels, width, width).contiguous(memory_format=form)
        return lambda: F.conv2d(image, kernel, stride=stride)
    if name == "pooling":
        image = torch.rand(sizes[:2] + [sizes[2], sizes[2]])
        stride = sizes[4] if len(sizes) > 4 else 1
        return lambda: F.max_pool2d(image, sizes[3], stride)
    return None


def shown(values: Sequence[Sequence[float]]) -> str:
    """Return the geometric mean of all modules, and its interval over seeds."""
    middle, half = mean_interval([math.log(mean(gains)) for gains in values])
    text = f"{math.exp(middle):.2f}"
    if half is None:
        return text
    return f"{text} ({math.exp(middle - half):.2f} to {math.exp(middle + half):.2f})"


def beside(base: Mapping[str, float], times: Mapping[str, float], lines: Sequence[str]) -> str:
    """Return how many times as fast as without a schedule a peer is; on how many modules."""
    gains = [base[line] / times[line] for line in lines if line in times]
    return f"{mean(gains):.2f}" + (f" (on {len(gains)})" if len(gains) < len(lines) else "")


def main(cache: Path, effort: Effort = WHOLE) -> list[str]:
    """Return the lines of the section."""
    begun = time.monotonic()
    budget, held_budget, seeds = effort
    found = compare(cache, effort)
    tables, curves, base = found["tables"], found["curves"], found["base"]
    times = peers([*TRAIN, *HELD_OUT])
    points = [point for point in POINTS if point <= budget]
    lines = [
        f"`python benchmarks/schedules.py CACHE`: {len(TRAIN)} modules to learn from, {budget} "
        f"evaluations each, and {len(HELD_OUT)} held-out ones, {held_budget} each; "
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}. Geometric means of how many times as "
        "fast as without a schedule, CPU time of one thread; in brackets the 95 % interval over "
        f"seeds. {(time.monotonic() - begun) / 60:.0f} minutes in all.",
        "",
        "| contestant | learned modules | held out, no measurement | slower | "
        f"held out, best of {held_budget} | "
        + " | ".join(f"after {point}" for point in points)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(points),
    ]
    for name in (*RECIPES, *SEARCHES):
        zero = tables["zero"].get(name)
        slower = f"{np.mean([g < 1 for gains in zero for g in gains]):.0%}" if zero else "–"
        curve = [f"{mean([one[point - 1] for one in curves[name]]):.2f}" for point in points]
        lines.append(
            f"| {name} | {shown(tables['trained'][name])} | {shown(zero) if zero else '–'} | "
            f"{slower} | {shown(tables['held'][name])} | {' | '.join(curve)} |"
        )
    for name, known in times.items():
        lines.append(
            f"| {name} | {beside(base, known, TRAIN)} | {beside(base, known, HELD_OUT)} | – | "
            f"{beside(base, known, HELD_OUT)} |" + " – |" * len(points)
        )
    lines += [
        "",
        '"after n": the best so far after n evaluations a learned module, not measured again. '
        '"slower": the share of held-out modules that the policy\'s first schedule makes slower. '
        "A search knows nothing of other modules; a policy has spent its evaluations on the "
        "learned ones before it sees a held-out one.",
        "",
        f"Learned: {', '.join(f'`{line}`' for line in TRAIN)}. Held out: "
        f"{', '.join(f'`{line}`' for line in HELD_OUT)}.",
    ]
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("cache", type=Path)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    print("\n".join(main(given.cache, SMALL if given.small else WHOLE)))
