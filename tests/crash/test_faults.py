"""A kill, a full disk and a disk error at every single write, fsync, rename, unlink and mkdir.

Property: whatever call fails, the command either does its work or refuses with one clear line; the
same command afterwards gives, byte for byte, the store that an undisturbed run gives.
"""

import hashlib
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from crash_stores import contents, copy, ending_names, is_clean, write_inputs, write_jsonl
from forked import ALL_CALLS, Forked

FAULTS = {"KILL": "signal=KILL", "ENOSPC": "error=ENOSPC", "EIO": "error=EIO"}
SCENARIOS = ("build", "growth", "change", "loss", "fresh")
LONG_SCENARIOS = (*SCENARIOS, "learn")
"""`learn` trains a tokenizer first, in a process of its own: too slow for the ordinary tests."""
PLAIN_WRITES = 8


@dataclass(frozen=True)
class Scenario:
    """A command, the store that it finds, and the files that it leaves when undisturbed."""

    arguments: tuple[object, ...]
    store: Path
    template: Path | None
    wanted: dict[str, bytes]


@dataclass(frozen=True)
class Point:
    """The `number`-th call of a kind that a process makes."""

    call: str
    number: int


def damage(store: Path) -> None:
    """Take a shard, and the receipt of another."""
    first, second, *_ = sorted((store / "shards").glob("*.safetensors"))
    first.unlink()
    second.with_suffix(".json").unlink()


def make_scenario(
    name: str, folder: Path, tokenizer: Path, forked: Forked, shards: int
) -> Scenario:
    """Prepare a scenario in `folder`; every command in it that is no test must succeed."""
    store, template, inputs = folder / "store", folder / "template", folder / "in"
    write_inputs(inputs, shards)
    last = inputs / ending_names(shards)[-1]

    def build(out: Path, *more: object) -> tuple[object, ...]:
        return ("build", "jsonl", inputs, "-o", out, "--tokenizer", tokenizer,
                "--workers", 0, "--quiet", *more)  # fmt: skip

    def must(*arguments: object) -> None:
        ran = forked(*arguments)
        assert ran.code == 0, ran.err

    arguments = build(store)
    if name == "growth":
        last.unlink()
    if name not in ("build", "learn"):
        must(*build(template))
    if name == "growth":
        write_jsonl(last)
    if name == "change":
        write_jsonl(last, word="wolf")
        arguments = build(store, "--yes")
    if name == "loss":
        damage(template)
    if name == "learn":
        arguments = ("build", "jsonl", inputs, "-o", store, "--vocab-size", 280,
                     "--workers", 0, "--quiet")  # fmt: skip
    if name == "fresh":
        arguments = build(store, "--fresh", "--set", "keep=['id']")
    copy(template if template.exists() else None, store)
    must(*arguments)
    must("store", "validate", store)
    return Scenario(arguments, store, template if template.exists() else None, contents(store))


def points_of(scenario: Scenario, forked: Forked) -> list[Point]:
    """Return the calls of an undisturbed run that touch the store (opening: for writing)."""
    copy(scenario.template, scenario.store)
    ran = forked(*scenario.arguments, strace=["-e", f"trace={ALL_CALLS}"])
    assert ran.code == 0, ran.err
    counts: Counter[tuple[str, str]] = Counter()
    points, processes = [], set()
    for line in ran.log:
        match = re.match(r"(\d+) +(\w+)\(", line)
        if not match:
            continue
        process, call = match.groups()
        counts[process, call] += 1
        reading = call.startswith("open") and "O_CREAT" not in line
        if str(scenario.store) in line and not reading:
            points.append(Point(call, counts[process, call]))
            processes.add(process)
    assert len(processes) == 1, "one process and one thread does all that is to be disturbed"
    return points


