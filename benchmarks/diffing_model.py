"""Diffing with a trained model: does it help beside untrained features, on programs it never saw?

BERT learns walks through pairs of the programs of `TRAINED` (`make pairs`); `contrastive` learns
vectors of their functions, from the same function of several compilers and levels. Three seeds
each. Both are measured on programs of other projects: alone (an assignment by cosine), and beside
all other evidence of `tokmill diff`, with the weight that is best on the learned programs.

    python benchmarks/diffing_model.py CACHE [--contrastive STEPS] [--bert STEPS] [PROGRAM …]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import diffing_programs as programs
from diffing import Bench, Pairs, assigned
from jsonl_store import remove
from tokmill import Store
from tokmill.base.files import write_file
from tokmill.store.schema import Array
from tokmill.x86.commands.diff_vectors import comparable, function_vectors
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.diff.truth.ground_truth import judge_functions
from x86_models import run

TRAINED = ("diffutils", "findutils")
"""Projects whose programs are learned from, and on which the weight is chosen."""
LEARNED = ("cmp", "diff", "diff3", "sdiff", "find", "xargs", "locate", "frcode")
"""Their programs, of which the weight is chosen."""
HELD_OUT = ("lz4", "brotli", "zstd", "bzip2", "zlib", "lua")
GNU = ("true", "ls", "sort", "cp")
"""Held out too, but they share a library (gnulib) with the programs that are learned from."""
SEEDS = (1, 2, 3)
WEIGHTS = (0.5, 1.0, 2.0, 4.0, 8.0)
LAYOUT = "{project}-{version}/{compiler}-{level}/{program}"
PRETRAIN = {
    "task.group": "origin", "task.length": 128, "data.batch": 16, "model.context": 128,
    "optim.lr": 1e-3, "run.log_every": 20, "run.checkpoint_every": 0,
}  # fmt: skip
"""Keys over recipes/bert/pretrain.toml."""
CONTRAST = {
    "task.same": '["project","program","function","part"]', "task.length": 128, "data.batch": 16,
    "optim.warmup": 20, "run.log_every": 20, "run.checkpoint_every": 0, "run.eval_every": 0,
}  # fmt: skip
"""Keys over recipes/x86/similarity.toml."""
SMALL = {"model.dim": 64, "model.layers": 2, "model.heads": 2, "model.hidden": 128}
STEPS = {"contrastive": 2000, "BERT": 4000}
"""Steps of each model."""
UNTRAINED = "untrained"


@dataclass
class Scores:
    """F1 of one pair: contestant → seed → F1."""

    pair: programs.Pair
    functions: int
    untrained: float
    of: dict[str, dict[int, float]] = field(default_factory=dict)


# ---- what is learned -----------------------------------------------------------------------------


def stores(cache: Path) -> tuple[Path, Path]:
    """Return stores of walks through pairs, and of functions with names; made where missing."""
    folder, made = cache / "diffing-model", cache / "pairs"
    walks, functions = folder / "walks", folder / "functions"
    if not (walks / "manifest.json").exists():
        listed = tomllib.loads((made / "pairs.toml").read_text())["pairs"]
        wanted = [pair for pair in listed if pair[0].startswith(TRAINED)]
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"  {json.dumps(pair)},\n" for pair in wanted)
        write_file(folder / "pairs.toml", f"pairs = [\n{lines}]\n")
        run("cfg", made / "programs", "-o", folder / "graphs", "-q", *of_trained(made / "programs"))
        run(
            "build", "pairs", folder / "graphs", "--pairs", folder / "pairs.toml", "-o", walks,
            "--layout", LAYOUT, "--walks", 1, "--walk-tokens", 126, "--min-tokens", 24, "-q",
        )  # fmt: skip
    if not (functions / "manifest.json").exists():
        debug = made / "debug"
        run("build", "x86", debug, "-o", functions, "--layout", LAYOUT, "-q", *of_trained(debug))
    return walks, functions


def of_trained(folder: Path) -> Iterator[str]:
    """Yield options that choose the programs of the projects that are learned from."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(TRAINED):
            yield from ("--glob", f"{path.name}/*/*", "--glob", "!*.done")


