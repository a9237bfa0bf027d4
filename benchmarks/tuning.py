"""Operations by IREE, tuned by the user's command, beside IREE's flags, OpenBLAS and torch.

    [TOKMILL_TVM_PYTHON=PYTHON] python benchmarks/tuning.py CACHE [BUDGET] [LINE...] [--seeds N]

`tuned` is what `tokmill rl tune LINE --evaluations BUDGET` (64) gives: layout, flags and tiles.
`tiles` are the tiles alone, searched in IREE's space with as many evaluations. Then both, IREE's
default and its flags are compiled anew by `iree-compile`, and all are timed in turns in one fresh
process on one thread, CPU time, the least of the rounds: so that other work on the machine meets
all of them alike. An operation that comes out over 2 % slower than the default is compared once
more in another process, and that result counts. TVM's MetaSchedule, which takes minutes for each,
tunes the operations under `headline` of `tuning_mix.toml` with as many trials, where a Python that
has it is named; it is timed in a process of its own. Times are kept, so that a run that was ended
goes on; without LINEs the table has all of `tuning_mix.toml`, whose weights count in the geometric
means. With `--seeds N` all is done N times with other random numbers, TVM too.

With `TOKMILL_TARGET_CPU=x86-64-v3` all code is for processors without AVX-512, whatever this one
has, and OpenBLAS and torch use nothing wider either.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import peak
from tokmill.mlir.iree.tuned_model import FLAGS

MIX = Path(__file__).with_name("tuning_mix.toml")


class Mix(NamedTuple):
    """Operations that are tuned, and their weights."""

    headline: dict[str, float]
    """Those that TVM tunes too."""
    held_out: dict[str, float]

    @property
    def weights(self) -> dict[str, float]:
        """Return line → weight of all, in their order."""
        return self.headline | self.held_out


def read_mix(path: Path = MIX) -> Mix:
    """Return the operations of a file; raises `SystemExit` for what is no mix."""
    found = tomllib.loads(path.read_text())
    if set(found) != set(Mix._fields):
        raise SystemExit(f"{path}: it has {', '.join(found)}, not {' and '.join(Mix._fields)}")
    mix = Mix(**found)
    for line, weight in [*mix.headline.items(), *mix.held_out.items()]:
        if type(weight) not in (int, float) or not 0 < weight < math.inf:
            raise SystemExit(f"{path}: the weight of {line} is {weight}, not above 0")
    if twice := mix.headline.keys() & mix.held_out.keys():
        raise SystemExit(f"{path}: {', '.join(sorted(twice))} stands there twice")
    return mix


TARGET = os.environ.get("TOKMILL_TARGET_CPU", "")
"""The processor that code is made for, if not this one."""
NARROW = {
    "OPENBLAS_CORETYPE": "Haswell",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""What keeps the others from AVX-512."""
ROUNDS = 15
LIMIT = 10
"""Minutes after which the command stops tuning an operation, however few evaluations it had."""
TVM_LIMIT = 20
"""Minutes that TVM has for an operation: one of its compilations may take longer than that."""
SLOWER = 1.02
"""Times the default's time: what takes longer is compared once more."""
Times = dict[str, float]
"""Contestant → nanoseconds."""
Row = dict[str, Any]
"""Of an operation and a seed. `ns`: `Times`; `tuned`: what the command chose; `first`: the times
of the first comparison, if `ns` are those of a second one."""


def main(cache: Path, lines: tuple[str, ...] = (), budget: int = 64, seeds: int = 1) -> list[str]:
    """Return the table of the section; without lines, of the operations of the mix."""
    folder, mix = cache / "mlir", read_mix()
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Row]] = {line: [] for line in lines or mix.weights}
    for seed in range(seeds):
        for line, found in rows.items():
            kept = folder / f"{stem(line, seed)}.{budget}.compared.json"
            if not kept.exists():
                kept.write_text(json.dumps(compared(line, folder, budget, seed, mix)))
                print(line, kept.read_text(), file=sys.stderr, flush=True)
            found.append(json.loads(kept.read_text()))
    return table(rows, {line: mix.weights.get(line, 1.0) for line in rows})


def stem(line: str, seed: int) -> str:
    """Return how files of an operation begin."""
    named = line.replace(" ", "_") + (f".{TARGET}" if TARGET else "")
    return named + (f".seed{seed}" if seed else "")


def target() -> tuple[str, ...]:
    """Return IREE's flag that names the processor, if any."""
    from tokmill.mlir.iree.compiler import PROCESSOR

    return (f"{PROCESSOR}{TARGET}",) if TARGET else ()


