"""Several processes, signals and killed parents: one writer a store, and no stray process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import UNSET

from crash_stores import contents, is_clean, write_inputs, write_jsonl
from forked import Forked
from tokmill.store.receipts import read_receipts
from tokmill.store.store import Store

psutil = pytest.importorskip("psutil", reason="needs the extra train")

SLOW_BYTES = 8 << 20
"""Input of a build that lasts a second or more with the slower engine."""


class Builds:
    """Starts real builds into one store, and ends what is left of them."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.inputs, self.store, self.wanted = folder / "in", folder / "store", folder / "wanted"
        self.tokenizer = tokenizer
        self.started: list[subprocess.Popen[str]] = []

    def command(self, store: Path, *more: object) -> list[str]:
        """Return the arguments of a build."""
        return [
            "build", "jsonl", str(self.inputs), "-o", str(store), "--quiet",
            "--tokenizer", str(self.tokenizer), *map(str, more),
        ]  # fmt: skip

    def start(self, *more: object) -> subprocess.Popen[str]:
        """Start a build in a process group of its own, with the slower of two equal engines."""
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tokmill"),
                *self.command(self.store, "--engine", "tokenizers", *more),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Under `nohup` the tests ignore it, and so would what they start.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def wait_for(self, what: Callable[[], object], seconds: float = 60) -> None:
        """Wait until something holds."""
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, "it did not come about in time"
            time.sleep(0.01)

    def log(self) -> str:
        """Return the store's log; it begins once the plan is made."""
        path = self.store / "events.jsonl"
        return path.read_text() if path.exists() else ""

    def first_shard(self) -> bool:
        """Say whether a shard is committed."""
        return any(self.store.glob("shards/*.json"))

    def finish_as(self, forked: Forked) -> None:
        """Run the build to its end: it must give what an undisturbed build gives."""
        again = forked(*self.command(self.store, "--workers", 0))
        assert again.code == 0, again.err
        assert forked(*self.command(self.wanted, "--workers", 0)).code == 0
        assert contents(self.store) == contents(self.wanted)
        assert forked("store", "validate", self.store).code == 0


@pytest.fixture
def builds(fast_path: Path, tokenizer: Path) -> Iterator[Builds]:
    """Six shards: five small ones and, between them, one that takes a while."""
    found = Builds(fast_path, tokenizer)
    write_inputs(found.inputs, 5)
    write_jsonl(found.inputs / "o-large.jsonl", SLOW_BYTES)
    yield found
    for process in found.started:
        with process:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return list(psutil.Process(process.pid).children(recursive=True))


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_second_build_into_the_folder_is_refused_at_once(builds: Builds, forked: Forked) -> None:
    first = builds.start("--workers", 0)
    builds.wait_for(builds.log)
    for more in ((), ("--fresh",)):
        before = time.monotonic()
        second = forked(*builds.command(builds.store, "--workers", 0, *more))
        assert time.monotonic() - before < 5
        assert second.code == 5
        assert is_clean(second.err) and "another build" in second.err
        assert str(builds.store) in second.err
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    builds.finish_as(forked)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGINT, os.killpg),
        (signal.SIGTERM, os.kill),
        (signal.SIGTERM, os.killpg),
        (signal.SIGHUP, os.killpg),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM to the group", "SIGHUP to the group"],
)
def test_an_interrupted_build_keeps_what_is_made(
    workers: int,
    number: signal.Signals,
    send: Callable[[int, int], None],
    builds: Builds,
    forked: Forked,
) -> None:
    """A terminal sends Ctrl-C to the whole process group, some clusters SIGTERM too."""
    build = builds.start("--workers", workers)
    builds.wait_for(lambda: len(list(builds.store.glob("shards/*.json"))) >= 5)
    time.sleep(0.4)  # The last shard, which takes a second or more, is begun.
    family = descendants(build)
    assert len(family) >= workers
    send(build.pid, number)
    out, err = build.communicate(timeout=60)
    assert build.returncode == 3, err
    assert is_clean(err) and err.startswith("interrupted: ") and "continues" in err
    builds.wait_for(lambda: not alive(family), 10)
    kept = Store(builds.store)
    assert kept.partial and f"kept: {len(kept):,} records" in err
    cut = [receipt for receipt in read_receipts(builds.store) if receipt.cut is not UNSET]
    assert [receipt.items[0].name for receipt in cut] == ["o-large.jsonl"]
    assert cut[0].records > 1000
    assert forked("store", "validate", builds.store).code == 0
    builds.finish_as(forked)


