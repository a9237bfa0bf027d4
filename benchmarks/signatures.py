"""Simulation points shared by programs, by learned signatures: from programs to a table.

Three programs run on several inputs under `tokmill bbv profile --measured`. Their intervals are
joined with the blocks of programs and libraries; blocks get vectors of a small model that has read
no block of the three programs, only libc's. For each program a signature is learned from the other
two (`build mine --what bbv --across`, the task `signature`), with several seeds. Then points are
shared by all three, and the error of the program that was held out is what counts.

    python benchmarks/signatures.py CACHE [--small]

Everything lies below CACHE/signatures; what was made is kept.
"""

import argparse
import os
import shutil
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

import tokmill
from measure import markdown
from profiles import MAWK, MAWK_END, Inputs
from tokmill.bbv.points.executions import read_executions, untrained
from tokmill.bbv.points.shared_points import Row, shared_points
from tokmill.bbv.traces.addresses import read_maps
from tokmill.bbv.traces.profile import Asked, profile
from tokmill.builds.plan import How
from tokmill.inference.embed import embed_store
from tokmill.store.store import Store

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "x86" / "signature.toml"
QUIET = How(quiet=True)
SEEDS, STEPS, POINTS = 3, 300, (12, 30)
LIBRARY = "program ~ ^(libc|ld-linux)"
"""What the model of blocks reads."""
HEAD = ("", "points", "shared", "nothing simulated")


def commands(inputs: Inputs) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {"bzip2": {}, "gzip": {}, "mawk": {}}
    for number, share in enumerate((0.08, 0.14, 0.2)):
        text, few = (inputs.text(part, 40 * number) for part in (share, share / 4))
        found["bzip2"][f"{number}"] = ["bzip2", f"-{1 + 4 * number}", "-c", few]
        found["gzip"][f"{number}"] = ["gzip", f"-{3 + 3 * number}", "-c", text]
        found["mawk"][f"{number}"] = ["mawk", f"{MAWK} {MAWK_END}", few]
    return found


