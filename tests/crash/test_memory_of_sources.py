"""Inputs ten times as large as the room of a hard limit (a cgroup): build, train, validate, export.

The limit is what the same command takes with a small input (Python, torch, the libraries), and the
room. What is held at a time whatever the input (a shard, its columns in memory, a piece of an
execution, a block of texts) is a sixteenth of the usual here (`RUN`), so the room can be small.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from making import rec, write_store
from source_cases import CASES
from tokmill import plugins
from tokmill.store.schema import Column
from tokmill.store.store import Store

FILE = 4 << 20
ROOT = Path("/sys/fs/cgroup")
DOCS = Path(__file__).parents[2] / "docs"
RUN = """
import sys
from tokmill.bbv.traces import read
from tokmill.builds import plan
from tokmill.builds import plan
from tokmill.cli import main
from tokmill.store.shards import column_buffers
patched = [(plan, "SHARD_BYTES"), (column_buffers, "MOST"), (column_buffers, "MOST_STRINGS")]
for module, name in (*patched, (read, "PIECE")):
    setattr(module, name, getattr(module, name) // 16)
plan.BLOCK_BYTES["memory"] //= 16
if "tsv" in sys.argv:
    from tokmill.text import record_blocks
    from tokmill.text.encoding import encoders
    record_blocks.READ //= 16
    encoders._AT_ONCE //= 16
main(sys.argv[1:])
"""
SETS = "model.dim=16 model.layers=1 task.length=64 data.batch=2 steps=3 eval_every=3 eval_rows=8"


class Group:
    """A cgroup of version 1 or 2, in which commands run."""

    def __init__(self, name: str) -> None:
        self.old = (ROOT / "memory/memory.limit_in_bytes").exists()
        self.path = (ROOT / "memory" if self.old else ROOT) / name
        self.path.mkdir()
        assert (self.path / self.key).exists()

    @property
    def key(self) -> str:
        return "memory.limit_in_bytes" if self.old else "memory.max"

    def anonymous(self) -> int:
        lines = (self.path / "memory.stat").read_text().split("\n")
        return int(next(x for x in lines if x.startswith(("total_rss ", "anon "))).split()[1])

    def __call__(self, limit: int, *words: object) -> tuple[int, str, int]:
        """Run a command; return its exit code, what it said, and its peak besides mapped files."""
        (self.path / self.key).write_text(str(limit) if limit else "-1" if self.old else "max")
        enter = f'echo $$ > {self.path}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-c", RUN, *map(str, words)]
        peak = 0
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as child:
            while child.poll() is None:
                peak = max(peak, self.anonymous())
                time.sleep(0.02)
            assert child.stdout
            said = child.stdout.read()
        return child.returncode, said, peak


@pytest.fixture
def group() -> Iterator[Group]:
    try:
        made = Group(f"tokmill-{os.getpid()}")
    except (OSError, AssertionError):
        pytest.skip("cgroups of memory cannot be made here")
    yield made
    made.path.rmdir()


Make = Callable[[Path, Path, int], Sequence[object]]
"""(small input, empty folder, bytes) → the arguments that name a large input."""


def linked(file: Path, folder: Path, size: int) -> Sequence[object]:
    """Write the same content under many names: links cost no disk."""
    suffixes = "".join(file.suffixes)
    for number in range(size // file.stat().st_size + 1):
        os.link(file, folder / f"{number}{suffixes}")
    return [folder]


def repeated(between: bytes = b"") -> Make:
    """Return what writes a file several times behind itself."""

    def make(small: Path, folder: Path, size: int) -> Sequence[object]:
        data = small.read_bytes() + between
        file = folder.with_suffix(small.suffix)
        file.write_bytes(data * (FILE // len(data)))
        return linked(file, folder, size)

    return make


def rows(small: Path, folder: Path, size: int) -> Sequence[object]:
    import pyarrow
    from pyarrow import parquet

    table = parquet.read_table(small)
    many = pyarrow.concat_tables([table] * (FILE // 4 // table.nbytes)).combine_chunks()
    file = folder.with_suffix(small.suffix)
    parquet.write_table(many, file, 1000, compression="none", use_dictionary=False)
    return linked(file, folder, size)


def ids(small: Path, folder: Path, size: int) -> Sequence[object]:
    drawn = np.random.default_rng(0).integers(0, 250, FILE // 2, np.uint16)
    drawn[-1] = 0
    file = folder.with_suffix(".bin")
    drawn.tofile(file)
    return linked(file, folder, size)


def windows(small: Path, folder: Path, size: int) -> Sequence[object]:
    drawn = np.random.default_rng(0).integers(5, 250, (FILE // 512, 64), np.int32)
    file = folder.with_suffix(".npz")
    np.savez(file, input_ids=drawn, attention_mask=np.ones_like(drawn))
    return linked(file, folder, size)


def entries(small: Path, folder: Path, size: int) -> Sequence[object]:
    """Write a pickle with the entries of a small one many times, none of them shared."""
    one = pickle.loads(small.read_bytes())  # noqa: S301
    count = FILE // small.stat().st_size // 2
    many = (
        {f"{key}{i}": value for i in range(count) for key, value in one.items()}
        if isinstance(one, dict)
        else one * count
    )
    file = folder.with_suffix(".pkl")
    with file.open("wb") as opened:
        pickler = pickle.Pickler(opened, 4)
        pickler.fast = True
        pickler.dump(many)
    return linked(file, folder, size)


def execution(small: Path, folder: Path, size: int) -> Sequence[object]:
    """Write one long execution, whose blocks are called by their ids."""
    line = b"T" + b"".join(b":%d:%d " % (i, i % 97 + 1) for i in range(1, 2000)) + b"\n"
    file = folder / "long.bb"
    with file.open("wb") as opened:
        for _ in range(size // len(line)):
            opened.write(line)
    return [file]


def store(small: Path, folder: Path, size: int) -> Sequence[object]:
    """Build a store of ids."""
    source = folder / "ids"
    source.mkdir()
    made = folder / "store"
    command = ["build", "bin", *ids(small, source, size), "-o", made, "--separator-id", 0, "-q"]
    subprocess.run([sys.executable, "-c", RUN, *map(str, command)], check=True, capture_output=True)
    return [made]


def functions(small: Path, folder: Path, size: int) -> Sequence[object]:
    """Write a store of functions of 2,000 tokens, as mining takes some bytes for each of them."""
    draw = np.random.default_rng(0)
    strings = ("project", "program", "compiler", "level", "function")
    schema = {"token": Column("u2"), **{name: Column("utf8", per="record") for name in strings}}
    shards = [
        [
            rec(draw.integers(1, 60, 2000).tolist(), project=f"p{shard}", program="a",
                compiler="gcc", level=level, function=f"f{number}")
            for number in range(200) for level in ("O0", "O1", "O2", "O3")
        ]
        for shard in range(size // 3_200_000 + 1)
    ]  # fmt: skip
    write_store(folder / "store", schema, shards)
    return [folder / "store"]


def modules(small: Path, folder: Path, size: int) -> Sequence[object]:
    """Write modules with weights."""
    weights = "3f800000" * 32_768
    text = small.read_text()
    body = f'arith.constant dense<"0x{weights}"> : tensor<32768xf32>'
    file = folder.with_suffix(".mlir")
    file.write_text(
        text.replace(") -> tensor<8x8xf32> {", f") -> tensor<8x8xf32> {{ %weights = {body}", 1)
    )
    return linked(file, folder, size)


def graphs(small: Path, folder: Path, size: int) -> Sequence[object]:
    """Write graphs whose pairs have so many bytes."""
    count = int((size / small.stat().st_size) ** 0.5) + 2
    for number in range(count):
        os.link(small, folder / f"{number}.cfg.parquet")
    return [folder]


def values(small: Path, folder: Path, size: int) -> Sequence[object]:
    """Build a store of ids, and write vectors for its records: half of the size each."""
    (made,) = store(small, folder, size // 2)
    file = folder / "values.npy"
    count = len(Store(made))
    width = size // 2 // count // 4
    array = np.lib.format.open_memmap(file, "w+", np.dtype(np.float32), (count, width))
    array[:] = 1
    return [made, "--values", file]


class Tried(NamedTuple):
    """A source whose input may be ten times as large as the room."""

    make: Make
    room: int = 24
    """MiB."""
    options: tuple[object, ...] | None = None
    """In place of those of the case."""
    learned: bool = False
    """Whether the store is trained on and exported, too."""


TRIED = {
    "text": Tried(repeated(b"\n<|endoftext|>\n"), 40),
    "jsonl": Tried(repeated(), 40, learned=True),
    "parquet": Tried(rows, 40),
    "x86": Tried(linked, 8),
    "bbv": Tried(execution, 56, options=("--shared-ids",)),
    "select": Tried(store),
    "overlay": Tried(values),
    "npz": Tried(windows),
    "bin": Tried(ids, learned=True),
    "token-dicts": Tried(entries, 16),
    "triplets": Tried(entries),
    "tsv": Tried(repeated(), 10),
    "mlir": Tried(modules, 8),
    "pairs": Tried(graphs, 8),
    "mine": Tried(functions),
}
"""What a trained store holds does not depend on its source; that of JSON Lines has millions of
small documents, and that of `bin` has long ones."""
NOT_TRIED = {
    "corpus": "`tsv` and `corpus` hold a block of short texts",
    "embed": "`embed` reads a store, which is mapped, some tokens at a time",
}
"""Source → why not, in the words of docs/building.md."""


def test_every_source_is_tried_or_the_documentation_says_why_not() -> None:
    """A new line in `plugins` needs one here."""
    assert sorted([*TRIED, *NOT_TRIED]) == sorted(plugins.SOURCES.keys())
    said = " ".join((DOCS / "building.md").read_text().split())
    assert [why for why in NOT_TRIED.values() if why not in said] == []


def commands(kind: str, folder: Path, size: int = 0) -> Iterator[tuple[object, ...]]:
    """Yield what is run with an input of so many bytes; 0: a small one."""
    case, tried = CASES[kind], TRIED[kind]
    places = [folder / name for name in ("first", "options", "large")]
    for place in places:
        place.mkdir(parents=True)
    first = case.write(places[0], 0)
    options = case.options(places[1]) if tried.options is None else tried.options
    source: Sequence[object] = [first]
    if size or kind == "pairs":
        source = tried.make(first, places[2], size)
        # What is made for an overlay names its values, too.
        options = () if kind == "overlay" else options
    out = source[0] if case.over else folder / "store"
    named = [] if case.over else ["-o", out]
    yield ("build", kind, *source, *named, *options, "--preset", "memory", "-q")
    yield ("store", "validate", out)
    if tried.learned:
        for rows in "windows", "whole":
            sets = [x for one in [*SETS.split(), f"task.rows={rows}"] for x in ("--set", one)]
            run = ["-q", "--over-memory", "-o", folder / f"run-{rows}", *sets]
            yield ("train", out, "--val", out, *run)
        yield ("store", "export", "bin", out, "-o", folder / "out.bin")


@pytest.mark.long
@pytest.mark.parametrize("kind", TRIED)
def test_under_a_limit(kind: str, group: Group, tmp_path: Path) -> None:
    room = TRIED[kind].room << 20
    large = commands(kind, tmp_path / "large", 10 * room)
    for little, much in zip(commands(kind, tmp_path / "small"), large, strict=True):
        code, said, floor = group(0, *little)
        assert code == 0, said
        code, said, peak = group(floor + room, *much)
        print(kind, *much[:2], f"floor {floor >> 20} MiB, peak {peak >> 20} MiB", flush=True)
        assert code == 0, said
