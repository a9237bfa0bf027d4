"""What a user may do wrong: one clear line, a hint, the right exit code, never a traceback."""

import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from crash_stores import is_clean, write_jsonl
from forked import Forked, Ran
from tokmill.base.locks import locked

Build = Callable[..., Ran]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A sound input file."""
    return write_jsonl(tmp_path / "in" / "a.jsonl")


@pytest.fixture
def build(tmp_path: Path, tokenizer: Path, forked: Forked) -> Build:
    """Builds from some inputs; the result must be clean."""

    def run(
        *given: object, code: int, kind: str = "jsonl", out: Path | None = None,
        tokens: Path = tokenizer,
    ) -> Ran:  # fmt: skip
        ran = forked(
            "build", kind, *given, "-o", out or tmp_path / "store", "--tokenizer", tokens,
            "--workers", 0, "--quiet", timeout=20,
        )  # fmt: skip
        assert is_clean(ran.err), ran.err
        assert ran.code == code, ran.err
        return ran

    return run


def test_a_missing_input(build: Build, tmp_path: Path) -> None:
    ran = build(tmp_path / "nowhere", code=1)
    assert str(tmp_path / "nowhere") in ran.err


def test_no_input_at_all(build: Build) -> None:
    build(code=2)


def test_an_empty_input_file(build: Build, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert "empty" in build(tmp_path / "empty.jsonl", code=1).err


def test_an_empty_file_among_others_is_no_error(
    inputs: Path, tmp_path: Path, tokenizer: Path, forked: Forked
) -> None:
    (inputs.parent / "b.jsonl").touch()
    ran = forked(
        "build", "jsonl", inputs.parent, "-o", tmp_path / "store", "--tokenizer", tokenizer,
        "--workers", 0,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert forked("store", "validate", tmp_path / "store").code == 0


def test_a_folder_without_fitting_files(build: Build, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.csv").write_text("a,b\n")
    assert ".jsonl" in build(tmp_path / "folder", code=1).err


def test_two_inputs_of_one_name(
    inputs: Path, tmp_path: Path, tokenizer: Path, forked: Forked
) -> None:
    """More of the path tells them apart."""
    other, store = write_jsonl(tmp_path / "other" / "a.jsonl"), tmp_path / "store"
    ran = forked("build", "jsonl", inputs, other, "-o", store, "--tokenizer", tokenizer, "-q")
    assert ran.code == 0, ran.err
    names = [json.loads(line)[0] for line in (store / "inputs.jsonl").read_text().splitlines()]
    assert names == ["in/a.jsonl", "other/a.jsonl"]


def test_a_pipe_for_an_input(build: Build, tmp_path: Path) -> None:
    """Reading it would wait for ever, or take what cannot be read again."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "neither a file nor a folder" in build(tmp_path / "pipe.jsonl", code=1).err