def compared(line: str, folder: Path, budget: int, seed: int, mix: Mix) -> Row:
    """Tune an operation and time it beside the others."""
    spec = folder / f"{stem(line, seed)}.tiles.spec.mlir"
    module = spec.with_name(spec.name.replace(".tiles.spec", ""))
    searched(line, folder / "measurements.db", budget, seed, module, spec)
    told = commanded(line, folder, budget, seed)
    environment = {name: value for name, value in os.environ.items()
                   if name != "OPENBLAS_CORETYPE"}  # fmt: skip
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = "1"
    if TARGET:
        environment |= NARROW

    def in_turns() -> Times:
        answer = subprocess.run(
            [sys.executable, __file__, "--time", line, str(module), str(spec), told["compile"]],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        times: Times = json.loads(answer.stdout.splitlines()[-1])
        return times

    row = settled(in_turns) | {"tuned": chosen_by(told)}
    if line in mix.headline and (tvm := os.environ.get("TOKMILL_TVM_PYTHON")):
        ended = meta_schedule(tvm, line, budget, folder, seed)
        row["ns"] |= {"MetaSchedule": ended} if ended else {}
    return row


def settled(in_turns: Callable[[], Times]) -> Row:
    """Return the times of a comparison, or of a second one if the tuned one was slower.

    Noise makes some of many rows slower, and a second time seldom the same ones.
    """
    first = in_turns()
    return {"ns": in_turns(), "first": first} if behind(first) > SLOWER else {"ns": first}


def behind(times: Times) -> float:
    """Return how many times the default's time the tuned one takes."""
    return times["tuned"] / times["default"]


def commanded(line: str, folder: Path, budget: int, seed: int) -> dict[str, Any]:
    """Return what `tokmill rl tune` says of an operation."""
    spec = folder / f"{stem(line, seed)}.spec.mlir"
    spec.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tokmill", "rl", "tune", line, "--json", "--quiet", "-o", str(spec),
         "--evaluations", str(budget), "--minutes", str(LIMIT), "--seed", str(seed),
         *(["--target-cpu", TARGET] if TARGET else [])],
        check=True,
        capture_output=True,
        text=True,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def chosen_by(told: dict[str, Any]) -> str:
    """Return what the command chose, in words."""
    given = [flag for flag in told["flags"] if flag not in target()]
    named = next((name for name, flags in FLAGS.items() if list(flags) == given), "")
    return ("channels last, " * told["channels_last"]) + named + (" + tiles" * bool(told["spec"]))


