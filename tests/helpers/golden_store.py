"""Make the golden store of the current format: `python tests/helpers/golden_store.py`.

A golden store is made once for a format version and kept for ever: a later program reads it. It is
made anew only while a version is not yet released.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from making import quick_build
from tokmill.builds import plan
from tokmill.store import manifest as layout
from tokmill.store.seal import END, LENGTH, TAIL, sealed
from tokmill.store.store import Store
from tokmill.text.jsonl import JsonlSource

HERE = Path(__file__).parents[1] / "golden"
INPUT = HERE / "input"
MORE = HERE / "more.jsonl"
"""Input of format 2 alone: records with a `kind` that repeats."""
PAIRS = HERE / "pairs.npz"
NO_CONTENT = (".lock", "events.jsonl", ".gitattributes", "plan.copy.json", "stamps.jsonl")
SHARD_BYTES = 1 << 9
"""Input bytes of a shard, so that a small input makes several."""


@contextlib.contextmanager
def small_shards(version: int = JsonlSource.version) -> Iterator[None]:
    """Cut the input into small shards; `version` is that of the source."""
    before = plan.SHARD_BYTES, JsonlSource.version
    plan.SHARD_BYTES, JsonlSource.version = SHARD_BYTES, version
    try:
        yield
    finally:
        plan.SHARD_BYTES, JsonlSource.version = before


def build_v1(out: Path) -> Store:
    """Build the golden input as version 1 of the source did, which stripped by default.

    Version 2 gives other names to the same shards, as the version is a part of the recipe. A store
    of format 1 is made by going on with one that is planned.
    """
    out.mkdir()
    shutil.copyfile(HERE / "store-v1/plan.json", out / "plan.json")
    with small_shards(version=1):
        return quick_build("jsonl", INPUT, out, strip=True, keep=["id", "url"])


def build_v2(out: Path) -> Store:
    """Build the golden input, and an overlay whose columns refer to records of the same store."""
    with small_shards():
        inputs = (INPUT, MORE)
        store = quick_build("jsonl", inputs, out, strip=True, keep=["id", "url", "kind"])
        refer = [f"{column}={out}" for column in ("anchor", "positive")]
        quick_build("overlay", out, "", values=str(PAIRS), name="pairs", refer=refer)
        return store


def unsealed(data: bytes) -> bytes:
    """Return a file without its digest, as older programs wrote it."""
    found = TAIL.search(data, max(0, len(data) - LENGTH))
    return data[: found.start()] + END if found else data


def without_paths(store: Path) -> dict[str, bytes]:
    """The files of a store as they were when it was made, without the digests that came later.

    The paths of this machine, which are in no identity, are made relative.
    """
    found = {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name not in NO_CONTENT
    }
    for name in found:
        if name.endswith(".json") and not name.startswith("vocab"):
            found[name] = unsealed(found[name])
        if name.startswith("shards/") and name.endswith(".json"):
            # Receipts once named each record that was left out, and count them now.
            found[name] = layout.encode(msgspec.json.decode(found[name], type=layout.Receipt))
    # What plans say since then: where the tokenizer lies, the digest of the inputs' file, and
    # options that are at their defaults here.
    later = rb',\n "(tokenizer|inputs_sha256)": "[^"]*"|\n  "(suffix|glob)": \[\],'
    found["plan.json"] = re.sub(later, b"", found["plan.json"])
    for name in ("plan.json", "inputs.jsonl"):
        here = json.dumps(str(INPUT.absolute()))[1:-1].encode()
        found[name] = found[name].replace(here, b"input")
    return found


def anywhere(store: Path) -> dict[str, bytes]:
    """The files of a store of format 2, with the paths of this machine made relative.

    What they are bound by is worked out anew: digests of plans, and of the files of items.
    """
    found = {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name not in NO_CONTENT[:2] and path.parent.name != "cache"
    }
    for name in [name for name in found if name.endswith("inputs.jsonl")]:
        for path, short in ((store, "store"), (INPUT, "input"), (HERE, "golden")):
            found[name] = found[name].replace(str(path.absolute()).encode(), short.encode())
            for file in ("plan.json", "plan.copy.json"):
                said = name.replace("inputs.jsonl", file)
                found[said] = found[said].replace(str(path.absolute()).encode(), short.encode())
        for file in ("plan.json", "plan.copy.json"):
            said = name.replace("inputs.jsonl", file)
            told = msgspec.json.decode(unsealed(found[said]), type=layout.Plan)
            digest = hashlib.sha256(found[name]).hexdigest()
            found[said] = sealed(msgspec.structs.replace(told, inputs_sha256=digest))
    return found


def main() -> None:
    """Write the golden store of the current format."""
    np.savez(PAIRS, anchor=np.arange(26)[::-1], positive=(np.arange(26) + 5) % 26)
    made = HERE / "made"
    build_v2(made)
    shutil.rmtree(HERE / "store-v2", ignore_errors=True)
    for name, data in anywhere(made).items():
        path = HERE / "store-v2" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    shutil.rmtree(made)


if __name__ == "__main__":
    main()
