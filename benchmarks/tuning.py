"""Operations by IREE, tuned by the user's command, beside IREE's flags, OpenBLAS and torch.

    [TOKMILL_TVM_PYTHON=PYTHON] python benchmarks/tuning.py CACHE [BUDGET] [LINE...]

`tuned` is what `tokmill rl tune LINE --evaluations BUDGET` (64) gives: layout, flags and tiles.
`tiles` are the tiles alone, searched in IREE's space with as many evaluations. Then both, IREE's
default and its flags are compiled anew by `iree-compile`, and all are timed in turns in one fresh
process on one thread, CPU time, the least of the rounds: so that other work on the machine meets
all of them alike. TVM's MetaSchedule, which takes minutes for each, tunes the operations of
`HEADLINE` with as many trials, where a Python that has it is named; it is timed in a process of its
own. Times are kept, so that a run that was ended goes on; without LINEs the table has all.

With `TOKMILL_TARGET_CPU=x86-64-v3` all code is for processors without AVX-512, whatever this one
has, and OpenBLAS and torch use nothing wider either.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import peak
from tokmill.mlir.iree.model import FLAGS

HEADLINE = (
    "matmul 512 512 512",
    "matmul 128 3072 768",
    "conv_2d_nchw 1 64 58 64 3",
    "conv_2d_nhwc 1 64 58 64 3",
)
HELD_OUT = (
    "matmul 96 384 1536",
    "matmul 256 1000 512",
    "batch_matmul 8 128 128 64",
    "conv_2d_nchw 1 128 30 128 3",
    "conv_2d_nhwc 1 32 114 64 3 2",
    "pooling 1 64 114 3 2",
    "reduce 1024 1024",
    "softmax 256 1024",
)
"""All with the same weight."""
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
Row = dict[str, Any]
"""`ns`: contestant → time; `tuned`: what the command chose."""


def main(
    cache: Path, lines: tuple[str, ...] = (*HEADLINE, *HELD_OUT), budget: int = 64
) -> list[str]:
    """Return the table of the section."""
    folder = cache / "mlir"
    folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    for line in lines:
        kept = folder / f"{stem(line)}.{budget}.times.json"
        if not kept.exists():
            kept.write_text(json.dumps(compared(line, folder, budget)))
            print(line, kept.read_text(), file=sys.stderr, flush=True)
        rows[line] = json.loads(kept.read_text())
    return table(rows)


def stem(line: str) -> str:
    """Return how files of an operation begin."""
    return line.replace(" ", "_") + (f".{TARGET}" if TARGET else "")


def target() -> tuple[str, ...]:
    """Return IREE's flag that names the processor, if any."""
    from tokmill.mlir.iree.compiler import PROCESSOR

    return (f"{PROCESSOR}{TARGET}",) if TARGET else ()