def profiled(folder: Path, scale: float, how: Asked) -> list[str]:
    """Profile the programs on their inputs; return the programs."""
    inputs = Inputs(folder / "inputs", scale)
    inputs.folder.mkdir(parents=True, exist_ok=True)
    os.environ["LC_ALL"] = "C"
    table = commands(inputs)
    for program, runs in table.items():
        for name, command in runs.items():
            out = folder / "profiles" / program
            if (out / f"{name}.about.json").exists():
                continue
            began = time.monotonic()
            found = profile(command, out, how, name=name)
            assert found.timed is not None
            print(
                f"{program} {name}: {len(found.vectors)} intervals, halves differ "
                f"{found.timed.halves:.1%}, {time.monotonic() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return list(table)


def executions(folder: Path, programs: list[str]) -> Store:
    """Build the store of blocks, and the intervals of all programs."""
    maps = (one.path for path in folder.glob("profiles/*/*.map") for one in read_maps(path))
    files = sorted({path for path in maps if Path(path).is_file() and "/markers-" not in path})
    tokmill.build("x86", files, folder / "blocks", unit="block", how=QUIET)
    each = [folder / "of-programs" / program for program in programs]
    for program, out in zip(programs, each, strict=True):
        blocks = [str(folder / "blocks")]
        traces = folder / "profiles" / program
        tokmill.build("bbv", traces, out, program=program, blocks=blocks, how=QUIET)
    return tokmill.build("select", [*map(str, each)], folder / "executions", how=QUIET)


def block_vectors(folder: Path, steps: int) -> None:
    """Lay vectors over the store of blocks, of a model that has read blocks of libc."""
    library = folder / "library"
    tokmill.build("select", folder / "blocks", library, where=[LIBRARY], how=QUIET)
    run = folder / "code"
    if not (run / "model").is_dir():
        shutil.rmtree(run, ignore_errors=True)
        recipe = {
            "data": {"train": str(library), "batch": 32},
            "model": {"kind": "decoder", "dim": 64, "layers": 2, "heads": 2},
            "task": {"kind": "next_token", "rows": "packed", "length": 128},
            "optim": {"lr": 3e-3, "warmup": 20},
            "run": {"steps": steps, "device": "cpu"},
        }
        tokmill.train(recipe, run, quiet=True)
    embed_store(run, folder / "blocks", name="code")


def signatures(folder: Path, store: Store, program: str, seed: int) -> Any:
    """Return signatures of all intervals, learned from those of the other programs."""
    name, seen = f"{program}-{seed}", folder / "seen" / program
    mined, run = folder / "mined" / name, folder / "runs" / name
    overlay = f"{name}-{STEPS}"
    if (store.path / "overlays" / overlay / "manifest.json").exists():
        return Store(store.path, [overlay]).column("embedding")
    tokmill.build("select", store.path, seen, where=[f"program != {program}"], how=QUIET)
    options = {"what": "bbv", "across": True, "negatives": "semi-hard", "cpi": True, "seed": seed}
    tokmill.build("mine", seen, mined, how=QUIET, **options)
    shutil.rmtree(run, ignore_errors=True)
    recipe = tomllib.loads(RECIPE.read_text())
    recipe["data"] |= {"train": str(mined)}
    recipe["model"] |= {"dim": 64, "layers": 1, "heads": 2, "inducing": 8, "seeds": 2}
    recipe["task"] |= {"length": 256, "cpi_weight": 1.0}
    recipe["run"] |= {"steps": STEPS, "seed": seed, "eval_every": 0, "device": "cpu"}
    tokmill.train(recipe, run, quiet=True)
    embed_store(run, store.path, name=overlay)
    return Store(store.path, [overlay]).column("embedding")


def lengths_one(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def section(folder: Path, store: Store) -> list[str]:
    known = read_executions(store)
    plain = untrained(store, known)
    found = []
    for count in POINTS:
        learned: list[list[Row]] = []
        for seed in range(SEEDS):
            rows = []
            for number, program in enumerate(known.names):
                vectors = signatures(folder, store, program, seed)[known.records]
                points = shared_points(known, lengths_one(vectors), count, seed=seed)
                rows.append(points.rows[number])
            learned.append(rows)
        by_mix = [shared_points(known, plain, count, seed=seed).rows for seed in range(SEEDS)]
        for name, seeds in (("features without training", by_mix), ("learned signatures", learned)):
            shared = [np.mean([abs(row.shared) for row in rows]) for rows in seeds]
            nothing = [np.mean([abs(row.held_out) for row in rows]) for rows in seeds]
            found.append([name, f"{count} for all", _range(shared), _range(nothing)])
        each = count // len(known.names)
        alone = [abs(row.simpoint) for row in shared_points(known, plain, each, seed=0).rows]
        found.append(["SimPoint", f"{each} for each program", f"{np.mean(alone):.1%}", "–"])
    return [
        f"{len(known.names)} programs, {len(known.cpi):,} intervals, {known.left_out} left out.",
        "",
        *markdown(HEAD, found),
    ]


def _range(values: list[Any]) -> str:
    return f"{np.mean(values):.1%} ({100 * min(values):.1f}–{100 * max(values):.1f})"


def main(cache: Path, small: bool) -> list[str]:
    folder = cache / "signatures"
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(processors)})
    how = Asked(measured=True, intervals=15 if small else 100, runs=2 if small else 15)
    programs = profiled(folder, 0.05 if small else 1.0, how)
    os.sched_setaffinity(0, processors)
    store = executions(folder, programs)
    block_vectors(folder, 2 if small else 300)
    return [
        f"{', '.join(programs)} on three inputs each; the signature of a program's intervals was "
        f"learned from the other two ({STEPS} steps, {SEEDS} seeds: mean and range). Errors of the "
        "measured CPI: mean of the programs. *Nothing simulated*: points of the other "
        "programs alone.",
        "",
        *section(folder, store),
    ]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("cache", type=Path)
    options.add_argument("--small", action="store_true", help="a try in a minute or two")
    asked = options.parse_args()
    print("\n".join(main(asked.cache, asked.small)))
