"""Memory of a build: it does not grow with a file, and an endless line is not held."""

import gzip
import io
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc/PID/status"
)

MIB = 1 << 20


def peak_anonymous(command: list[object], code: int = 0) -> tuple[int, str]:
    """Run a command; return its peak anonymous resident bytes (sampled), and what it printed.

    Files that are mapped do not count: the system takes those pages back when it needs them.
    """
    peak = 0
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if code else None,
        text=True,
    ) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            for line in status.read_text().splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) << 10)
            time.sleep(0.005)
        assert process.stdout
        out = process.stdout.read()
    assert process.returncode == code, out
    return peak, out


def build(inputs: Path, store: Path, tokenizer: Path) -> list[object]:
    return [
        sys.executable, "-m", "tokmill", "build", "jsonl", inputs, "-o", store, "--json",
        "--tokenizer", tokenizer, "--workers", 0, "--quiet", "--preset", "memory",
    ]  # fmt: skip


def write(path: Path, size: int) -> Path:
    line = json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 20}) + "\n"
    with path.open("w") as handle:
        for _ in range(size // len(line)):
            handle.write(line)
    return path


@pytest.mark.long
def test_memory_does_not_grow_with_the_file(fast_path: Path, tokenizer: Path) -> None:
    """512 MiB of input need no more than 64 MiB do and a little; both stay below 400 MiB."""
    peaks = []
    for size in (64 * MIB, 512 * MIB):
        path = write(fast_path / f"{size}.jsonl", size)
        peak, _ = peak_anonymous(build(path, fast_path / f"store-{size}", tokenizer))
        peaks.append(peak)
    print(f"peak anonymous memory: {[peak >> 20 for peak in peaks]} MiB")
    assert peaks[1] < peaks[0] + 100 * MIB
    assert max(peaks) < 400 * MIB


@pytest.mark.long
def test_a_line_of_200_mb_is_rejected_without_being_held(fast_path: Path, tokenizer: Path) -> None:
    """It is counted as too long; the records around it are built."""
    path = fast_path / "long.jsonl"
    with path.open("w") as handle:
        handle.write('{"text": "before"}\n{"text": "')
        for _ in range(200):
            handle.write("abcdefgh " * (1_000_000 // 9))
        handle.write('"}\n{"text": "after"}\n')
    peak, out = peak_anonymous(build(path, fast_path / "store", tokenizer))
    print(f"peak anonymous memory: {peak >> 20} MiB")
    report = json.loads(out)
    assert report["records"] == 2
    assert report["rejected"] == {"too long": 1}
    assert peak < 320 * MIB


def random_words(path: Path, size: int) -> Path:
    """JSON Lines of words that hardly ever come again."""
    draw = np.random.default_rng(0)
    with path.open("wb") as handle:
        while handle.tell() < size:
            letters = draw.integers(97, 123, MIB, dtype=np.uint8)
            letters[np.cumsum(draw.integers(4, 12, MIB // 12))] = 32
            text = letters.tobytes()
            for start in range(0, MIB, 1024):
                handle.write(b'{"text": "%b"}\n' % text[start : start + 1024])
    return path


@pytest.mark.long
def test_words_that_never_come_again_are_not_kept(fast_path: Path, tokenizer: Path) -> None:
    """An encoder that keeps each word that it met took 900 MiB of such a file."""
    path = random_words(fast_path / "words.jsonl", 100 * MIB)
    peak, out = peak_anonymous(build(path, fast_path / "store", tokenizer))
    print(f"peak anonymous memory: {peak >> 20} MiB")
    assert json.loads(out)["records"] > 100_000
    assert peak < 300 * MIB


BLANK = b"\n" * 50_000_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("blank.jsonl", BLANK),
        ("blank.jsonl.gz", gzip.compress(BLANK)),
        ("rejected.jsonl", b"x\n" * 2_000_000),
        ("both.jsonl", b'{"text": "a"}\nx\n' * 1_000_000),
        ("empty.jsonl", b"{}\n" * 3_000_000),
    ],
)
def test_what_is_left_out_takes_no_memory(
    fast_path: Path, tokenizer: Path, name: str, content: bytes
) -> None:
    """4 MB of newlines took 1.2 GB and a receipt of 202 MB, 100 KB of .gz took 4.2 GB."""
    path = fast_path / name
    path.write_bytes(content)
    with (gzip.open if name.endswith(".gz") else open)(path, "ab") as handle:
        handle.write(b'{"text": "the end"}\n')
    command = [*build(path, fast_path / "store", tokenizer), "--max-rejects", 1]
    peak, out = peak_anonymous(command)
    print(f"{name}: peak anonymous memory: {peak >> 20} MiB")
    assert json.loads(out)["records"] >= 1
    assert peak < 300 * MIB
    receipts = (fast_path / "store/shards").glob("*.json")
    assert sum(receipt.stat().st_size for receipt in receipts) < 1 << 20


def arrays(
    ids: bytes, rows: bytes = b"", method: int = zipfile.ZIP_DEFLATED
) -> Callable[[Path], Path]:
    """An archive whose arrays are headers (and rows), packed."""

    def make(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "a.npz", "w", method) as archive:
            for member in ("input_ids.npy", "attention_mask.npy"):
                with archive.open(member, "w", force_zip64=True) as file:
                    file.write(ids)
                    for _ in range(200 if member == "input_ids.npy" else 0):
                        file.write(rows)
        return folder / "a.npz"

    return make


def header(*shape: int) -> bytes:
    out = io.BytesIO()
    facts = {"descr": "<i4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, facts)
    return out.getvalue()


def one_text(kind: str) -> Callable[[Path], Path]:
    """A text of a megabyte that stands in many rows."""

    def make(folder: Path) -> Path:
        import pyarrow as arrow
        import pyarrow.feather
        import pyarrow.parquet

        path, text = folder / f"many.{kind}", "a b" * 333_000
        if kind == "parquet":
            numbers = arrow.array(np.zeros(65_536, np.int32))
            column = arrow.DictionaryArray.from_arrays(numbers, arrow.array([text]))
            pyarrow.parquet.write_table(
                arrow.table({"text": column}), path, compression="zstd", store_schema=False,
                dictionary_pagesize_limit=1 << 30,
            )  # fmt: skip
        else:
            table = arrow.table({"text": [text] * 500})
            pyarrow.feather.write_feather(table, path, compression="zstd", compression_level=19)
        return path

    return make


def long_name(folder: Path) -> Path:
    """A program with a symbol whose C++ name doubles with each parameter."""

    def reference(number: int) -> str:
        digits = ""
        number -= 1
        while number >= 0:
            digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number % 36] + digits
            number = number // 36 - (number < 36)
        return f"S{digits}_"

    name = "_Z1f1A1PIS_S_E" + "".join(f"S0_I{2 * reference(2 + i)}E" for i in range(26))
    source = folder / "a.s"
    source.write_text(
        f".text\n.globl _start\n_start: ret\n.globl {name}\n.type {name},@function\n"
        f"{name}: nop\nret\n.size {name},.-{name}\n"
    )
    subprocess.run(["as", "-o", folder / "a.o", source], check=True)
    subprocess.run(["ld", "-o", folder / "name.elf", folder / "a.o"], check=True)
    return folder / "name.elf"


def growing(folder: Path) -> Path:
    """A tokenizer whose normalizer doubles a text sixty times."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    value = {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "normalizer": {"type": "Sequence", "normalizers": [step] * 60},
    }
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return folder / "tokenizer.json"


def newlines(folder: Path) -> Path:
    (folder / "lines.gz").write_bytes(gzip.compress(b"\n" * (64 * MIB), 1))
    return folder / "lines.gz"


def blanks(folder: Path) -> Path:
    (folder / "blanks.gz").write_bytes(gzip.compress(b" " * (64 * MIB)) * 15)
    return folder / "blanks.gz"


READ = (
    "import sys; from tokmill.base import bounds; bounds.own_process = True; from {0} import {1}; "
)
READ += "from tokmill.base.errors import TokmillError\n"
READ += "try: {1}(sys.argv[1])\nexcept TokmillError as error: sys.exit(str(error))"
TOKMILL = ["-m", "tokmill"]
OUT = ["-o", "{out}"]
BOMBS: dict[str, tuple[Callable[[Path], Path], list[str], int, str]] = {
    # name: (makes a small file, words of the command, exit code, what is said)
    "windows of nothing": (
        arrays(header(1 << 40, 0)), [*TOKMILL, "build", "npz", "{file}", *OUT], 1,
        "windows of 0 ids"),
    "a window of 2^28 ids": (
        arrays(header(1, 1 << 28)),
        [*TOKMILL, "build", "npz", "{file}", *OUT], 1, "windows of 268,435,456 ids"),
    "a member that is unpacked at once": (
        arrays(header(200, 1 << 18), bytes(2 * MIB), zipfile.ZIP_BZIP2),
        [*TOKMILL, "build", "npz", "{file}", *OUT], 1, "reading it takes more than 300 MiB"),
    "a header of 200 MiB": (
        arrays(b"\x93NUMPY\x02\0" + (200 * MIB).to_bytes(4, "little")),
        [*TOKMILL, "build", "npz", "{file}", *OUT], 1, "is longer than any"),
    "one text in 65,536 rows": (
        one_text("parquet"),
        [*TOKMILL, "build", "parquet", "{file}", "--tokenizer", "{tokenizer}", *OUT], 1,
        "reading it takes more than 300 MiB"),
    "a batch of 500 MB": (
        one_text("arrow"),
        [*TOKMILL, "build", "parquet", "{file}", "--tokenizer", "{tokenizer}", *OUT], 1,
        "reading it takes more than"),
    "a name that doubles": (long_name, [*TOKMILL, "cfg", "{file}", "-o", "{out}.parquet"], 0, ""),
    "a normalizer that doubles": (
        growing, [*TOKMILL, "tokenizer", "encode", "-t", "{file}", "--text", "a"], 1,
        "1.15e+18 times as long"),
    **{
        f"newlines for {function}": (
            newlines, ["-c", READ.format(f"tokmill.bbv.traces.{module}", function), "{file}"], 1,
            said)
        for module, function, said in (
            ("addresses", "read_addresses", "reading it takes more than"),
            ("addresses", "read_maps", "reading it takes more than"),
            ("cpi", "read_measures", "it is empty"),  # its rows are read one by one
        )
    },
    "blanks for rates": (
        blanks,
        ["-c", READ.format("tokmill.bbv.traces.cpi", "read_rates").replace("]", "], [], 0"),
         "{file}"],
        1, "reading it takes more than"),
}  # fmt: skip


SLOW = ("a member that is unpacked at once",)
"""bzip2 takes half a minute to pack so many zeros."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in BOMBS]
)
def test_a_small_file_does_not_take_all_memory(name: str, fast_path: Path, tokenizer: Path) -> None:
    """It is refused by its name, or read; some took more than 6 GiB, or did not end."""
    make, words, code, said = BOMBS[name]
    file = make(fast_path)
    assert file.stat().st_size < MIB
    places = {"file": file, "out": fast_path / "out", "tokenizer": tokenizer}
    words = [word if words[0] == "-c" and word == words[1] else word.format(**places)
             for word in words]  # fmt: skip
    peak, out = peak_anonymous([sys.executable, *words], code)
    print(f"peak anonymous memory: {peak >> 20} MiB")
    assert said in out
    assert code == 0 or str(file) in out
    assert peak < 600 * MIB
