"""Programs to a store, beside pickles of dicts as SemanticBBV writes them; and a whole machine.

The gate: the pickles, read back as a store, hold the tokens of the store, program by program.
Both find functions with the same lifter.
"""

import hashlib
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from measure import TOKMILL, Contestant, interleave, run_once
from tokmill import Store, build
from tokmill.base.errors import TokmillError
from tokmill.base.progress import human_bytes, human_time
from tokmill.store.checks.hashes import token_values
from tokmill.x86.lift.cfg import lift
from tokmill.x86.tokens.rules import COLUMNS, tokenize_bytes

ROOTS = ("/usr/bin", "/usr/sbin", "/usr/lib/x86_64-linux-gnu")
MACHINE = "/usr"
PROGRAMS = 200
MOST_BYTES = 12_000_000
X86_64 = 62


def programs(root: Path) -> Iterator[Path]:
    """Yield the ELF files for x86-64 below a folder, each once.

    Hidden folders are left out, as the build leaves them out: what stands there is debug data.
    """
    seen = set()
    for path in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if hidden or path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(20)
        facts = path.stat()
        inode = (facts.st_dev, facts.st_ino)
        if head[:5] == b"\x7fELF\2" and head[18] == X86_64 and inode not in seen:
            seen.add(inode)
            yield path


def linked(folder: Path, found: list[Path]) -> Path:
    """Return a folder of links to files, by their whole paths."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in found:
        link = folder / path.relative_to("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    return folder


def some(folder: Path, count: int, most: int = MOST_BYTES) -> Path:
    """Return a folder with so many programs, in the order of the digests of their names."""
    found = {
        hashlib.sha256(path.name.encode()).hexdigest(): path
        for root in ROOTS
        for path in programs(Path(root))
        if path.stat().st_size < most
    }
    chosen = [path for _, path in sorted(found.items())][:count]
    if len(chosen) < count:
        raise SystemExit("too few programs on this machine; no figure")
    return linked(folder, chosen)


def write_pickles(folder: Path, out: Path) -> None:
    """Write the functions of each program as lists of dicts, an instruction at a time."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            graph = lift(path)
        except TokmillError:
            continue
        code = graph.code.tobytes()
        sequences = []
        ends = graph.block_bytes[graph.function_blocks].tolist()
        for begin, end in zip(ends[:-1], ends[1:], strict=True):
            if begin < end:
                sequences.append(tokenize_bytes(code[begin:end], begin, bits=graph.bits))
        name = out / path.relative_to(folder)
        name.parent.mkdir(parents=True, exist_ok=True)
        with name.with_name(name.name + ".pkl").open("wb") as file:
            pickle.dump(sequences, file)


def digests(store: Store) -> dict[str, str]:
    """Return program → digest of its tokens in all columns."""
    found: dict[str, hashlib._Hash] = {}
    for number in range(len(store.shards)):
        names = [item.name.removesuffix(".pkl") for item in store.receipt(number).items]
        shard = store.shard(number)
        for start in range(0, len(shard), 1024):
            batch = shard.records(start, start + 1024, store.schema)
            item = shard["item"][start : start + len(batch)].astype(int)
            for column in COLUMNS:
                tokens = token_values(batch, column).astype("<u2")
                for one in np.unique(item).tolist():
                    rows = np.flatnonzero(item == one)
                    place = slice(batch.offsets[rows[0]], batch.offsets[rows[-1] + 1])
                    running = found.setdefault(f"{names[one]} {column}", hashlib.sha256())
                    running.update(tokens[place].tobytes())
    return {name: running.hexdigest() for name, running in found.items()}


def check(store: Path, pickles: Path, cache: Path) -> int:
    """Compare all tokens; return how many instructions there are."""
    ours = Store(store)
    options = {"vocab": str(store / "vocab"), "rules": "tokmill"}
    shutil.rmtree(cache / "x86-back", ignore_errors=True)
    theirs = build("token-dicts", [pickles], cache / "x86-back", **options)
    if ours.tokens != theirs.tokens or digests(ours) != digests(theirs):
        raise SystemExit("the pickles do not hold the tokens of the store; no figure")
    return ours.manifest.notes["instructions"]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tokmill(folder: Path, out: Path, *more: str) -> list[str]:
    return [TOKMILL, "build", "x86", str(folder), "-o", str(out), "--quiet", *more]