def test_a_file_where_the_store_should_be(build: Build, inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    assert "is a file" in build(inputs, code=2).err
    (tmp_path / "store").unlink()
    (tmp_path / "store").symlink_to("nothing")
    assert "a link to nothing" in build(inputs, code=5).err


def test_a_file_above_the_store(build: Build, inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = build(inputs, out=tmp_path / "file" / "store", code=5)
    assert str(tmp_path / "file" / "store") in ran.err


def test_a_folder_that_holds_other_things(build: Build, inputs: Path) -> None:
    assert "not empty" in build(inputs, out=inputs.parent, code=2).err


@pytest.mark.parametrize("name", ["shards", "vocab", "plan.json", "manifest.json", "inputs.jsonl"])
def test_a_store_with_a_file_for_a_folder_or_the_reverse(
    name: str, build: Build, inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    if "." in name:
        (tmp_path / "store" / name).mkdir()
    else:
        (tmp_path / "store" / name).write_text("")
    # Nothing says that it is ours, and then its lock does.
    assert name in build(inputs, code=2).err
    with locked(tmp_path / "store/.lock", "", ""):
        pass
    assert name in build(inputs, code=5).err


@pytest.mark.parametrize("kind", ["jsonl", "text"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_binary_rubbish(kind: str, suffix: str, build: Build, tmp_path: Path) -> None:
    end = {"jsonl": ".jsonl", "text": ".txt"}[kind]
    path = tmp_path / f"rubbish{end}{suffix}"
    path.write_bytes(bytes((i * i * 31 + i) % 251 for i in range(50_000)) + b"\xff\xfe\x00")
    build(path, kind=kind, code=1)


def test_a_cut_off_gzip_file(build: Build, inputs: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(inputs.read_bytes())[:-20])
    assert "gzip" in build(path, code=1).err


def test_a_wrong_field_name(build: Build, inputs: Path) -> None:
    assert "no record" in build(inputs, "--set", "fields=['body']", code=1).err


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"<!DOCTYPE html><html>404</html>", b"[1, 2]", b"null", b"{}", b"\xff\xfe\x00",
     b'{"model": 3}', b'{"model": {"type": "BPE", "vocab": 7, "merges": []}}',
     b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"],
)  # fmt: skip
def test_a_tokenizer_that_is_none(
    content: bytes, build: Build, inputs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    assert str(path) in build(inputs, tokens=path, code=1).err


def test_a_missing_tokenizer(build: Build, inputs: Path, tmp_path: Path) -> None:
    assert "none.json" in build(inputs, tokens=tmp_path / "none.json", code=1).err


def test_a_folder_without_a_tokenizer(build: Build, inputs: Path) -> None:
    build(inputs, tokens=inputs.parent, code=1)


def test_an_error_that_cannot_be_printed_keeps_its_exit_code(tmp_path: Path) -> None:
    """stderr goes to a full disk."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tokmill", "store", "validate", tmp_path / "none"],
            stderr=full, check=False,
        )  # fmt: skip
    assert done.returncode == 1


@pytest.mark.parametrize("command", ["validate", "rejects"])
@pytest.mark.parametrize("what", ["nothing", "a file", "an empty folder"])
def test_store_commands_on_what_is_no_store(
    command: str, what: str, tmp_path: Path, forked: Forked
) -> None:
    path = tmp_path / "thing"
    if what == "a file":
        path.write_text("")
    if what == "an empty folder":
        path.mkdir()
    ran = forked("store", command, path)
    assert ran.code in (1, 5) and is_clean(ran.err), ran.err
    assert str(path) in ran.err


@pytest.fixture
def powerless() -> Callable[..., Ran]:
    """The command without root's right to read and write whatever it likes."""
    prefix: list[str] = []
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv, as root may touch everything")
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]

    def run(*arguments: object) -> Ran:
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "tokmill", *map(str, arguments)],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr)

    ready = run("--version")
    if ready.code:
        pytest.skip(f"rights cannot be given up here: {ready.err.strip()}")
    return run


@pytest.mark.parametrize(
    "what", ["the file", "its folder", "a folder below", "the output", "the store", "tokenizer"]
)
def test_what_the_user_may_not_touch(
    what: str, tmp_path: Path, tokenizer: Path, powerless: Callable[..., Ran]
) -> None:
    """Named in one line with exit code 5; a folder that cannot be listed is not left out."""
    folder = Path(shutil.copytree(tokenizer.parent, tmp_path / "here"))
    data = write_jsonl(folder / "in" / "a.jsonl")
    write_jsonl(folder / "in" / "deep" / "b.jsonl")
    out = folder / "out"
    out.mkdir()
    named, locked = {
        "the file": (data, data),
        "its folder": (data, data.parent),
        "a folder below": (data.parent, data.parent / "deep"),
        "the output": (data, out),
        "the store": (data, out / "store"),
        "tokenizer": (data, folder / "tokenizer.json"),
    }[what]
    if what == "the store":
        locked.mkdir()
    locked.chmod(0o000 if "output" not in what else 0o555)
    try:
        ran = powerless(
            "build", "jsonl", named, "-o", out / "store", "--tokenizer", folder / "tokenizer.json",
            "--workers", 0, "--quiet",
        )  # fmt: skip
        assert ran.code == 5, ran.err
        assert is_clean(ran.err), ran.err
        assert str(locked) in ran.err and os.strerror(errno.EACCES) in ran.err
    finally:
        locked.chmod(0o755)


@pytest.mark.parametrize("command", ["validate", "rejects"])
def test_a_store_that_may_not_be_read(
    command: str, inputs: Path, tmp_path: Path, tokenizer: Path,
    powerless: Callable[..., Ran], forked: Forked,
) -> None:  # fmt: skip
    store = tmp_path / "store"
    made = forked("build", "jsonl", inputs, "-o", store, "--tokenizer", tokenizer, "--workers", 0)
    assert made.code == 0, made.err
    for shut in (store, store / "shards", store / "manifest.json"):
        before = shut.stat().st_mode
        shut.chmod(0o000)
        try:
            ran = powerless("store", command, store)
        finally:
            shut.chmod(before)
        if shut.name == "shards" and ran.code == 1:
            continue  # reported as missing shards
        assert ran.code == 5, ran.err
        assert is_clean(ran.err) and os.strerror(errno.EACCES) in ran.err