def train(out: Path, words: Sequence[object], keys: Mapping[str, object], seed: int) -> Path:
    """Train a run where it is missing."""
    if not (out / "model" / "config.json").exists():
        remove(out)
        keys = {**keys, "data.seed": seed, "run.seed": seed}
        options = [f"--set={key}={value}" for key, value in keys.items()]
        run("train", *words, "-o", out, "-q", *options)
    return out


def runs(cache: Path, steps: Mapping[str, int] = STEPS) -> dict[str, dict[int, Path]]:
    """Return name of a model → seed → its run; `steps` as `STEPS`."""
    walks, functions = stores(cache)
    kinds = (
        ("contrastive", "similarity", functions, CONTRAST),
        ("BERT", "pretrain", walks, PRETRAIN),
    )
    found: dict[str, dict[int, Path]] = {}
    for name, recipe, store, keys in kinds:
        if not (number := steps.get(name, 0)):
            continue
        keys = {**keys, **SMALL, "run.steps": number}
        found[name] = {
            seed: train(
                cache / "diffing-model" / f"{name}-{number}-{seed}",
                [recipe, "--data", store], keys, seed,
            )
            for seed in SEEDS
        }  # fmt: skip
    return found


# ---- what is measured ----------------------------------------------------------------------------


class Judge:
    """Pairs of programs, their truth, and the vectors of their functions by each run."""

    def __init__(self, cache: Path) -> None:
        self.bench = Bench(cache, "", None)
        self.vectors: dict[tuple[Path, Path], Array] = {}

    def of(self, pair: programs.Pair, run_folder: Path) -> Pairs:
        """Return the vectors of both programs, centred and of length 1."""
        sides = []
        for one in (pair.a, pair.b):
            key = one.bare, run_folder
            if key not in self.vectors:
                graph = self.bench.graph(one.bare)
                self.vectors[key] = function_vectors(
                    graph, run_folder, at="last", device="cpu", quiet=True
                )
            sides.append(self.vectors[key])
        return comparable(*sides)

    def f1(self, pair: programs.Pair, match: Callable[..., Pairs]) -> float:
        """Return F1 of what `match` makes of the two graphs of a pair."""
        truth = self.bench.truth(pair)
        return judge_functions(truth, *match(truth.a.graph, truth.b.graph))[0].f1

    def beside(self, pair: programs.Pair, run_folder: Path | None, weight: float) -> float:
        """Return F1 of `tokmill diff --no-names`, with the vectors of a run or without."""
        vectors = None if run_folder is None else self.of(pair, run_folder)

        def match(a: object, b: object) -> Pairs:
            found = diff_graphs(a, b, names=False, vectors=vectors, vector_weight=weight)  # type: ignore[arg-type]
            return found.function_a, found.function_b

        return self.f1(pair, match)

    def alone(self, pair: programs.Pair, run_folder: Path) -> float:
        """Return F1 of an assignment by the vectors of a run and nothing else."""
        a, b = self.of(pair, run_folder)
        return self.f1(pair, lambda *_: assigned(a @ b.T))


def best_weight(
    judge: Judge, learned: Sequence[programs.Pair], run_folder: Path
) -> dict[str, float]:
    """Return weight (as text) → mean F1 over the programs that were learned from."""
    return {
        str(weight): statistics.mean(judge.beside(pair, run_folder, weight) for pair in learned)
        for weight in (0.0, *WEIGHTS)
    }


def measure(
    judge: Judge, pairs: Sequence[programs.Pair], found: Mapping[str, Mapping[int, Path]],
    weights: Mapping[str, float],
) -> Iterator[Scores]:  # fmt: skip
    """Yield F1 of each pair."""
    for pair in pairs:
        matches = judge.bench.truth(pair).matches
        scores = Scores(pair, matches, judge.beside(pair, None, 0))
        for name, by_seed in found.items():
            scores.of[name] = {seed: judge.alone(pair, one) for seed, one in by_seed.items()}
            scores.of[f"with {name}"] = {
                seed: judge.beside(pair, one, weights[name]) for seed, one in by_seed.items()
            }
        said = {name: round(statistics.mean(s.values()), 3) for name, s in scores.of.items()}
        print(pair.program, pair.kind, round(scores.untrained, 3), said, flush=True)
        yield scores


