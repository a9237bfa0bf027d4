"""A disk that is full while a checkpoint is saved: the command that is named goes on."""

import re
import shlex
from pathlib import Path

import pytest

from crash_stores import is_clean
from forked import ALL_CALLS, Forked
from toy import cycles, make_store

SMALL = ("dim=16", "layers=1", "heads=2", "length=16", "batch=4", "checkpoint_every=2",
         "peak_flops=1e12")  # fmt: skip


@pytest.mark.long
def test_the_hint_of_a_full_disk_is_a_command_that_goes_on(strace: Forked, fast_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra train")
    store = make_store(fast_path / "store", cycles(40))
    sets = [word for key in SMALL for word in ("--set", key)]

    def arguments(out: Path) -> tuple[object, ...]:
        return ("train", store, "-o", out, "--steps", 6, "--device", "cpu", "-q", *sets)

    strace.warm(*arguments(fast_path / "warm"))
    seen = strace(*arguments(fast_path / "whole"), strace=["-e", f"trace={ALL_CALLS}"])
    assert seen.code == 0, seen.err
    syncs = [line for line in seen.log if re.match(r"\d+ +fsync\(", line)]
    first = next(i for i, line in enumerate(syncs) if "checkpoints/.tmp-step-00000004" in line)
    # Which file of the checkpoint of step 4 does not fit; the first is that of step 2's.
    for number in (first + 1, first + 4, first + 7):
        out = fast_path / f"run {number}"
        fault = ["-e", "trace=fsync", "-e", f"inject=fsync:error=ENOSPC:when={number}"]
        ran = strace(*arguments(out), strace=fault)
        assert ran.code == 5 and is_clean(ran.err), ran.err
        assert "No space left" in ran.err and "free some space" in ran.err
        # Half a checkpoint takes no room from the next attempt.
        assert not list((out / "checkpoints").glob(".tmp-*"))
        found = re.search(r"`tokmill (.*?)`", ran.err)
        assert found, ran.err
        again = strace(*shlex.split(found[1]))
        assert again.code == 0, again.err
        for name in ("model.safetensors",):
            same = [(run / "model" / name).read_bytes() for run in (out, fast_path / "whole")]
            assert same[0] == same[1]
