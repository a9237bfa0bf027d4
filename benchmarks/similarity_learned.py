"""Vectors of functions learned from code alone, by themselves and in sums, on held-out projects.

Of the stores that `similarity_stores.py` froze, below CACHE/similarity:

    learned/learn/     functions of `train` that are learned from: those of at least LEAST tokens
    learned/part/      a run of half of the projects; the others tell the weights of sums
    learned/SEED/      a run of all of them, by recipes/x86/similarity-bag.toml
    learned/eval-SEED.json    what `tokmill similarity eval` says of the projects of `test`

The weights of the sums are written only with `--weights FILE`. Runs that are there are kept; at the
end all that was found is printed.

    python benchmarks/similarity_learned.py CACHE [--seed 0 …] [--weights FILE]
"""

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import tokmill
from similarity_inlining import Learned, learn
from similarity_programs import OLDER, splits
from similarity_ranker import cosines, fit, pairs
from tokmill.builds.plan import How
from tokmill.similarity.commands.similarity_vectors import baselines_of, vectors_of
from tokmill.similarity.evaluation import Choice, Evaluation
from tokmill.similarity.evaluation import evaluate as run_evaluation
from tokmill.similarity.functions import functions_of, of_functions
from tokmill.similarity.pool_measures import RANDOM, Method, Value
from tokmill.similarity.vector_rows import Rows
from tokmill.store.store import Store
from tokmill.x86.features import learned_weights
from tokmill.x86.features.baselines import code_parts, parts_of
from tokmill.x86.features.learned_sums import own_vectors, vector_parts
from tokmill.x86.features.store_functions import store_functions

LEAST = 80
"""Tokens of a function that is learned from."""
RECIPE = Path(__file__).resolve().parents[1] / "recipes/x86/similarity-bag.toml"
BASELINES = ("code-around", "facts", "ranker")
ROWS, LEVELS = ("O0-O3", "O2-O3"), "level ~ ^(O0|O2|O3)$"
POOLS = (100, 1000)
QUERIES, NEGATIVES = 500, 150
"""Of a pair of ways, when weights are learned."""
OF_CALLS = '"""Weights of the columns of `SHAPE`, and a constant: of log weights of calls."""'
HEAD = '"""Weights of sums with learned vectors, learned by `benchmarks/similarity_learned.py`."""'


def run(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "tokmill", *map(str, words)], check=True)


def of_projects(names: Sequence[str]) -> str:
    return f"project ~ ^({'|'.join(names)})$"


def halves(folder: Path) -> tuple[list[str], list[str]]:
    """Return the training projects that there are: to learn from, and to learn weights from."""
    known = functions_of(Store(folder / "train")).names["project"].names
    names = [name for name in splits()["train"] if name in known]
    return names[::2], names[1::2]


def begin(folder: Path, place: Path) -> None:
    """Make the folder of what is learned; what was learned of other stores is removed."""
    mark, fingerprint = place / "train.txt", Store(folder / "train").fingerprint
    if not mark.exists() or mark.read_text() != fingerprint:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        mark.write_text(fingerprint)


def select(source: Path, out: Path, *where: str) -> None:
    """Make a store of some records, where it is not there."""
    if not out.exists():
        tokmill.build("select", source, out, where=where, how=How(quiet=True))


def train(data: Path, val: Path, out: Path, seed: int) -> None:
    """Train one run, where there is none that was finished."""
    if (out / "finished").exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    seeds = ("--set", f"run.seed={seed}", "--set", f"data.seed={seed}")
    run("train", RECIPE, "--data", data, "--val", val, "-o", out, *seeds)
    (out / "finished").touch()


def learn_weights(folder: Path, graphs: Path, place: Path) -> str:
    """Return the text of the file of weights, of functions that the run `part` has not seen."""
    place.mkdir(parents=True, exist_ok=True)
    store_path = place / "others"
    select(folder / "functions", store_path, of_projects(halves(folder)[1]), f"compiler != {OLDER}")
    store = Store(store_path)
    run("embed", place / "part", store_path, "--name", "part", "--fresh", "-q")
    vectors = Store(store_path, ["part"]).column("embedding")
    functions = store_functions(store, [graphs])
    sides = pairs(store, np.rint(np.expm1(functions.shape[functions.record, 0])))
    sides = [side for side in sides if len(side[0]) > 1]
    found = learn(functions, own_vectors(functions, vectors), code_parts(functions), sides)
    for name, weights in found.calls.items():
        setattr(learned_weights, name, weights)
    parts: dict[str, Any] = {**parts_of(functions), **vector_parts(functions, vectors)}
    fitted = fit(cosines(parts, sides, queries=QUERIES, negatives=NEGATIVES))
    with_facts = dict(zip(parts, fitted.tolist(), strict=True))
    return text_of(found, with_facts, f"# {len(store):,} functions of {store.fingerprint[:16]}.")