def compared(line: str, folder: Path, budget: int) -> Row:
    """Tune an operation and time it beside the others."""
    spec = folder / f"{stem(line)}.tiles.spec.mlir"
    module = spec.with_name(spec.name.replace(".tiles.spec", ""))
    searched(line, folder / "measurements.db", budget, module, spec)
    told = commanded(line, folder, budget)
    environment = {name: value for name, value in os.environ.items()
                   if name != "OPENBLAS_CORETYPE"}  # fmt: skip
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = "1"
    if TARGET:
        environment |= NARROW
    answer = subprocess.run(
        [sys.executable, __file__, "--time", line, str(module), str(spec), told["compile"]],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    times = json.loads(answer.stdout.splitlines()[-1])
    if line in HEADLINE and (tvm := os.environ.get("TOKMILL_TVM_PYTHON")):
        ended = meta_schedule(tvm, line, budget, folder)
        times |= {"MetaSchedule": ended} if ended else {}
    return {"ns": times, "tuned": chosen_by(told)}


def commanded(line: str, folder: Path, budget: int) -> dict[str, Any]:
    """Return what `tokmill rl tune` says of an operation."""
    spec = folder / f"{stem(line)}.spec.mlir"
    spec.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tokmill", "rl", "tune", line, "--json", "--quiet", "-o", str(spec),
         "--evaluations", str(budget), "--minutes", str(LIMIT),
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


def meta_schedule(python: str, line: str, budget: int, folder: Path) -> float | None:
    """Return the CPU time in nanoseconds of an operation that TVM tuned; None after `TVM_LIMIT`."""
    script = Path(__file__).parent / "peers" / "tvm_schedule.py"
    with tempfile.TemporaryDirectory(dir=folder) as work:
        running = subprocess.Popen(
            [python, script, str(budget), "1", work, line],
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


def table(rows: dict[str, Row]) -> list[str]:
    """Return rows of times in ms, and geometric means."""
    others = ["OpenBLAS", "torch"]
    if any("MetaSchedule" in row["ns"] for row in rows.values()):
        others.append("MetaSchedule")
    names = ["tuned", "tiles", *FLAGS, *others]
    made = [
        "| ms, CPU time of one thread | "
        + " | ".join(names)
        + " | × best flags | × OpenBLAS | × torch | the command chose |",
        "|---" * (len(names) + 5) + "|",
    ]
    gains: dict[str, list[float]] = {
        name: [] for name in ("best flags", "OpenBLAS", "torch", "default", "tiles", "MetaSchedule")
    }
    for line, row in rows.items():
        times, tuned = row["ns"], row["ns"]["tuned"]
        ratios = {
            "best flags": min(times[name] for name in FLAGS if name in times) / tuned,
            **{name: times[name] / tuned for name in gains if name in times},
        }
        for name, ratio in ratios.items():
            gains[name].append(ratio)
        cells = [f"{times[name] / 1e6:.3f}" if name in times else "–" for name in names]
        cells += [f"{ratios[name]:.2f}" if name in ratios else "–" for name in list(gains)[:3]]
        made.append(f"| {line} | " + " | ".join([*cells, row["tuned"]]) + " |")
    text = ", ".join(
        f"{math.exp(sum(map(math.log, found)) / len(found)):.2f} × {name}"
        for name, found in gains.items()
        if found
    )
    made += ["", f"Geometric means of the tuned one's speed: {text}."]
    slower = [
        line for line, row in rows.items() if row["ns"]["tuned"] > 1.02 * row["ns"]["default"]
    ]
    made.append(f"Slower than the default by over 2 %: {', '.join(slower) or 'none'}.")
    return made + beside_peak(rows)


def beside_peak(rows: dict[str, Row]) -> list[str]:
    """Return how near to the processor's peak products and convolutions are."""
    known = {line: flops(line) for line in rows if flops(line)}
    if not known:
        return []
    most = peak.peak(TARGET or "native") / 1e9
    shares = {
        name: [
            flops / min(rows[line]["ns"][one] for one in names if one in rows[line]["ns"]) / most
            for line, flops in known.items()
        ]
        for name, names in (("best flags", tuple(FLAGS)), ("tuned", ("tuned",)))
    }
    said = ", ".join(
        f"{name} {math.exp(sum(map(math.log, found)) / len(found)):.0%} of it "
        f"({min(found):.0%} to {max(found):.0%})"
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


def searched(line: str, cache: Path, budget: int, module: Path, spec: Path) -> None:
    """Search an operation; write it, and the spec of the winner, which is empty if none gains."""
    from tokmill.mlir import search
    from tokmill.mlir.iree.tiles import IreeSpace
    from tokmill.mlir.measure import Measurements, Settings
    from tokmill.mlir.modules import problem

    given, space = problem.of_line(line), IreeSpace(target())
    with Measurements(Settings(), cache, space) as measure:
        trials = list(search.evolution(given, measure, budget, 0))
        # Noise hides small gains from a single trial: the fastest three are measured again.
        ranked = sorted(
            (each for each in trials if each.result.status == "ok" and each.schedule),
            key=lambda each: -each.result.speedup,
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
        budget = int(sys.argv[2]) if len(sys.argv) > 2 else 64
        chosen = tuple(sys.argv[3:]) or (*HEADLINE, *HELD_OUT)
        print("\n".join(main(Path(sys.argv[1]), chosen, budget)))
