"""A BERT of TensorFlow of 440 MB, read without TensorFlow: seconds and memory.

The checkpoint has the variables of BERT base with random values, and is written first, by the small
writer of the tests. It is in the page cache when it is read. Reading the file through, in blocks of
1 MiB, is what no reader can beat. The gate is that every value read is what was written.

    python benchmarks/bert_checkpoint.py

Each way runs in a process of its own, in turns; its peak is what it adds to that process after the
imports, mapped pages of the file counted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from measure import highest
from tokmill.models.public.google_bert import GoogleBert, variables
from tokmill.training.runs.tensorflow.google_bert_run import import_bert, read_bert
from tokmill.training.runs.tensorflow.tensor_bundle import TensorBundle

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

CONFIG = GoogleBert(vocab_size=30_522, type_vocab_size=2)
NAME, BLOCK = "bert_model.ckpt", 1 << 20
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make(folder: Path) -> float:
    """Write the checkpoint; return the sum of its values."""
    from bundle_writer import write_bundle

    random, tensors = np.random.default_rng(0), {}
    for one in variables(CONFIG.num_hidden_layers):
        shape = [getattr(CONFIG, n) if isinstance(n, str) else n for n in one.shape]
        tensors[one.name] = random.standard_normal(shape, np.float32)
    write_bundle(folder / NAME, tensors)
    words = [*SPECIALS, *(f"w{number}" for number in range(CONFIG.vocab_size - len(SPECIALS)))]
    (folder / "vocab.txt").write_text("\n".join(words))
    keys = {name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}
    (folder / "bert_config.json").write_text(json.dumps(keys))
    return total(tensors.values())


def total(arrays: object) -> float:
    """Return the sum of all values, one array after the other."""
    return float(sum(np.asarray(one).sum(dtype=np.float64) for one in arrays))  # type: ignore[attr-defined]


def read_through(folder: Path) -> float:
    """Read the file in blocks."""
    with open(next(folder.glob("*.data-*")), "rb") as file:
        while file.read(BLOCK):
            pass
    return np.nan


def each(folder: Path) -> float:
    """Read one tensor after the other."""
    bundle = TensorBundle(folder / NAME)
    return total(bundle.read(name) for name in bundle.entries)


def held(folder: Path) -> float:
    """Read all tensors and hold them."""
    found = read_bert(folder)
    return total(list(found.tensors.values()))


def imported(folder: Path) -> float:
    """Make a run, on disk."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    task = import_bert(folder, out).task()
    return total(value.numpy() for value in task.state_dict().values())


WAYS: dict[str, Callable[[Path], float]] = {
    "the file read through, in blocks of 1 MiB": read_through,
    "each tensor, checksums checked": each,
    "all tensors held at once, checked": held,
    "import into a run, written durably and opened": imported,
}


def measure(way: str, folder: Path) -> None:
    """Print seconds, CPU seconds, the peak and the sum of a way (a child)."""
    Path("/proc/self/clear_refs").write_text("5")
    before, began = highest(), (time.perf_counter(), time.process_time())
    found = WAYS[way](folder)
    ended = time.perf_counter(), time.process_time()
    print(json.dumps([ended[0] - began[0], ended[1] - began[1], highest() - before, found]))


def main(rounds: int = 3) -> list[str]:
    """Measure; return the section for RESULTS.md."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        expected = make(folder)
        size = sum(path.stat().st_size for path in folder.glob("*.data-*"))
        found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, results in found.items():
                command = [sys.executable, __file__, way, place]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                results.append(json.loads(done.stdout))
                if abs(results[-1][3] - expected) > 1e-6 * abs(expected):
                    raise SystemExit(f"{way}: the sum of all values is {results[-1][3]}")
    lines = [
        f"The variables of BERT base in float32, {size / 1e6:,.0f} MB in one data shard, from the",
        "page cache, on a CPU that does other work too; best of turns, sums of all values equal.",
        "",
        "| what | seconds | CPU seconds | peak MiB above the imports |",
        "|---|---|---|---|",
    ]
    for way, results in found.items():
        wall, busy, peak = (min(column) for column in list(zip(*results, strict=True))[:3])
        lines.append(f"| {way} | {wall:.2f} | {busy:.2f} | {peak / 2**20:,.0f} |")
    return lines


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], Path(sys.argv[2]))
    else:
        print("\n".join(main()))
