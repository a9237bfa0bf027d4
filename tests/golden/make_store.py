"""Make the golden store of the current format: `python tests/golden/make_store.py`.

A golden store is made once for a format version and kept for ever: a later program reads it. It is
made anew only while a version is not yet released.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "helpers"))

from making import quick_build  # noqa: E402
from tokmill.builds import plan  # noqa: E402
from tokmill.store import manifest as layout  # noqa: E402
from tokmill.store.seal import unsealed  # noqa: E402
from tokmill.store.store import Store  # noqa: E402
from tokmill.text.jsonl import JsonlSource  # noqa: E402

INPUT = HERE / "input"
NO_CONTENT = (".lock", "events.jsonl", ".gitattributes", "plan.copy.json", "stamps.jsonl")
SHARD_BYTES = 1 << 9
"""Input bytes of a shard, so that a small input makes several."""


def build(out: Path) -> Store:
    """Build the golden input as version 1 of the source did, which stripped by default.

    Version 2 gives other names to the same shards, as the version is a part of the recipe.
    """
    before = plan.SHARD_BYTES, JsonlSource.version
    plan.SHARD_BYTES, JsonlSource.version = SHARD_BYTES, 1
    try:
        return quick_build("jsonl", INPUT, out, strip=True, keep=["id", "url"])
    finally:
        plan.SHARD_BYTES, JsonlSource.version = before


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


def main() -> None:
    """Write `store-v1`."""
    made = HERE / "made"
    build(made)
    shutil.rmtree(HERE / "store-v1", ignore_errors=True)
    for name, data in without_paths(made).items():
        path = HERE / "store-v1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    shutil.rmtree(made)


if __name__ == "__main__":
    main()
