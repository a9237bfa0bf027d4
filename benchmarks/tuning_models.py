"""Models from end to end by IREE: what `tokmill rl tune` finds, beside torch.

    python benchmarks/tuning_models.py CACHE [MINUTES]

ResNet-18, MobileNetV2 and a small GPT-2 with random weights are written as ONNX to CACHE/mlir, and
tuned in MINUTES each (6): the command times all sets of flags and layouts in turns, and then
onnxruntime and OpenVINO beside IREE's default. Then torch runs in a fresh process on one thread.
CPU time, the least of the rounds.
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import markdown

NAMES = ("resnet18", "mobilenet_v2", "gpt2")
ROUNDS = 12
HELPERS = Path(__file__).parent.parent / "tests" / "helpers"


def main(cache: Path, minutes: float = 6.0) -> list[str]:
    folder = cache / "mlir" / "tuned"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in NAMES:
        told = tuned(name, folder, minutes)
        words = [sys.executable, __file__, "--torch", name]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        rows.append((name, told, float(done.stdout)))
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
         "-o", str(folder / f"{name}"), "--max-time", f"{60 * minutes}s"],
        check=True,
        capture_output=True,
        text=True,
    )  # fmt: skip
    (folder / f"{name}.json").write_text(done.stdout)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def table(rows: list[tuple[str, dict[str, Any], float]]) -> list[str]:
    timed = [told["tried"] + told["engines"] for _, told, _ in rows]
    names = list(dict.fromkeys(one["name"] for row in timed for one in row))
    cells = []
    for (name, told, torch), row in zip(rows, timed, strict=True):
        times = {one["name"]: one["milliseconds"] for one in row if one["status"] == "ok"}
        ours = [f"{times[one]:.2f}" if one in times else "–" for one in names]
        gain = told["default_milliseconds"] / told["milliseconds"]
        cells.append([name, *ours, f"{torch:.2f}", told["best"], f"{gain:.2f}"])
    head = ["ms, CPU time of one thread", *names, "torch", "chosen", "× default"]
    return markdown(head, cells)


def time_torch(name: str) -> float:
    """Return the least CPU milliseconds of a model by torch on one thread."""
    sys.path.insert(0, str(HELPERS))
    import torch

    import onnx_models

    torch.set_num_threads(1)
    torch.manual_seed(onnx_models.SEED)
    model, example = onnx_models.MODELS[name]()
    model, least = model.eval(), math.inf
    with torch.inference_mode():
        for _ in range(ROUNDS):
            since = time.thread_time_ns()
            model(example)
            least = min(least, time.thread_time_ns() - since)
    return least / 1e6


if __name__ == "__main__":
    if sys.argv[1:2] == ["--torch"]:
        print(time_torch(sys.argv[2]))
    else:
        print("\n".join(main(Path(sys.argv[1]), *map(float, sys.argv[2:]))))