def test_more_signals_end_it_at_once_and_clean(builds: Builds, forked: Forked) -> None:
    """One while the processes are being ended leaves none of their semaphores."""
    build = builds.start("--workers", 2)
    builds.wait_for(lambda: len(descendants(build)) >= 2)
    family = descendants(build)
    for seconds in (0.6, 0.002, 0.002, 0):
        os.killpg(build.pid, signal.SIGTERM)
        time.sleep(seconds)
    out, err = build.communicate(timeout=60)
    assert build.returncode == 3 and is_clean(err), err
    builds.wait_for(lambda: not alive(family), 10)
    builds.finish_as(forked)


def test_ctrl_c_while_the_workers_start_is_quiet(builds: Builds, forked: Forked) -> None:
    """They are not ready for a signal yet, and must not print tracebacks."""
    build = builds.start("--workers", 2)
    builds.wait_for(builds.log)
    builds.wait_for(lambda: len(descendants(build)) >= 2)
    family = descendants(build)
    os.killpg(build.pid, signal.SIGINT)
    out, err = build.communicate(timeout=60)
    assert build.returncode == 3 and is_clean(err) and "interrupted: " in err, err
    builds.wait_for(lambda: not alive(family), 10)


def test_no_writer_outlives_a_killed_parent(builds: Builds, forked: Forked) -> None:
    build = builds.start("--workers", 2)
    builds.wait_for(builds.first_shard)
    family = descendants(build)
    assert len(family) >= 2
    build.kill()
    builds.wait_for(lambda: not alive(family), 10)
    assert build.wait(10) == -signal.SIGKILL
    builds.finish_as(forked)


def test_a_killed_worker_ends_the_build_with_a_hint(builds: Builds, forked: Forked) -> None:
    """As the kernel does it when memory runs out."""
    build = builds.start("--workers", 2)
    builds.wait_for(builds.first_shard)
    family = descendants(build)
    workers = [process for process in family if "spawn_main" in " ".join(process.cmdline())]
    workers[0].kill()
    out, err = build.communicate(timeout=60)
    assert build.returncode == 5, err
    assert is_clean(err) and "memory" in err
    builds.wait_for(lambda: not alive(family), 10)
    builds.finish_as(forked)


def test_an_error_in_a_worker_is_told_as_in_one_process(builds: Builds, forked: Forked) -> None:
    """A file that vanishes once the plan is made: no traceback of a pool, no killed worker."""
    build = builds.start("--workers", 2)
    builds.wait_for(builds.log)
    (builds.inputs / "o-large.jsonl").unlink()
    out, err = build.communicate(timeout=60)
    assert build.returncode == 1, err
    assert is_clean(err) and "o-large.jsonl: the file was removed" in err
    assert forked(*builds.command(builds.store, "--workers", 0, "--yes")).code == 0
    builds.finish_as(forked)


SCRIPT = """
import sys
import tokmill
from tokmill.builds.plan import Amount
from tokmill.builds.plan import How

how = How(quiet=True, amount=Amount(workers=2))
tokmill.build("jsonl", sys.argv[1], sys.argv[2], tokenizer=sys.argv[3], how=how)
"""


def test_a_script_that_its_workers_would_run_again_is_told_so(
    builds: Builds, tmp_path: Path
) -> None:
    write_inputs(builds.inputs, 3)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, builds.inputs, builds.store, builds.tokenizer]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "runs this script again" in ended.stderr and '__name__ == "__main__"' in ended.stderr
    # The one traceback is of the script itself.
    assert ended.stderr.count("Traceback") == 1
    script.write_text(SCRIPT.replace("how =", "if __name__ == '__main__':\n  how =").replace(
        "tokmill.build(", "  tokmill.build("))  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr


def test_parts_that_run_at_once_make_the_store_of_a_plain_build(
    builds: Builds, forked: Forked
) -> None:
    """They plan and finish one after the other; the last to end writes the manifest."""
    parts = [builds.start("--workers", 0, "--part", f"{i}/4") for i in (1, 2, 3, 4)]
    for part in parts:
        out, err = part.communicate(timeout=120)
        assert part.returncode == 0, err
    assert (builds.store / "manifest.json").exists()
    files = {path: path.stat().st_mtime_ns for path in builds.store.glob("shards/*")}
    builds.finish_as(forked)
    assert files == {path: path.stat().st_mtime_ns for path in builds.store.glob("shards/*")}


def test_a_killed_part_is_run_again_or_finished_by_a_plain_build(
    builds: Builds, forked: Forked
) -> None:
    parts = [builds.start("--workers", 0, "--part", f"{i}/3") for i in (1, 2, 3)]
    builds.wait_for(builds.first_shard)
    for part in parts:
        part.kill()
        part.wait(10)
    (builds.store / "shards" / ".tmp-left-1-00000000").write_bytes(b"left")
    for number in (1, 2, 3):
        ran = forked(*builds.command(builds.store, "--workers", 0, "--part", f"{number}/3"))
        assert ran.code == 0, ran.err
    assert (builds.store / "manifest.json").exists()
    builds.finish_as(forked)
