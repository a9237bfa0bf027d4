"""Make the golden store: `python tests/helpers/golden_store.py`.

It is made once for a format, and from the first release on kept for ever: a later program reads it.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from making import quick_build
from tokmill.builds import plan
from tokmill.store import manifest as layout
from tokmill.store.manifest import END, LENGTH, TAIL, with_checksum
from tokmill.store.store import Store

HERE = Path(__file__).parents[1] / "golden"
INPUT = HERE / "input"
MORE = HERE / "more.jsonl"
"""Records with a `kind` that repeats."""
PAIRS = HERE / "pairs.npz"
NO_CONTENT = (".lock", "events.jsonl")
SHARD_BYTES = 1 << 9
"""Input bytes of a shard, so that a small input makes several."""


@contextlib.contextmanager
def small_shards() -> Iterator[None]:
    """Cut the input into small shards."""
    before, plan.SHARD_BYTES = plan.SHARD_BYTES, SHARD_BYTES
    try:
        yield
    finally:
        plan.SHARD_BYTES = before


def build(out: Path) -> Store:
    """Build the golden input, and an overlay whose columns refer to records of the same store."""
    with small_shards():
        inputs = (INPUT, MORE)
        store = quick_build("jsonl", inputs, out, strip=True, keep=["id", "url", "kind"])
        refer = [f"{column}={out}" for column in ("anchor", "positive")]
        quick_build("overlay", out, "", values=str(PAIRS), name="pairs", refer=refer)
        return store


def unsealed(data: bytes) -> bytes:
    """Return a file without its digest."""
    found = TAIL.search(data, max(0, len(data) - LENGTH))
    return data[: found.start()] + END if found else data


def anywhere(store: Path) -> dict[str, bytes]:
    """The files of a store, with the paths of this machine made relative.

    What they are bound by is worked out anew: digests of plans, and of the files of items.
    """
    found = {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name not in NO_CONTENT and path.parent.name != "cache"
    }
    for name in [name for name in found if name.endswith("inputs.jsonl")]:
        for path, short in ((store, "store"), (INPUT, "input"), (HERE, "golden")):
            found[name] = found[name].replace(str(path.absolute()).encode(), short.encode())
            said = name.replace("inputs.jsonl", "plan.json")
            found[said] = found[said].replace(str(path.absolute()).encode(), short.encode())
        told = msgspec.json.decode(unsealed(found[said]), type=layout.Plan)
        digest = hashlib.sha256(found[name]).hexdigest()
        found[said] = with_checksum(msgspec.structs.replace(told, inputs_sha256=digest))
    return found


def main() -> None:
    """Write the golden store."""
    np.savez(PAIRS, anchor=np.arange(26)[::-1], positive=(np.arange(26) + 5) % 26)
    made = HERE / "made"
    build(made)
    shutil.rmtree(HERE / "store-v2", ignore_errors=True)
    for name, data in anywhere(made).items():
        path = HERE / "store-v2" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    shutil.rmtree(made)


if __name__ == "__main__":
    main()
