"""Models from end to end by IREE: its default, its flags, `tokmill rl tune`, beside torch.

    python benchmarks/tuning_models.py CACHE [MINUTES [NAME...]]

ResNet-18, MobileNetV2 and a small GPT-2 with random weights are written as ONNX to CACHE/mlir, and
tuned for MINUTES each (6), or a tuning that is there goes on. Then each is compiled anew by the
printed line of `iree-compile`, and all contestants are timed in turns in one fresh process on the
same input: CPU time of one thread, the least of the rounds. Results are compared with torch's.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("resnet18", "mobilenet_v2", "gpt2")
FLAGS = {
    "default": "",
    "O3": "--iree-opt-level=O3",
    "data tiling": "--iree-opt-level=O3 --iree-opt-data-tiling",
    "im2col": "--iree-opt-level=O3 --iree-global-opt-use-im2col-for-convs",
}
ROUNDS = 12
WORST = 1e-3
"""Largest difference to torch's results, in units of the largest one."""
HELPERS = Path(__file__).parent.parent / "tests" / "helpers"


def main(cache: Path, minutes: float = 6.0, names: tuple[str, ...] = NAMES) -> list[str]:
    """Return the table of the models."""
    folder = cache / "mlir" / "tuned"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        told = tuned(name, folder, minutes)
        environment = dict(os.environ)
        for one in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[one] = "1"
        answer = subprocess.run(
            [sys.executable, __file__, "--time", name, str(folder)],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        rows.append((name, told, json.loads(answer.stdout.splitlines()[-1])))
    return table(rows)


def tuned(name: str, folder: Path, minutes: float) -> dict[str, Any]:
    """Tune a model; return what the command says, which is kept as NAME.json."""
    path = folder.parent / f"{name}.onnx"
    if not path.exists():
        sys.path.insert(0, str(HELPERS))
        import onnx_models

        onnx_models.write(name, folder.parent)
    done = subprocess.run(
        [sys.executable, "-m", "tokmill", "rl", "tune", str(path), "--json", "--quiet",
         "-o", str(folder / f"{name}.spec.mlir"), "--minutes", str(minutes)],
        check=True,
        capture_output=True,
        text=True,
    )  # fmt: skip
    (folder / f"{name}.json").write_text(done.stdout)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def table(rows: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return rows of times in ms, and what was obeyed."""
    names = ["tuned", "tuned flags", *FLAGS, "torch"]
    made = [
        "| ms, CPU time of one thread | "
        + " | ".join(names)
        + " | × default | × best flags of IREE | × torch | dispatches that obey |",
        "|---" * (len(names) + 5) + "|",
    ]
    notes = []
    for name, told, answer in rows:
        times, errors = answer["times"], answer["errors"]
        flags = min(times[one] for one in FLAGS if one in times)
        cells = [f"{times[one] / 1e6:.2f}" if one in times else "–" for one in names]
        cells += [f"{other / times['tuned']:.2f}" for other in
                  (times["default"], flags, times["torch"])]  # fmt: skip
        whole = told["whole"]
        obey = f"{whole['obeyed']} of {whole['dispatches']}" if told["spec"] else "no spec"
        cells.append(obey)
        made.append(f"| {name} | " + " | ".join(cells) + " |")
        layout = "channels last, " if told["channels_last"] else ""
        worst = max(errors.values())
        notes.append(
            f"{name}: tuned with {layout}{' '.join(told['flags']) or 'no flags'}; "
            f"results differ from torch's by {worst:.1e} of the largest at most"
            + ("" if worst <= WORST else ", **which is too much**")
            + "."
        )
        gained = sum(part["status"] == "tuned" for part in told["operations"])
        slower = [part for part in told["operations"]
                  if part["status"] == "tuned" and part["speedup"] < 0.98]  # fmt: skip
        notes.append(
            f"{name}: {gained} of {len(told['operations'])} dispatches gain, {len(slower)} of "
            "them are over 2 % slower than the default."
        )
    return [*made, "", *(f"- {note}" for note in notes)]


def contenders(name: str, folder: Path) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """Return what is timed by its name, and how to get what each computes."""
    sys.path.insert(0, str(HELPERS))
    import torch

    import onnx_models
    from tokmill.mlir.iree import compiler, executor

    torch.set_num_threads(1)
    torch.manual_seed(onnx_models.SEED)
    model, example = onnx_models.MODELS[name]()
    model = model.eval()
    told = json.loads((folder / f"{name}.json").read_text())
    lines = {one: flags.split() for one, flags in FLAGS.items()}
    spec = folder / f"{name}.spec.mlir"
    plain = folder / f"{name}.plain.mlir"
    lines["tuned flags"] = told["flags"]
    lines["tuned"] = told["flags"]
    if told["spec"]:
        lines["tuned"] = [*told["flags"], f"--iree-codegen-tuning-spec-path={spec}"]
    module = Path(shlex.split(told["compile"])[1])
    if not plain.exists():
        from tokmill.mlir.modules import importing

        plain.write_text(importing.of_onnx(folder.parent / f"{name}.onnx"))
    found: dict[str, Callable[[], Any]] = {}
    results: dict[str, Callable[[], np.ndarray]] = {}
    for one, flags in lines.items():
        code = folder / f"{name}.{one.replace(' ', '-')}.vmfb"
        text = module if one.startswith("tuned") else plain
        made = subprocess.run(
            [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile", str(text),
             "-o", str(code), *compiler.complete(flags)],
            capture_output=True,
        )  # fmt: skip
        if made.returncode:
            continue
        program = executor.Program(
            code.read_bytes(),
            [example.numpy()],
            "",
            str(folder / f"{name}.spec.mlir.model.irpa"),
            text.read_text(),
        )
        found[one] = program._call
        results[one] = lambda program=program: program.outputs()[0]
    found["torch"] = lambda: model(example).logits
    results["torch"] = lambda: model(example).logits.numpy()
    return found, results


def timed(name: str, folder: Path) -> dict[str, dict[str, float]]:
    """Return the least CPU time of each contender in nanoseconds, and how far it is from torch."""
    import torch

    found, results = contenders(name, folder)
    least = dict.fromkeys(found, math.inf)
    with torch.inference_mode():
        wanted = results["torch"]()
        scale = float(np.abs(wanted).max())
        errors = {
            one: float(np.abs(make() - wanted).max()) / scale
            for one, make in results.items()
            if one != "torch"
        }
        for _ in range(ROUNDS):
            for one, function in found.items():
                since = time.thread_time_ns()
                function()
                least[one] = min(least[one], time.thread_time_ns() - since)
    return {"times": least, "errors": errors}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--time"]:
        print(json.dumps(timed(sys.argv[2], Path(sys.argv[3]))))
    else:
        spent = float(sys.argv[2]) if len(sys.argv) > 2 else 6.0
        print("\n".join(main(Path(sys.argv[1]), spent, tuple(sys.argv[3:]) or NAMES)))