def text_of(found: Learned, with_facts: Mapping[str, float], of: str) -> str:
    """Return the text of the file of weights."""
    lines = [HEAD, "", of]
    for name, weights in (("WITH_CODE", found.weights), ("WITH_FACTS", with_facts)):
        lines += [f"{name} = {{", *(f'    "{part}": {w:.3g},' for part, w in weights.items())]
        lines.append("}")
    lines.append('"""Part of `learned_sums.py` → its weight."""')
    for name, values in found.calls.items():
        lines.append(f"{name} = ({', '.join(f'{value:.3g}' for value in values)})")
    lines.append(OF_CALLS)
    return "\n".join(lines) + "\n"


def evaluate(
    store: Store, graphs: Path, runs: Path, seeds: Sequence[int], choices: Mapping[Path, Choice]
) -> None:
    """Evaluate the run of each seed, the first one beside baselines.

    `choices`: folder → what is evaluated; what was found is written there.
    """
    functions = functions_of(store)
    for seed in seeds:
        _, matrix = vectors_of(runs / str(seed), store, at="last", device="cpu", quiet=False)
        methods = [Method("run", Rows(of_functions(functions, matrix)), False)]
        # Baselines are the same for each seed.
        methods += baselines_of(
            functions, store, [graphs], BASELINES if seed == 0 else [], {"run": matrix}
        )
        for place, choice in choices.items():
            found = run_evaluation(functions, methods, choice, fingerprint=store.fingerprint)
            place.mkdir(exist_ok=True)
            (place / f"eval-{seed}.json").write_bytes(msgspec.json.encode(found))
            print(f"{place}/eval-{seed}.json: queries of {', '.join(choice.projects)}", flush=True)


def table(place: Path) -> list[str]:
    """Return the lines of a table of all seeds that were evaluated: recall@1 of each method.

    In brackets the wider ends of the intervals over functions and projects, of all seeds.
    """
    of: dict[tuple[str, str, int], list[Value]] = {}
    queries: dict[str, str] = {}
    for path in sorted(place.glob("eval-*.json")):
        found = msgspec.json.decode(path.read_bytes(), type=Evaluation)
        for row in found.rows:
            queries[row.row] = f"{row.queries:,} queries of {row.functions:,} functions"
            for one in row.results:
                if one.method != RANDOM:
                    key = row.row, one.method, one.pool
                    of.setdefault(key, []).append(one.values["recall@1"])
    lines = []
    for (row_name, method, pool), values in of.items():
        if row_name in queries:
            lines.append(f"{row_name}: {queries.pop(row_name)}")
        means = [one.mean for one in values]
        said = f"  {method}, pool of {pool:,}: {statistics.mean(means):.3f}"
        if ends := [one.ends for one in values if one.ends]:
            said += f" ({min(low for low, _ in ends):.3f} to {max(up for _, up in ends):.3f})"
        if len(means) > 1:
            said += f"; seeds: {', '.join(f'{mean:.3f}' for mean in means)}"
        lines.append(said)
    return lines


def main(arguments: Sequence[str]) -> int:
    """Learn with each seed, learn the weights of sums if asked, and print recall@1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--weights", type=Path)
    chosen = parser.parse_args(arguments)
    folder = chosen.cache.resolve() / "similarity"
    place, seeds = folder / "learned", chosen.seed or [0, 1, 2]
    begin(folder, place)
    learn = place / "learn"
    select(folder / "train", learn, f"length >= {LEAST}")
    if chosen.weights:
        select(learn, place / "half", of_projects(halves(folder)[0]))
        train(place / "half", folder / "val", place / "part", 0)
        chosen.weights.write_text(learn_weights(folder, folder / "graphs", place))
    for seed in seeds:
        train(learn, folder / "val", place / str(seed), seed)
    select(folder / "functions", place / "evaluated", LEVELS)
    store = Store(place / "evaluated")
    there = functions_of(store).names["project"].names
    queries = tuple(name for name in splits()["test"] if name in there)
    choice = Choice(rows=ROWS, projects=queries, pools=POOLS)
    evaluate(store, folder / "graphs", place, seeds, {place: choice})
    print("\n".join(table(place)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
