"""An input that keeps its size, its head, middle and tail, but not what lies between."""

import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from crash_stores import contents, is_clean, write_jsonl
from forked import Forked, Ran

SIZE = 1 << 20
PLACE = 300_000


class Edited:
    """A finished store of one large file, and the command that made it."""

    def __init__(self, folder: Path, tokenizer: Path, forked: Forked) -> None:
        self.path, self.store = folder / "in/a.jsonl", folder / "store"
        self.forked, self.tokenizer = forked, tokenizer
        write_jsonl(self.path, SIZE)
        write_jsonl(folder / "in/b.jsonl", 2000)
        assert self.build().code == 0

    def build(self, *more: object, out: Path | None = None) -> Ran:
        return self.forked(
            "build", "jsonl", self.path.parent, "-o", out or self.store, "--tokenizer",
            self.tokenizer, "--workers", 0, *more,
        )  # fmt: skip

    def run(self, *arguments: object) -> Ran:
        return self.forked("store", *arguments)

    def edit(self, *, set_back: bool = False, unseen: bool = False) -> None:
        """Change a letter between the samples.

        `set_back`: and set the time back; `unseen`: and lose what the store knew of the file.
        """
        facts = self.path.stat()
        with self.path.open("r+b") as handle:
            handle.seek(PLACE)
            data = handle.read(4096)
            letter = next(i for i, byte in enumerate(data) if chr(byte) in "aeiou")
            handle.seek(PLACE + letter)
            handle.write(b"y")
        if set_back or unseen:
            os.utime(self.path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        if unseen:
            (self.store / "cache/stamps.jsonl").unlink()

    def is_as_built_anew(self) -> bool:
        new = self.store.with_name("new")
        shutil.rmtree(new, ignore_errors=True)
        assert self.build(out=new).code == 0
        return contents(self.store) == contents(new)


@pytest.fixture
def edited(fast_path: Path, tokenizer: Path, forked: Forked) -> Edited:
    """A finished store."""
    return Edited(fast_path, tokenizer, forked)


@pytest.mark.parametrize("set_back", [False, True])
def test_an_edit_of_equal_size_is_told_and_taken_with_yes(set_back: bool, edited: Edited) -> None:
    before = contents(edited.store)
    edited.edit(set_back=set_back)
    ran = edited.build()
    assert ran.code == 1 and "changed: a.jsonl" in ran.err and "--yes" in ran.err
    assert is_clean(ran.err) and contents(edited.store) == before
    assert "1 input file touched" in ran.err and "1 changed" in ran.err
    assert edited.build("--yes").code == 0
    assert contents(edited.store) != before
    assert edited.is_as_built_anew()
    assert edited.run("validate", edited.store, "--deep", 9).code == 0
    assert "nothing was left to do" in edited.build().err


def test_an_edit_that_nothing_shows_is_found_by_those_who_read(edited: Edited) -> None:
    """No circle of hints: the shard that is named is removed, and made again."""
    edited.edit(unseen=True)
    assert edited.build().code == 0
    found = edited.run("validate", edited.store, "--deep", 9)
    assert found.code == 1 and (named := re.search(r"rm (\S+)", found.err + found.out))
    Path(named[1]).unlink()
    assert edited.build().code == 0
    assert edited.run("validate", edited.store, "--deep", 9).code == 0
    assert edited.is_as_built_anew()


def test_a_file_that_was_only_touched_costs_one_reading(edited: Edited) -> None:
    before = contents(edited.store)
    os.utime(edited.path)
    ran = edited.build()
    assert ran.code == 0 and "all hold what they held" in ran.err
    assert contents(edited.store) == before
    assert "touched" not in edited.build().err


@pytest.mark.parametrize("damage", [None, b"", b"[]\n", b'["a",[1,2]]\n', b"\xff\n"])
def test_stamps_may_be_lost_or_damaged(damage: bytes | None, edited: Edited) -> None:
    path = edited.store / "cache/stamps.jsonl"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    assert edited.build().code == 0
    assert "nothing was left to do" in edited.build().err


def test_stamps_are_no_part_of_the_store(edited: Edited) -> None:
    """Of the same content elsewhere, at another time, the same bytes are made."""
    other = edited.path.parent.with_name("copy")
    shutil.copytree(edited.path.parent, other)
    for path in other.iterdir():
        os.utime(path, (1, 1))
    ids = ("manifest.json", "shards", "vocab")
    one = {n: d for n, d in contents(edited.store).items() if n.startswith(ids)}
    edited.path = other / "a.jsonl"
    assert edited.build(out=edited.store.with_name("two")).code == 0
    two = contents(edited.store.with_name("two"))
    assert one == {name: data for name, data in two.items() if name.startswith(ids)}
    # In the folder that was made of the first: moved, so it is read once more.
    assert "all hold what they held" in edited.build().err


def test_an_edit_of_equal_size_while_it_is_read_is_refused(
    fast_path: Path, tokenizer: Path, forked: Forked
) -> None:
    """Lines were lost so: what was read was half the old text and half the new."""
    path, store = write_jsonl(fast_path / "in/a.jsonl", 24 << 20), fast_path / "store"
    data = path.read_bytes()
    edited = data[: 18 << 20] + data[5 << 20 : (5 << 20) + 1000] + data[(18 << 20) + 1000 :]
    command = ("build", "jsonl", path, "--tokenizer", tokenizer, "--workers", 0, "--quiet")

    def change(delay: float) -> None:
        until = time.monotonic() + 20
        while not (store / "events.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(delay)
        with path.open("r+b") as handle:
            handle.seek(18 << 20)
            handle.write(edited[18 << 20 : (18 << 20) + 1000])

    whole = []
    for content in (edited, data):
        path.write_bytes(content)
        whole.append(forked(*command, "-o", store).out)
        shutil.rmtree(store)
    for delay in (0.1, 0.2, 0.4, 0.6, 0.8):
        thread = threading.Thread(target=change, args=(delay,))
        thread.start()
        ran = forked(*command, "-o", store)
        thread.join()
        if ran.code == 1:
            break
        # The edit came before the first byte was read, or after the last one.
        assert ran.out in whole
        shutil.rmtree(store)
        path.write_bytes(data)
    assert ran.code == 1, ran.err
    assert is_clean(ran.err) and "has changed while it was read" in ran.err
    assert not list((store / "shards").glob("*.json"))
    assert forked(*command, "-o", store, "--yes").code == 0
