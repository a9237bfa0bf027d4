"""`make bench`: every figure of this project, measured here and now, into benchmarks/RESULTS.md."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import bpe_training
import corpus
import decoder_training
import feed_batches
import jsonl_store
import many_shards
import packing

HERE = Path(__file__).parent


def machine() -> str:
    """Describe the machine in a line."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, {memory:.0f} GiB, Python {platform.python_version()}"


def main(cache: Path, peers_python: str) -> None:
    """Run all benchmarks and write the results."""
    corpus.main(cache, [40, 400])
    lines = [
        "# Results",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}. `make bench` makes this file.",
        "",
        "Times are of whole processes, imports and fsync included; contestants take turns and the "
        "best round counts. Machines are noisy: trust ratios within one table.",
        "The text is source code and documentation found on the machine (`benchmarks/corpus.py`).",
        "",
        "## BPE training",
        "",
        *bpe_training.main(cache, peers_python, 40, 8192, 3),
        "",
        "## JSON Lines to a store, ids verified equal",
        "",
        *jsonl_store.main(cache, peers_python, 40, 5, slow=True),
        "",
        *jsonl_store.main(cache, peers_python, 400, 5, slow=False),
        "",
        *jsonl_store.parquet(cache, 400, 5),
        "",
        "## Many shards",
        "",
        *many_shards.main(cache),
        "",
        "## Batches",
        "",
        *feed_batches.main(cache, peers_python),
        "",
        "## Packing",
        "",
        *packing.main(),
        "",
        "## Training a GPT-2",
        "",
        *decoder_training.main(cache),
    ]
    (HERE / "RESULTS.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