def meta_schedule(python: str, line: str, budget: int, folder: Path, seed: int = 0) -> float | None:
    """Return the CPU time in nanoseconds of an operation that TVM tuned; None after `TVM_LIMIT`."""
    script = Path(__file__).parent / "peers" / "tvm_schedule.py"
    with tempfile.TemporaryDirectory(dir=folder) as work:
        running = subprocess.Popen(
            [python, script, str(budget), str(seed + 1), work, line],
            env=os.environ | {"TVM_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = running.communicate(timeout=60 * TVM_LIMIT)
        except subprocess.TimeoutExpired:
            # With it go the processes that compile for it.
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            print(f"TVM did not end in {TVM_LIMIT} minutes: {line}", file=sys.stderr)
            return None
    if running.returncode:
        raise SystemExit(f"TVM ended with {running.returncode}: {line}")
    return float(json.loads(said.splitlines()[-1])["ns"])


def geometric(values: Sequence[float], weights: Sequence[float] = ()) -> float:
    """Return the geometric mean, weighted if weights are given."""
    given = weights or [1.0] * len(values)
    logs = (weight * math.log(value) for value, weight in zip(values, given, strict=True))
    return math.exp(sum(logs) / sum(given))


def ranged(values: Sequence[float]) -> str:
    """Return the geometric mean over seeds, and their range."""
    text = f"{geometric(values):.2f}"
    return text if len(values) < 2 else f"{text} ({min(values):.2f} to {max(values):.2f})"


def middle(found: Sequence[Row]) -> Times:
    """Return the geometric means over seeds of the times of those that each seed has."""
    names = [name for name in found[0]["ns"] if all(name in row["ns"] for row in found)]
    return {name: geometric([row["ns"][name] for row in found]) for name in names}


def ratios(times: Times) -> dict[str, float]:
    """Return contestant → how many times as fast as it the tuned one is."""
    flags = min(times[name] for name in FLAGS if name in times)
    others = {name: times[name] for name in COMPARED[1:] if name in times}
    return {name: time / times["tuned"] for name, time in {"best flags": flags, **others}.items()}


COMPARED = ("best flags", "OpenBLAS", "torch", "default", "tiles", "MetaSchedule")
"""The first three have columns."""


def table(rows: dict[str, list[Row]], weights: dict[str, float]) -> list[str]:
    """Return rows of times in ms, and weighted geometric means.

    `rows`: line → a row for each seed.
    """
    times = {line: middle(found) for line, found in rows.items()}
    others = ["OpenBLAS", "torch"]
    if any("MetaSchedule" in one for one in times.values()):
        others.append("MetaSchedule")
    names = ["tuned", "tiles", *FLAGS, *others]
    made = [
        "| ms, CPU time of one thread | "
        + " | ".join(names)
        + "".join(f" | × {name}" for name in COMPARED[:3])
        + " | the command chose |",
        "|---" * (len(names) + 5) + "|",
    ]
    gains = {line: [ratios(row["ns"]) for row in found] for line, found in rows.items()}
    for line, found in rows.items():
        cells = [f"{times[line][name] / 1e6:.3f}" if name in times[line] else "–" for name in names]
        for name in COMPARED[:3]:
            each = [one[name] for one in gains[line] if name in one]
            cells.append(ranged(each) if each else "–")
        chosen = dict.fromkeys(row["tuned"] for row in found)
        made.append(f"| {line} | " + " | ".join([*cells, " / ".join(chosen)]) + " |")
    return [*made, "", *means(gains, weights), *regressions(rows), *beside_peak(times, weights)]


def means(gains: dict[str, list[dict[str, float]]], weights: dict[str, float]) -> list[str]:
    """Return the geometric means over operations; of several seeds with their range."""
    said = []
    for name in COMPARED:
        lines = [line for line, found in gains.items() if all(name in one for one in found)]
        if lines:
            given = [weights[line] for line in lines]
            seeds = range(len(gains[lines[0]]))
            each = [geometric([gains[line][seed][name] for line in lines], given) for seed in seeds]
            said.append(f"{ranged(each)} × {name}")
    count = len(next(iter(gains.values())))
    over = f", over {count} seeds with their range" if count > 1 else ""
    weighted = ", weighted" if len(set(weights.values())) > 1 else ""
    return [f"Geometric means of the tuned one's speed{weighted}{over}: {', '.join(said)}."]


def regressions(rows: dict[str, list[Row]]) -> list[str]:
    """Return which operations are slower than the default, and which were compared twice."""

    def named(line: str, seed: int) -> str:
        return f"{line}, seed {seed}" if len(rows[line]) > 1 else line

    each = [(named(line, seed), row) for line, found in rows.items()
            for seed, row in enumerate(found)]  # fmt: skip
    slower = [name for name, row in each if behind(row["ns"]) > SLOWER]
    twice = [
        f"{name} ({behind(row['first']):.2f} times its time, then {behind(row['ns']):.2f})"
        for name, row in each
        if "first" in row
    ]
    made = [f"Slower than the default by over {SLOWER - 1:.0%}: {'; '.join(slower) or 'none'}."]
    if twice:
        made.append(
            "What came out so was compared once more in a fresh process, and the second result is "
            f"shown: {'; '.join(twice)}. All others were compared once."
        )
    return made


def beside_peak(times: dict[str, Times], weights: dict[str, float]) -> list[str]:
    """Return how near to the processor's peak products and convolutions are."""
    known = {line: flops(line) for line in times if flops(line)}
    if not known:
        return []
    most = peak.peak(TARGET or "native") / 1e9
    shares = {
        name: [
            flops / min(times[line][one] for one in names if one in times[line]) / most
            for line, flops in known.items()
        ]
        for name, names in (("best flags", tuple(FLAGS)), ("tuned", ("tuned",)))
    }
    given = [weights[line] for line in known]
    said = ", ".join(
        f"{name} {geometric(found, given):.0%} of it ({min(found):.0%} to {max(found):.0%})"
        for name, found in shares.items()
    )
    return [
        f"The peak of one core is {most:.1f} GFLOP/s (`benchmarks/peak.py`). In geometric mean "
        f"over the {len(known)} products and convolutions: {said}."
    ]


def flops(line: str) -> float:
    """Return the multiplications and sums of a product or convolution; 0 for all else."""
    name, *words = line.split()
    if "," in line:
        return 0.0
    sizes = list(map(int, words))
    if name in ("matmul", "batch_matmul"):
        return 2.0 * math.prod(sizes)
    if name.startswith("conv_2d"):
        batch, channels, side, filters, window = sizes[:5]
        out = (side - window) // (sizes[5] if len(sizes) > 5 else 1) + 1
        return 2.0 * batch * out * out * filters * channels * window * window
    return 0.0


def searched(line: str, cache: Path, budget: int, seed: int, module: Path, spec: Path) -> None:
    """Search an operation; write it, and the spec of the winner, which is empty if none gains."""
    from tokmill.mlir import search
    from tokmill.mlir.iree.tiles import IreeSpace
    from tokmill.mlir.measure import Measurements, Settings
    from tokmill.mlir.modules import problem

    given, space = problem.of_line(line), IreeSpace(target())
    with Measurements(Settings(), cache, space) as measure:
        trials = list(search.evolution(given, measure, budget, seed))
        # Noise hides small gains from a single trial: the fastest three are measured again.
        ranked = sorted(
            (each for each in trials if each.result.status == "ok" and each.schedule),
            key=lambda each: -each.result.ratio,
        )
        best = search.confirmed(given, [each.schedule for each in ranked[:3]] or [()], measure)
        gains = best.result.status == "ok" and best.result.gain > 1.02
        text = space.text(measure.problem(given), best.schedule) if gains else ""
    module.write_text(given.text)
    spec.write_text(text)


def contenders(line: str, module: Path, spec: Path, command: str) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by its name; `command` compiles what was tuned."""
    from tokmill.mlir.iree import compiler, executor

    entry, inputs = executor.inputs(module.read_text(), 0)
    known = module.with_suffix(".known.mlir")
    known.write_text(compiler.known(module.read_text()))
    _, tuned, _, _, *flags = shlex.split(command)
    lines = {
        name: [str(known), *compiler.complete((*target(), *extra))] for name, extra in FLAGS.items()
    }
    lines["tuned"] = [tuned, *flags]
    if spec.read_text():
        lines["tiles"] = [*lines["default"], f"--iree-codegen-tuning-spec-path={spec}"]
    found: dict[str, Callable[[], Any]] = {}
    for name, words in lines.items():
        code = module.with_suffix(f".{name.replace(' ', '-')}.vmfb")
        made = subprocess.run(
            [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile", *words,
             "-o", str(code)],
            capture_output=True,
        )  # fmt: skip
        if made.returncode == 0:
            program = executor.Program(code.read_bytes(), inputs, entry)
            found[name] = program._call
    found.setdefault("tiles", found["default"])
    return found | peers(line, inputs)


def peers(line: str, inputs: list[np.ndarray]) -> dict[str, Callable[[], Any]]:
    """Return numpy's and torch's functions for an operation."""
    import torch
    import torch.nn.functional as functions

    torch.set_num_threads(1)
    name, *sizes = line.split()
    tensors = [torch.from_numpy(one) for one in inputs]
    if "matmul" in name:
        return {
            "OpenBLAS": lambda: np.matmul(*inputs),
            "torch": lambda: torch.matmul(*tensors),
        }
    if name.startswith("conv"):
        stride = int(sizes[5]) if len(sizes) > 5 else 1
        image, kernel = tensors
        if name.endswith("nhwc"):
            # Of the shapes that torch wants, in the same order in memory as IREE's.
            image = image.permute(0, 3, 1, 2)
            kernel = kernel.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
        return {"torch": lambda: functions.conv2d(image, kernel, stride=stride)}
    if name == "pooling":
        window, stride = int(sizes[3]), int(sizes[4])
        return {"torch": lambda: functions.max_pool2d(tensors[0], window, stride)}
    if name == "reduce":
        return {"torch": lambda: tensors[0].sum(-1)}
    if name == "relu":
        return {"torch": lambda: tensors[0].relu()}
    # The module has no subtraction of the largest, so torch's softmax would do more.
    return {"torch": lambda: (powers := tensors[0].exp()) / powers.sum(-1, keepdim=True)}


def timed(line: str, module: Path, spec: Path, command: str) -> dict[str, float]:
    """Return the least CPU time of each contender in nanoseconds, taken in turns."""
    import torch

    found = contenders(line, module, spec, command)
    least = dict.fromkeys(found, math.inf)
    with torch.inference_mode():
        for function in found.values():
            function()
        for _ in range(ROUNDS):
            for name, function in found.items():
                since = time.thread_time_ns()
                function()
                first = time.thread_time_ns() - since
                times = max(1, min(200, int(1e6 / max(first, 1))))
                since = time.thread_time_ns()
                for _ in range(times):
                    function()
                least[name] = min(least[name], (time.thread_time_ns() - since) / times)
    return least


if __name__ == "__main__":
    if sys.argv[1:2] == ["--time"]:
        print(json.dumps(timed(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("cache", type=Path)
        parser.add_argument("budget", type=int, nargs="?", default=64)
        parser.add_argument("lines", nargs="*")
        parser.add_argument("--seeds", type=int, default=1)
        given = parser.parse_intermixed_args()
        print("\n".join(main(given.cache, tuple(given.lines), given.budget, given.seeds)))