def ordinary(points: list[Point]) -> list[Point]:
    """Return every fsync, rename, unlink and lock, and writes spread evenly."""
    writes = [point for point in points if point.call == "write"]
    step = max(1, len(writes) // PLAIN_WRITES)
    kept = ("fsync", "rename", "unlink", "rmdir", "mkdir", "flock")
    return [point for point in points if point.call.startswith(kept)] + writes[::step]


class Disturber:
    """Tries faults on a scenario; equal remains of two faults are continued from only once."""

    def __init__(self, scenario: Scenario, forked: Forked, *, validate: bool = False) -> None:
        self.scenario, self.forked, self.validate = scenario, forked, validate
        # strace counts in the training process too: it may be the one that is hit.
        self.trains = "--vocab-size" in scenario.arguments
        self.mended: set[str] = set()
        self.faults = 0

    def __call__(self, point: Point, fault: str) -> None:
        """Inject one fault, then run the same command again and compare."""
        store = self.scenario.store
        copy(self.scenario.template, store)
        what = f"{fault} at {point.call} {point.number}"
        inject = f"inject={point.call}:{FAULTS[fault]}:when={point.number}"
        ran = self.forked(
            *self.scenario.arguments, strace=["-e", f"trace={point.call}", "-e", inject]
        )
        hit = ran.code == -9 or any("(INJECTED)" in line for line in ran.log)
        if not hit and ran.code == 0 and point.call.startswith("open"):
            return  # how often a run looks into /proc differs by one or two
        self.faults += 1
        if fault == "KILL" and not (self.trains and ran.code == 5 and is_clean(ran.err)):
            assert ran.code == -9, f"{what}: not killed\n{ran.err}"
        elif fault != "KILL":
            assert hit, f"{what}: nothing injected"
            # Where a failure does not matter or is mended on the spot, the work is done.
            refused = ran.code == 5 and is_clean(ran.err)
            assert refused or (ran.code == 0 and "error:" not in ran.err), (
                f"{what}: {ran.code}\n{ran.err}"
            )
        remains = remains_of(store)
        if remains not in self.mended:
            again = self.forked(*self.scenario.arguments)
            assert again.code == 0, f"{what}, then again: {again.code}\n{again.err}"
            found, wanted = contents(store), self.scenario.wanted
            assert found.keys() == wanted.keys(), what
            different = [name for name in found if found[name] != wanted[name]]
            assert not different, f"{what}: {different}"
            self.mended.add(remains)
            if self.validate:
                validated = self.forked("store", "validate", store)
                assert validated.code == 0, f"{what}: {validated.out}"


def remains_of(store: Path) -> str:
    """Return a digest of all that a store's folder holds, private files without their numbers."""
    digest = hashlib.sha256()
    for path in sorted(store.rglob("*")) if store.exists() else ():
        name = re.sub(r"(\.tmp-.*)-\d+-[0-9a-f]{8}$", r"\1", path.relative_to(store).as_posix())
        content = path.read_bytes() if path.is_file() and path.name != "events.jsonl" else b""
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


TURNS = ("KILL", "ENOSPC", "KILL", "EIO")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_at_each_commit(
    name: str, fast_path: Path, tokenizer: Path, strace: Forked
) -> None:
    """Every rename, unlink, mkdir, fsync and lock, and eight writes, of a store of two shards.

    Kills and errors take turns, in each scenario another way round; the long test below has all.
    """
    scenario = make_scenario(name, fast_path, tokenizer, strace, shards=2)
    disturb = Disturber(scenario, strace)
    first = SCENARIOS.index(name)
    for number, point in enumerate(ordinary(points_of(scenario, strace)), first):
        disturb(point, TURNS[number % len(TURNS)])
    assert disturb.faults >= 20


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", LONG_SCENARIOS)
def test_every_fault_at_every_call(
    name: str, fault: str, fast_path: Path, tokenizer: Path, strace: Forked
) -> None:
    """All calls, opening for writing too, of a store of five shards; each remains is validated."""
    scenario = make_scenario(name, fast_path, tokenizer, strace, shards=5)
    disturb = Disturber(scenario, strace, validate=True)
    points = points_of(scenario, strace)
    if name == "learn" and fault != "KILL":
        # The training process prints and opens: those counts would hit its output, not the store.
        points = [point for point in points if not point.call.startswith(("write", "open"))]
    for point in points:
        disturb(point, fault)
    assert disturb.faults >= len(points) - 4
    print(f"{name}, {fault}: {disturb.faults} faults, {len(disturb.mended)} different remains")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_kills_upon_kills(seed: int, fast_path: Path, tokenizer: Path, strace: Forked) -> None:
    """A build killed at a random call, again and again, until one run comes through."""
    scenario = make_scenario("build", fast_path, tokenizer, strace, shards=5)
    points = points_of(scenario, strace)
    chance = random.Random(seed)
    for _ in range(10):
        copy(None, scenario.store)
        for _ in range(200):
            point = chance.choice(points)
            inject = f"inject={point.call}:signal=KILL:when={point.number}"
            ran = strace(*scenario.arguments, strace=["-e", f"trace={point.call}", "-e", inject])
            if ran.code == 0:
                break
            assert ran.code == -9, ran.err
        assert ran.code == 0, "200 kills"
        assert contents(scenario.store) == scenario.wanted


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("fsync", 2),
        ("rename", 1),
        pytest.param("fsync", 1, marks=pytest.mark.long),
        pytest.param("fsync", 4, marks=pytest.mark.long),
        pytest.param("rename", 2, marks=pytest.mark.long),
        pytest.param("rename", 4, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_worker(
    call: str, number: int, fault: str, fast_path: Path, tokenizer: Path, strace: Forked
) -> None:
    """The same with two workers, on the real command: a fault ends the build, and it continues.

    strace counts for each process by itself; a build that stopped early has made the plan, so that
    it is a worker that makes the call first.
    """
    inputs, store = fast_path / "in", fast_path / "store"
    write_inputs(inputs, 5)
    command = ("build", "jsonl", inputs, "--tokenizer", tokenizer, "--quiet")
    assert strace(*command, "--workers", 0, "-o", fast_path / "wanted").code == 0
    assert strace(*command, "--workers", 0, "-o", store, "--max-time", "0s").code == 0
    inject = f"inject={call}:{FAULTS[fault]}:when={number}"
    done = subprocess.run(
        ["strace", "-f", "-y", "-s", "0", "-o", fast_path / "log", "-e", f"trace={call}",
         "-e", inject, sys.executable, "-m", "tokmill", *map(str, command),
         "--workers", "2", "-o", store],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    hits = [
        line
        for line in (fast_path / "log").read_text().splitlines()
        if "(INJECTED)" in line or "killed by SIGKILL" in line
    ]
    assert hits, "nothing injected"
    assert done.returncode == 5, f"{done.returncode}\n{done.stderr}"
    assert is_clean(done.stderr), done.stderr
    again = strace(*command, "--workers", 0, "-o", store)
    assert again.code == 0, again.err
    assert contents(store) == contents(fast_path / "wanted")
