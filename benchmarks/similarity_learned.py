"""Vectors of functions that are learned from code alone, and what they find of held-out projects.

Learns from CACHE/similarity/train, as `similarity_stores.py` froze it, without small functions, by
recipes/x86/similarity-bag.toml. Queries are functions of the projects of the split `test`, their
negatives those of all projects. With `--rules numbers` the tokens have the values of numbers
(docs/x86-tokens.md), so the table is one with facts.

    python benchmarks/similarity_learned.py CACHE [--small] [--rules numbers] [--seed 0 --seed 1] \
        [--set run.steps=300]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tokmill
from program_pairs import LAYOUT
from similarity_programs import splits
from tokmill.builds.prepare import How

LEAST = 80
"""Tokens of a function that is learned from."""
RECIPE = Path(__file__).resolve().parents[1] / "recipes/x86/similarity-bag.toml"


def stores(folder: Path, rules: str) -> tuple[Path, Path, Path]:
    """Return the stores to learn from, to watch, and of all functions, with tokens of the rules.

    The records are those of the stores that were frozen.
    """
    if rules == "tokmill":
        learn, val, everything = folder / "learn", folder / "val", folder / "functions"
        taken = [folder / "train"]
    else:
        everything, learn, val = (folder / f"{n}-{rules}" for n in ("functions", "learn", "val"))
        tokmill.build(
            "x86", folder / "graphs", everything, layout=LAYOUT, rules=rules,
            how=How(yes=True, quiet=True),
        )  # fmt: skip
        taken = [everything]
    for split, place, least in (("train", learn, LEAST), ("val", val, 0)):
        if rules == "tokmill" and split == "val":
            continue
        where = [f"project ~ ^({'|'.join(splits()[split])})$", "compiler !~ gcc-11"]
        where += ["function ~ ^(?!sub_[0-9a-f]+$)", f"length >= {least}"]
        shutil.rmtree(place, ignore_errors=True)
        tokmill.build("select", taken, place, where=tuple(where), how=How(quiet=True))
    return learn, val, everything


def run(*words: object) -> str:
    """Run a command of tokmill and return what it printed."""
    command = [sys.executable, "-m", "tokmill", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def recalls(printed: str, row: str) -> dict[tuple[str, int], float]:
    """Return (method, pool) → recall@1 of a row of `tokmill similarity eval --json`."""
    (found,) = (one for one in json.loads(printed)["rows"] if one["row"] == row)
    return {
        (one["method"], one["pool"]): one["values"]["recall@1"]["mean"] for one in found["results"]
    }


def main(arguments: Sequence[str]) -> int:
    """Learn with each seed and print recall@1 of each, and their mean."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rules", choices=("tokmill", "numbers"), default="tokmill")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--pair", default="O0-O3")
    parser.add_argument("--pools", default="100,1000,10000")
    parser.add_argument("--set", dest="keys", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args(arguments)
    folder = chosen.cache.resolve() / ("similarity-small" if chosen.small else "similarity")
    learn, val, everything = stores(folder, chosen.rules)
    known = {path.name.rpartition("-")[0] for path in (folder / "programs").iterdir()}
    queries = ",".join(name for name in splits()["test"] if name in known)
    found: dict[tuple[str, int], list[float]] = {}
    for seed in chosen.seed or [0]:
        place = folder / "learned" / f"{chosen.rules}-{seed}"
        shutil.rmtree(place, ignore_errors=True)
        sets = [
            word
            for key in (f"run.seed={seed}", f"data.seed={seed}", *chosen.keys)
            for word in ("--set", key)
        ]
        run("train", RECIPE, "--data", learn, "--val", val, "-o", place, *sets)
        printed = run(
            "similarity", "eval", place, everything, "--pairs", chosen.pair, "--projects", queries,
            "--pools", chosen.pools, "--resamples", 0, "--baseline", "code-sum", "--json",
        )  # fmt: skip
        for key, value in recalls(printed, chosen.pair).items():
            found.setdefault(key, []).append(value)
            print(f"seed {seed}: {key[0]}, pool of {key[1]:,}: {value:.3f}", flush=True)
    for (method, pool), values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{method}, pool of {pool:,}: {statistics.mean(values):.3f} ± {spread:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