def row(title: str, some: Sequence[Scores]) -> str:
    """Return a row of means over pairs; of seeds their mean, and the smallest and the largest."""
    cells = [f"{statistics.mean(one.untrained for one in some):.3f}"]
    for name in some[0].of:
        means = [statistics.mean(one.of[name][seed] for one in some) for seed in SEEDS]
        cells.append(f"{statistics.mean(means):.3f} ({min(means):.3f} to {max(means):.3f})")
    return f"| {title} | {len(some)} | {' | '.join(cells)} |"


def main(cache: Path, names: Sequence[str] = (), steps: Mapping[str, int] = STEPS) -> list[str]:
    """Train, measure; return the section for RESULTS.md."""
    found, judge = runs(cache, steps), Judge(cache)
    walks, functions = (Store(path) for path in stores(cache))
    learned = programs.utilities(cache, LEARNED).pairs
    chosen: dict[str, float] = {}
    tried = []
    for name, by_seed in found.items():
        means = best_weight(judge, learned, by_seed[SEEDS[0]])
        chosen[name] = float(max(means, key=lambda weight: means[weight]))
        tried.append(f"{name} {', '.join(f'{w}: {mean:.3f}' for w, mean in means.items())}")
        print(tried[-1], flush=True)
    judge.vectors.clear()
    held = [name for name in HELD_OUT if not names or name in names]
    pairs = [one for one in programs.make(cache, held).pairs if one.program in held]
    gnu = programs.utilities(cache, [name for name in GNU if not names or name in names])
    results = list(measure(judge, [*pairs, *gnu.pairs], found, chosen))
    others = [one for one in results if one.pair.program in HELD_OUT]
    rows = [
        row(kind, [one for one in others if one.pair.kind == kind])
        for kind in dict.fromkeys(one.pair.kind for one in others)
    ]
    rows.append(row("**all of other projects**", others))
    if shared := [one for one in results if one.pair.program in GNU]:
        rows.append(row(f"coreutils ({', '.join(gnu_names(shared))})", shared))
    columns = list(results[0].of)
    said = ", ".join(f"{name} {number}" for name, number in steps.items() if number)
    return [
        f"Learned from {', '.join(TRAINED)}: BERT (`sentence_pair`) from {walks.records:,} walks "
        f"through pairs, {PRETRAIN['data.batch']} a step; `contrastive` from {functions.records:,} "
        f"functions, {CONTRAST['data.batch']} pairs a step; width {SMALL['model.dim']}, "
        f"{SMALL['model.layers']} layers, 128 tokens, seeds {', '.join(map(str, SEEDS))}. Steps: "
        f"{said}. Measured on {', '.join(held)}, of which no model has seen code; coreutils, if it "
        "is there, shares gnulib "
        "with what was learned. F1 of functions as in the table above, means over pairs and "
        "seeds (smallest to largest seed).",
        "",
        f"| pair | pairs | {UNTRAINED} | {' | '.join(map(titled, columns))} |",
        f"|---|---|---|{'---|' * len(columns)}",
        *rows,
        "",
        "Weight of the vectors, by mean F1 over the programs that were learned from (seed "
        f"{SEEDS[0]}): {'; '.join(tried)}. The best of these was taken.",
    ]


def titled(name: str) -> str:
    """Return the heading of a contestant."""
    return f"{UNTRAINED} {name}" if name.startswith("with ") else f"{name} alone"


def gnu_names(results: Sequence[Scores]) -> list[str]:
    """Return the programs of some results."""
    return list(dict.fromkeys(one.pair.program for one in results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    for name, number in STEPS.items():
        parser.add_argument(f"--{name.lower()}", type=int, default=number, help="steps; 0: without")
    parser.add_argument("programs", nargs="*")
    given = parser.parse_args()
    print(
        "\n".join(
            main(
                given.cache, given.programs, {name: getattr(given, name.lower()) for name in STEPS}
            )
        )
    )
