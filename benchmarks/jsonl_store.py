"""JSON Lines to a store, whole process, beside what people use today.

The gate: ids equal to the peer's, document by document, before anything is timed.
"""

import shutil
from pathlib import Path

import numpy as np
import pyarrow.json
import pyarrow.parquet

from measure import TOKMILL, Contestant, interleave, run_once, table
from tokmill import Store

HERE = Path(__file__).parent
PEERS = HERE / "peers"


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def tokmill(source: Path, tokenizer: Path, out: Path, *more: str, kind: str = "jsonl") -> list[str]:
    """Return the command that builds a store of the texts alone."""
    return [
        TOKMILL,
        *("build", kind, str(source), "-o", str(out), "--tokenizer", str(tokenizer)),
        *("--field", "text", "-q", *more),
    ]


def same_ids(store: Path, flat: Path) -> bool:
    """Say whether a store's ids, without the eot at each end, are those of a flat uint16 file."""
    opened = Store(store)
    eot = opened.vocabularies["token"].role("eot")
    wanted = np.fromfile(flat, np.uint16)
    place = 0
    for number in range(len(opened.shards)):
        shard = opened.shard(number)
        ids, ends = shard["token"], shard["offsets"][1:].astype(np.int64) - 1
        if not (ids[ends] == eot).all():
            return False
        inner = np.ones(len(ids), bool)
        inner[ends] = False
        mine = ids[inner]
        if not np.array_equal(mine, wanted[place : place + len(mine)]):
            return False
        place += len(mine)
    return place == len(wanted)


def main(cache: Path, peers_python: str, megabytes: int, rounds: int, slow: bool) -> list[str]:
    source = cache / f"text-{megabytes}.jsonl"
    tokenizer, store = cache / "tokenizer.json", cache / "store"
    size = source.stat().st_size / 1e6

    def peer(name: str, script: str, out: str) -> Contestant:
        path = cache / out
        command = [peers_python, str(PEERS / script), str(source), str(tokenizer), str(path)]
        return Contestant(name, command, lambda: remove(path))

    def ours(name: str, *more: str) -> Contestant:
        return Contestant(name, tokmill(source, tokenizer, store, *more), lambda: remove(store))

    script = peer(
        "gigatoken, 4-line script (no offsets, hashes, commit)", "gigatoken_script.py", "g"
    )
    fast = ours("tokmill, gigatoken, --workers 0", "--workers", "0")
    two = ours("tokmill, gigatoken, --workers 2", "--workers", "2")
    usual = ours("tokmill, gigatoken, without --workers")
    run_once(script)
    for contestant in (fast, two):
        run_once(contestant)
        if not same_ids(store, cache / "g"):
            raise SystemExit(f"{contestant.name}: other ids than the script; no figure")
    contestants = [script, fast, usual, two] if megabytes >= 400 else [script, fast]
    for contestant in contestants:
        contestant.seconds.clear()
        contestant.peak.clear()
    interleave(contestants, rounds)
    lines = [f"### {size:.0f} MB, best of {rounds}, in turns", ""]
    lines += table(contestants, script, size)
    if slow:
        hf = peer("tokenizers, 20-line script", "tokenizers_script.py", "t")
        ours_hf = ours(
            "tokmill, tokenizers, --workers 0", "--workers", "0", "--engine", "tokenizers"
        )
        others = [
            hf,
            ours_hf,
            peer("datatrove 0.10.1, local executor", "datatrove_peer.py", "datatrove"),
            tokbin(cache, peers_python, source, tokenizer),
            peer("Hugging Face datasets.map", "datasets_peer.py", "d"),
        ]
        interleave(others, 2)
        if not same_ids(store, cache / "t"):
            raise SystemExit("tokmill with tokenizers: other ids than the script; no figure")
        lines += ["", f"### {size:.0f} MB, the `tokenizers` encoder, best of 2", ""]
        lines += table(others, hf, size)
    return lines


def tokbin(cache: Path, python: str, source: Path, tokenizer: Path) -> Contestant:
    folder = cache / "tokbin"
    lines = folder / "in"

    def before() -> None:
        remove(folder)
        lines.mkdir(parents=True)
        (lines / "text.jsonl").symlink_to(source.resolve())

    command = [str(Path(python).parent / "tokbin"), "build", str(folder / "corpus/web")]
    return Contestant(
        "tokbin 0.1.0",
        [*command, "--from-jsonl", str(lines), "--tokenizer", str(tokenizer)],
        before,
    )


def parquet(cache: Path, megabytes: int, rounds: int) -> list[str]:
    source, tokenizer = cache / f"text-{megabytes}.jsonl", cache / "tokenizer.json"
    table_path, store = cache / f"text-{megabytes}.parquet", cache / "store"
    if not table_path.exists():
        options = pyarrow.json.ReadOptions(block_size=1 << 24)
        records = pyarrow.json.read_json(source, options)
        pyarrow.parquet.write_table(records, table_path, row_group_size=4096)
    contestants = [
        Contestant(
            name,
            tokmill(path, tokenizer, store, "--workers", "0", kind=kind),
            lambda: remove(store),
        )
        for name, path, kind in (
            ("JSON Lines", source, "jsonl"),
            ("Parquet (snappy), same records", table_path, "parquet"),
        )
    ]
    interleave(contestants, rounds)
    size = source.stat().st_size / 1e6
    return [
        f"### Parquet beside JSON Lines, {size:.0f} MB",
        "",
        *table(contestants, contestants[0], size),
    ]
