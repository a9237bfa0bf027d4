"""Training a byte-level BPE, whole process with writing, beside `tokenizers`."""

import json
from pathlib import Path

from measure import TOKMILL, Contestant, interleave, table

PEERS = Path(__file__).parent / "peers"


def main(cache: Path, peers_python: str, megabytes: int, vocab: int, rounds: int) -> list[str]:
    source = cache / f"text-{megabytes}.jsonl"
    mine, theirs = cache / "tokenizer.json", cache / "tokenizer-hf.json"
    ours = Contestant(
        "tokmill tokenizer train",
        [
            TOKMILL,
            *("tokenizer", "train", str(source), "--field", "text", "-o", str(mine)),
            *("--vocab-size", str(vocab), "--special", "<|endoftext|>"),
        ],
    )
    peer = Contestant(
        "tokenizers 0.23.3",
        [peers_python, str(PEERS / "train_tokenizers.py"), str(source), str(vocab), str(theirs)],
    )
    interleave([peer, ours], rounds)
    a, b = (json.loads(path.read_text())["model"] for path in (mine, theirs))
    pairs = [[m.split(" ") if isinstance(m, str) else m for m in x["merges"]] for x in (a, b)]
    if pairs[0] != pairs[1] or a["vocab"] != b["vocab"]:
        raise SystemExit("merges or ids differ from tokenizers'; no figure")
    size = source.stat().st_size / 1e6
    lines = [f"### {size:.0f} MB, {vocab:,} ids, merges and ids identical, best of {rounds}", ""]
    return lines + table([peer, ours], peer, size)
