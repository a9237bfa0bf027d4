"""What a training costs that compares its store with its digests: steps a second with and without.

The store has about 200 MB. The model is small and the steps are few, so hashing, which a thread
does once, beside the first steps, takes as large a share of the run as it may. The gate: both end
with the same weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from decoder_training import TOKMILL, run
from jsonl_store import remove
from measure import Contestant, interleave

IDS, SIZE, RECORD = 105_000_000, 4096, 65_536
"""Ids of 2 bytes, how many there are, and how many make a record."""
STEPS, ROUNDS = 300, 5
LOGGED = "metrics.jsonl"


def store_of(cache: Path) -> Path:
    """Return a store of random ids; made where missing."""
    store, flat = cache / "check-store", cache / "check.bin"
    if not (store / "manifest.json").exists():
        ids = np.random.default_rng(0).integers(0, SIZE, IDS, dtype=np.uint16)
        ids.tofile(flat)
        run(TOKMILL, "build", "bin", flat, "-o", store, "--record-tokens", RECORD, "-q")
        flat.unlink()
    return store


def training(store: Path, out: Path, verify: bool) -> Contestant:
    """Return a training in a process of its own; nothing is remembered from one to the next."""
    keys = {
        "model.dim": 64, "model.layers": 2, "model.heads": 2, "task.length": 128, "data.batch": 8,
        "run.steps": STEPS, "run.device": "cpu", "run.checkpoint_every": 0, "run.log_every": 1,
        "data.verify": str(verify).lower(),
    }  # fmt: skip
    sets = [argument for key, value in keys.items() for argument in ("--set", f"{key}={value}")]
    command = [TOKMILL, "train", str(store), "-o", str(out), "-q", *sets]
    return Contestant(f"data.verify={keys['data.verify']}", command, lambda: remove(out))


def seconds_of_steps(out: Path) -> float:
    """Return the seconds that a run spent between its first line of metrics and its last."""
    lines = [json.loads(line) for line in (out / LOGGED).read_text().splitlines()]
    return float(lines[-1]["seconds"] - lines[0]["seconds"])


def main(cache: Path, rounds: int = ROUNDS) -> list[str]:
    """Measure; return the section for RESULTS.md."""
    store = store_of(cache)
    places = {verify: cache / f"check-run-{verify}" for verify in (False, True)}
    pair = {verify: training(store, out, verify) for verify, out in places.items()}
    steps: dict[bool, list[float]] = {verify: [] for verify in places}
    for _ in range(rounds):
        interleave(list(pair.values()), 1)
        for verify, out in places.items():
            steps[verify].append(seconds_of_steps(out))
        files = [(out / "model/model.safetensors").read_bytes() for out in places.values()]
        if files[0] != files[1]:
            raise SystemExit("the two trainings end with other weights; no figure")
    size = sum(path.stat().st_size for path in (store / "shards").glob("*.safetensors"))
    best = {verify: min(found) for verify, found in steps.items()}
    for out in places.values():
        remove(out)
    return [
        f"{STEPS} steps of 8 rows of 128 ids, 2 blocks, a store of {size / 1e6:.0f} MB "
        f"that is hashed once beside them; best of {rounds} rounds, in turns.",
        "",
        "| training | steps/s | against without | seconds of the whole process |",
        "|---|---|---|---|",
        *(
            f"| `{pair[verify].name}` | {(STEPS - 1) / best[verify]:.1f} | "
            f"{best[False] / best[verify]:.3f} | {pair[verify].best:.2f} |"
            for verify in places
        ),
    ]


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]))))