def main(cache: Path) -> list[str]:
    folder, store, pickles = some(cache / "x86-in", PROGRAMS), cache / "x86", cache / "x86-pickles"

    def clear() -> None:
        shutil.rmtree(store, ignore_errors=True)
        shutil.rmtree(pickles, ignore_errors=True)

    def ours(workers: int) -> Contestant:
        name = f"store, `--workers {workers}`"
        return Contestant(name, tokmill(folder, store, "--workers", str(workers)), clear)

    writer = Contestant(
        "pickles of dicts, one process",
        [sys.executable, __file__, "pickles", str(folder), str(pickles)],
        clear,
    )
    stores = [ours(0), ours(2)]
    run_once(writer)
    pickle_bytes = size(pickles)
    subprocess.run(stores[0].command, check=True, stdout=subprocess.DEVNULL)
    instructions = check(store, pickles, cache)
    interleave(stores, 1)
    store_bytes = size(store)
    rows = [(one, store_bytes) for one in stores] + [(writer, pickle_bytes)]
    lines = [
        f"{PROGRAMS} programs of this machine below {human_bytes(MOST_BYTES)}, "
        f"{human_bytes(size(folder))}, {instructions:,} instructions; tokens verified equal.",
        "",
        "| program | seconds | instructions/s | peak MiB | on disk | wall time / first |",
        "|---|---|---|---|---|---|",
    ]
    for one, bytes_ in rows:
        lines.append(
            f"| {one.name} | {one.best:.1f} | {instructions / one.best:,.0f} | "
            f"{one.memory / 2**20:.0f} | {human_bytes(bytes_)} | {one.best / stores[0].best:.2f} |"
        )
    lines += [
        "",
        f"The store is {pickle_bytes / store_bytes:.1f} times smaller: "
        f"{store_bytes / instructions:.1f} bytes an instruction against "
        f"{pickle_bytes / instructions:.0f}.",
    ]
    return lines


def machine(cache: Path) -> list[str]:
    """Build a store of every ELF file for x86-64 of a machine; return lines for RESULTS.md."""
    folder, store = linked(cache / "x86-machine", list(programs(Path(MACHINE)))), cache / "x86-all"
    command = tokmill(folder, store, "--workers", "2", "--max-rejects", "1", "--json")
    one = Contestant("machine", command, lambda: shutil.rmtree(store, ignore_errors=True))
    run_once(one)
    manifest = Store(store).manifest
    notes, planned = manifest.notes, sum(path.is_file() for path in folder.rglob("*"))
    lines = [
        f"Every ELF file for x86-64 below {MACHINE}, {human_bytes(manifest.input_bytes)}, "
        "`--workers 2`:",
        "",
        "| what | |",
        "|---|---|",
        f"| time | {human_time(one.best)} |",
        f"| peak memory | {one.memory / 2**20:,.0f} MiB resident, of which "
        f"{one.anonymous[0] / 2**20:,.0f} MiB are not pages of files |",
        f"| programs | {notes['programs']:,} of {planned:,} |",
        f"| functions | {notes['functions']:,} |",
        f"| blocks | {notes['blocks']:,} |",
        f"| instructions | {notes['instructions']:,} |",
        f"| tokens | {manifest.tokens:,} |",
        f"| on disk | {human_bytes(size(store))} |",
    ]
    lines += [f"| rejected: {reason} | {n:,} |" for reason, n in manifest.rejected.items()]
    return lines


if __name__ == "__main__":
    if sys.argv[1] == "pickles":
        write_pickles(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1] == "machine":
        print("\n".join(machine(Path(sys.argv[2]))))
    else:
        print("\n".join(main(Path(sys.argv[1]))))
