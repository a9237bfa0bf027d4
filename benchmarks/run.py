"""`make bench`: every figure of this project, measured here and now, into benchmarks/RESULTS.md."""

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import bpe_training
import corpus
import decoder_training
import diffing
import feed_batches
import jsonl_store
import lifting
import policies
import sampling
import sampling_cpi
import schedules
import tuning_models
import x86_models
import x86_store

HERE = Path(__file__).parent


def machine() -> str:
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, {memory:.0f} GiB, Python {platform.python_version()}"


HEAD = """\
# Results

`make bench` makes this file, `make bench SECTIONS="batches sampling"` some of its sections.

Times are of whole processes, imports and fsync included, unless a section says otherwise;
the programs run in turns, and the best round counts. Machines are noisy: trust ratios within one
table. The text is source code and documentation found on the machine (`benchmarks/corpus.py`).
"""


def sections(cache: Path, peers_python: str) -> dict[str, tuple[str, Callable[[], list[str]]]]:
    """Return short name → (title, what measures it and returns its lines), in their order."""
    return {
        "bpe": ("BPE training", lambda: bpe_training.main(cache, peers_python, 40, 8192, 3)),
        "jsonl": (
            "JSON Lines to a store, ids verified equal",
            lambda: [
                *jsonl_store.main(cache, peers_python, 40, 5, slow=True),
                "",
                *jsonl_store.main(cache, peers_python, 400, 5, slow=False),
                "",
                *jsonl_store.parquet(cache, 400, 5),
            ],
        ),
        "batches": ("Batches", lambda: feed_batches.main(cache, peers_python)),
        "decoder": ("Training a GPT-2", lambda: decoder_training.main(cache)),
        "sampling": ("Sampling", lambda: sampling.main(cache)),
        "lifting": (
            "Programs to functions and blocks",
            lambda: lifting.main(cache, peers_python),
        ),
        "sampling-cpi": (
            "CPI estimated from a few intervals",
            lambda: sampling_cpi.main(cache / "profiles"),
        ),
        "diffing": ("Diffing", lambda: diffing.main(cache, peers_python)),
        "schedules": (
            "Schedules: PPO and search",
            lambda: schedules.main(cache),
        ),
        "policies": ("Embeddings of schedule policies", policies.main),
        "tuning": (
            "Flags and layout of models for IREE",
            lambda: tuning_models.main(cache),
        ),
        "x86-models": (
            "RWKV-7 and a decoder on programs",
            lambda: x86_models.main(cache),
        ),
        "x86-store": ("x86 programs to a store", lambda: x86_store.main(cache)),
        "x86-machine": ("A whole machine to a store", lambda: x86_store.machine(cache)),
    }


def main(cache: Path, peers_python: str, wanted: list[str]) -> None:
    """Run the wanted benchmarks, all if none is named, and put their sections into the file."""
    table = sections(cache, peers_python)
    if unknown := set(wanted) - set(table):
        raise SystemExit(f"no such section: {', '.join(unknown)}; there are {', '.join(table)}")
    corpus.main(cache, [40, 400])
    results = HERE / "RESULTS.md"
    parts = results.read_text().split("\n## ")[1:] if results.exists() else []
    found = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}
    for name in wanted or table:
        title, measure = table[name]
        when = f"{time.strftime('%Y-%m-%d')}, {machine()}."
        found[title] = "\n".join([when, "", *measure()])
        print(f"## {title}\n\n{found[title]}\n", flush=True)
        known = [title for title, _ in table.values()]
        # Sections that other commands made stay, at the end.
        titles = sorted(found, key=lambda one: known.index(one) if one in known else len(known))
        text = HEAD + "".join(f"\n## {title}\n\n{found[title]}\n" for title in titles)
        results.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
