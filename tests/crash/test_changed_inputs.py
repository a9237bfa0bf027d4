"""A build whose tokenizer, options or inputs are not what they were when it began."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from crash_stores import (
    contents,
    ending_names,
    identities,
    is_clean,
    write_inputs,
    write_jsonl,
    write_tokenizer,
)
from forked import Forked, Ran
from tokmill.builds.plan import SHARD_BYTES


class Small:
    """A finished store of three shards and the command that made it."""

    def __init__(self, folder: Path, tokenizer: Path, forked: Forked) -> None:
        self.inputs, self.store = folder / "in", folder / "store"
        self.tokenizer, self.forked = tokenizer, forked
        write_inputs(self.inputs, 3)
        assert self.build().code == 0

    def build(self, *more: object, tokenizer: Path | None = None, out: Path | None = None) -> Ran:
        """Build, or continue."""
        return self.forked(
            "build", "jsonl", self.inputs, "-o", out or self.store,
            "--tokenizer", tokenizer or self.tokenizer, "--workers", 0, "--quiet", *more,
        )  # fmt: skip

    def shard_of(self, name: str) -> str:
        """Return the shard of an input."""
        lines = (self.store / "inputs.jsonl").read_text().splitlines()
        return next(row[5] for row in map(json.loads, lines) if row[0] == name)

    def is_as_built_anew(self) -> bool:
        """Say whether the store is what a build into a new folder gives."""
        new = self.store.with_name("new")
        assert self.build(out=new).code == 0
        return contents(self.store) == contents(new)


@pytest.fixture
def small(fast_path: Path, tokenizer: Path, forked: Forked) -> Small:
    """A finished store."""
    return Small(fast_path, tokenizer, forked)


def test_another_tokenizer_is_refused_and_the_difference_shown(
    small: Small, fast_path: Path
) -> None:
    before = contents(small.store)
    ran = small.build(tokenizer=write_tokenizer(fast_path / "other.json", 270))
    assert ran.code == 1
    assert is_clean(ran.err)
    assert "vocabularies.token.sha256: " in ran.err and " → " in ran.err and "--fresh" in ran.err
    assert contents(small.store) == before


def test_a_changed_input_is_listed_and_with_yes_only_its_shard_is_made_again(small: Small) -> None:
    name = ending_names(3)[1]
    before, files = contents(small.store), identities(small.store)
    old = small.shard_of(name)
    write_jsonl(small.inputs / name, word="wolf")
    ran = small.build()
    assert ran.code == 1
    assert is_clean(ran.err)
    assert f"changed: {name}" in ran.err and "--yes" in ran.err
    assert contents(small.store) == before
    assert small.build("--yes").code == 0
    after = identities(small.store)
    new = small.shard_of(name)
    assert new != old
    assert files.keys() - after.keys() == {f"{old}.safetensors", f"{old}.json"}
    assert after.keys() - files.keys() == {f"{new}.safetensors", f"{new}.json"}
    assert all(after[kept] == files[kept] for kept in files.keys() & after.keys())
    assert small.is_as_built_anew()


@pytest.mark.parametrize("what", ["grows", "is rewritten", "vanishes"])
def test_a_file_that_changes_between_planning_and_reading_is_refused(
    what: str, fast_path: Path, tokenizer: Path, forked: Forked
) -> None:
    """Several shards; the last file changes while the first is read. Then --yes takes it."""
    inputs, store = fast_path / "in", fast_path / "store"
    write_jsonl(inputs / "a.jsonl", 2 << 20)
    last = write_jsonl(inputs / "z.jsonl")

    def change() -> None:
        until = time.monotonic() + 20
        # The log begins once the plan is made.
        while not (store / "events.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.001)
        if what == "vanishes":
            last.unlink()
        else:
            replaced = last.with_name(".new")
            write_jsonl(replaced, word="bear", size=3000)
            os.replace(replaced, last)

    command = ("build", "jsonl", inputs, "--tokenizer", tokenizer, "--workers", 0, "--quiet")
    thread = threading.Thread(target=change)
    thread.start()
    ran = forked(*command, "-o", store)
    thread.join()
    assert ran.code == 1, ran.err
    assert is_clean(ran.err)
    assert str(last) in ran.err
    assert ("was removed" if what == "vanishes" else "has changed") in ran.err
    refused = forked(*command, "-o", store)
    assert refused.code == 1 and ("changed: " in refused.err or "removed: " in refused.err)
    assert forked(*command, "-o", store, "--yes").code == 0
    assert forked(*command, "-o", fast_path / "new").code == 0
    assert contents(store) == contents(fast_path / "new")


def test_a_file_that_changes_while_it_is_read_is_refused(
    fast_path: Path, tokenizer: Path, forked: Forked
) -> None:
    """What was read may be half old and half new: no shard is made of it."""
    inputs, store = fast_path / "in", fast_path / "store"
    path = write_jsonl(inputs / "a.jsonl", 8 << 20)
    command = ("build", "jsonl", inputs, "--tokenizer", tokenizer, "--workers", 0, "--quiet")

    def change() -> None:
        until = time.monotonic() + 20
        while not (store / "events.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.05)
        with path.open("r+") as handle:
            handle.seek((8 << 20) - 500)
            handle.write("#")

    thread = threading.Thread(target=change)
    thread.start()
    ran = forked(*command, "-o", store)
    thread.join()
    assert ran.code == 1, ran.err
    assert is_clean(ran.err) and "has changed" in ran.err
    assert not list((store / "shards").glob("*.json"))


def test_small_inputs_really_make_several_shards(small: Small) -> None:
    """The other tests stand on this."""
    assert SHARD_BYTES == 64 << 20
    assert len(list((small.store / "shards").glob("*.json"))) == 3
