"""Training a GPT-2: tokmill beside transformers' GPT-2 under its Trainer, in turns.

One file of tokens, one size, one batch, one schedule. The tokens are one record, so both see rows
of one document. The gate of the times is the loss: after as many tokens it has to be as low, on the
same held-out tokens.

    python benchmarks/decoder_training.py CACHE
"""

import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import corpus
from jsonl_store import remove, tokmill
from measure import TOKMILL, Contestant, interleave, run_once
from tokmill import Store
from tokmill.training.runs.trackers import METRICS, read_metrics

PEER = Path(__file__).parent / "peers" / "hf_trainer.py"
RECORD = 16_777_216
"""The longest record there can be; the tokens of the benchmark are fewer."""
SEEDS, LOSS_STEPS, HELD_OUT = (0, 1, 2), 80, 100
"""For the loss: seeds, steps, and rows that nothing is learned from."""


@dataclass(frozen=True)
class Setting:
    """A training: sizes as GPT-2's, the rest as in a recipe."""

    dim: int = 256
    layers: int = 6
    heads: int = 8
    length: int = 256
    batch: int = 8
    steps: int = 40
    lr: float = 1e-3
    warmup: int = 50
    precision: str = "fp32"
    seed: int = 0


def tokens(cache: Path, held_out: int) -> Path:
    """Return a folder with `train.bin`, `val.bin` and a store of each; made where missing.

    `held_out` is the number of tokens in `val`.
    """
    folder = cache / f"decoder-{held_out}"
    if (folder / "val" / "manifest.json").exists():
        return folder
    corpus.main(cache, [40])
    remove(folder)
    folder.mkdir(parents=True)
    run(*tokmill(cache / "text-40.jsonl", cache / "tokenizer.json", folder / "all"))
    run(TOKMILL, "store", "export", "bin", folder / "all", "-o", folder / "all.bin")
    ids = np.fromfile(folder / "all.bin", np.uint16)[:RECORD]
    ids[:-held_out].tofile(folder / "train.bin")
    ids[-held_out:].tofile(folder / "val.bin")
    for part in ("train", "val"):
        store = folder / part
        run(TOKMILL, "build", "bin", f"{store}.bin", "-o", store, "--record-tokens", RECORD, "-q")
    return folder


def run(*command: object) -> None:
    """Run a command; its failure ends the benchmark."""
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def ours(folder: Path, setting: Setting, val: bool) -> Contestant:
    """Return `tokmill train` of a GPT-2."""
    keys = {
        "model.dim": setting.dim, "model.layers": setting.layers, "model.heads": setting.heads,
        "model.norm": "layer", "model.position": "learned", "model.context": setting.length,
        "model.activation": "gelu_tanh", "model.bias": "true",
        "task.length": setting.length, "data.batch": setting.batch, "data.seed": setting.seed,
        "optim.lr": setting.lr, "optim.warmup": setting.warmup, "optim.schedule": "cosine",
        "optim.floor": 0.1, "run.seed": setting.seed, "run.steps": setting.steps,
        "run.precision": setting.precision, "run.device": "cpu", "run.log_every": 10,
        "run.checkpoint_every": 0, "run.eval_every": 0, "run.eval_rows": 0,
    }  # fmt: skip
    sets = [argument for key, value in keys.items() for argument in ("--set", f"{key}={value}")]
    out = folder / "run"
    command = [TOKMILL, "train", str(folder / "train"), "-o", str(out), *sets]
    if val:
        command += ["--val", str(folder / "val")]
    return Contestant("tokmill train", command, lambda: remove(out))


def theirs(folder: Path, setting: Setting, val: bool) -> Contestant:
    more = {
        "train": str(folder / "train.bin"),
        "val": str(folder / "val.bin") if val else "",
        "out": str(folder / "peer.json"),
        "vocab": vocabulary(folder),
    }
    path = folder / "settings.json"

    def before() -> None:
        remove(folder / "peer.json")
        remove(folder / "peer.json-trainer")
        path.write_text(json.dumps(asdict(setting) | more))

    return Contestant("transformers Trainer", [sys.executable, str(PEER), str(path)], before)


def vocabulary(folder: Path) -> int:
    """Return how many ids the model gets: up to the largest one of the training tokens."""
    return int(Store(folder / "train").manifest.ranges["token"][1]) + 1


def our_rate(folder: Path, setting: Setting) -> float:
    """Return tokens a second after the first logged steps."""
    lines = [line for line in read_metrics(folder / "run" / METRICS) if "targets" in line]
    first, last = next(line for line in lines if line["step"] > 1), lines[-1]
    return float((last["targets"] - first["targets"]) / (last["seconds"] - first["seconds"]))


def their_rate(folder: Path, setting: Setting) -> float:
    """Return tokens a second after the steps that tokmill leaves out too."""
    times = json.loads((folder / "peer.json").read_text())["times"]
    first = min(10, setting.steps) - 1
    done = (len(times) - 1 - first) * setting.batch * setting.length
    return float(done / (times[-1] - times[first]))


def speed(folder: Path, setting: Setting, rounds: int) -> list[str]:
    pair = [
        (ours(folder, setting, val=False), our_rate),
        (theirs(folder, setting, val=False), their_rate),
    ]
    rates: list[list[float]] = [[], []]
    for _ in range(rounds):
        for (contestant, rate), found in zip(pair, rates, strict=True):
            interleave([contestant], 1)
            found.append(rate(folder, setting))
    total = setting.steps * setting.batch * setting.length
    peer = max(rates[1])
    return [
        f"| {contestant.name}, {setting.precision} | {contestant.best:.1f} | "
        f"{total / contestant.best:,.0f} | {max(found):,.0f} | {max(found) / peer:.2f} | "
        f"{contestant.memory / 2**20:.0f} |"
        for (contestant, _), found in zip(pair, rates, strict=True)
    ]


def losses(folder: Path, setting: Setting) -> tuple[list[float], list[float]]:
    mine, peer = [], []
    for seed in SEEDS:
        seeded = replace(setting, seed=seed)
        run_once(ours(folder, seeded, val=True))
        logged = read_metrics(folder / "run" / METRICS)
        mine.append(next(line["val_loss"] for line in logged if "val_loss" in line))
        run_once(theirs(folder, seeded, val=True))
        peer.append(json.loads((folder / "peer.json").read_text())["loss"])
    return mine, peer


def main(cache: Path, rounds: int = 2) -> list[str]:
    setting = Setting()
    held_out = HELD_OUT * setting.length
    folder = tokens(cache, held_out + 1)
    mine, peer = losses(folder, replace(setting, steps=LOSS_STEPS))
    lines = [
        f"GPT-2 of width {setting.dim}, {setting.layers} layers and {setting.heads} heads, "
        f"{vocabulary(folder):,} ids, rows of {setting.length} tokens, {setting.batch} a step, "
        f"{setting.steps} steps; best of {rounds}, in turns. The rate leaves out the first 10 "
        "steps and what comes before and after.",
        "",
        "| program | seconds | tokens/s | rate, tokens/s | rate / Trainer | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for precision in ("fp32", "bf16"):
        lines += speed(folder, replace(setting, precision=precision), rounds)
    total = LOSS_STEPS * setting.batch * setting.length
    lines += [
        "",
        f"| program, loss on {held_out:,} held-out tokens after {total:,} | mean | spread |",
        "|---|---|---|",
    ]
    for name, found in (("tokmill train", mine), ("transformers Trainer", peer)):
        spread = max(found) - min(found)
        lines.append(
            f"| {name}, {len(found)} seeds | {statistics.mean(found):.4f} | {spread:.4f} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]))))
