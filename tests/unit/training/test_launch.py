"""Where a process stands, and the torchrun line; that it runs is shown in tests/e2e."""

import io
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.training import launch
from tokmill.training.launch import (
    Launch,
    Place,
    check_host,
    one_error_per_machine,
    place,
    report_waiting,
    resume_command,
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        launch.SUPERVISED,
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def started_as(environment: pytest.MonkeyPatch, place: Place) -> None:
    for name, value in zip(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        (place.rank, place.world, place.local_rank, place.local_world),
        strict=True,
    ):
        environment.setenv(name, str(value))


def test_one_process_stands_alone(environment: pytest.MonkeyPatch) -> None:
    assert place() == Place(0, 1, 0, 1)
    environment.setenv("RANK", "3")  # Some clusters set it for everything.
    assert place() == Place() and resume_command(Path("r")) == "tokmill train -o r"


@pytest.mark.parametrize(
    ("here", "flags"),
    [(Place(1, 2, 1, 2), " --processes 2"), (Place(5, 8, 1, 4), "")],
)
def test_one_of_several(here: Place, flags: str, environment: pytest.MonkeyPatch) -> None:
    started_as(environment, here)
    assert place() == here and resume_command(Path("r")) == f"tokmill train -o r{flags}"


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("RANK", "", "RANK is ''"),
        ("RANK", "2", "RANK is 2"),
        ("RANK", "-1", "RANK is not set"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'"),
    ],
)
def test_a_starter_that_says_half(
    name: str, value: str, what: str, environment: pytest.MonkeyPatch
) -> None:
    started_as(environment, Place(0, 2, 0, 2))
    environment.setenv(name, value)
    with pytest.raises(UsageError, match=what):
        place()


@pytest.mark.parametrize(
    "given",
    [
        ["train", "a.toml", "--processes", "2", "-o", "a run", "--steps=5"],
        ["train", "a.toml", "-o", "a run", "--processes=2", "--steps=5", "--dry-run"],
    ],
)
def test_the_line_passes_everything_else_on(given: list[str]) -> None:
    assert Launch(processes=2).line(given) == (
        "torchrun --standalone --nproc-per-node=2 -m tokmill train a.toml -o 'a run' --steps=5"
    )


def test_the_line_of_several_machines() -> None:
    made = Launch(processes=4, nodes=2, node_rank=1, master="node-a:2900")
    made.check()
    given = ["train", "S", "--processes", "4", "--nodes", "2", "--node-rank", "1"]
    given += ["--master", "node-a:2900", "--set", "run.steps=2", "-o", "R"]
    assert made.torchrun(given) == [
        *("--nnodes=2", "--node-rank=1", "--master-addr=node-a", "--master-port=2900"),
        *("--nproc-per-node=4", "-m", "tokmill"),
        *("train", "S", "--set", "run.steps=2", "-o", "R"),
    ]


@pytest.mark.parametrize(
    ("launch", "what"),
    [
        (Launch(processes=0), "processes: expected `int` >= 1, not 0"),
        (Launch(nodes=0), "nodes: expected `int` >= 1"),
        (Launch(nodes=2, node_rank=2, master="a:1"), "--node-rank: 2 is none of 2"),
        (Launch(node_rank=1), "--node-rank: 1"),
        (Launch(nodes=2), "--master: '' with 2 machines"),
        (Launch(nodes=2, master="a"), "--master: 'a'"),
        (Launch(master="a:1"), "--master: 'a:1' with 1 machines"),
    ],
)
def test_numbers_that_start_nothing(
    launch: Launch, what: str, environment: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as caught:
        launch.check()
    assert what in str(caught.value) and caught.value.hint


def test_processes_do_not_start_processes(environment: pytest.MonkeyPatch) -> None:
    started_as(environment, Place(1, 2, 1, 2))
    with pytest.raises(UsageError, match="one of several"):
        Launch(processes=2).check()
    Launch().check()


def test_the_first_process_of_a_machine_speaks(environment: pytest.MonkeyPatch) -> None:
    for here, expected in ((Place(4, 8, 0, 4), TokmillError), (Place(5, 8, 1, 4), SystemExit)):
        started_as(environment, here)
        with pytest.raises(expected) as caught, one_error_per_machine():
            raise TokmillError("all of them see it", hint="look")
    assert caught.value.code == 1


def test_the_line_needs_no_torch() -> None:
    check = (
        "import sys; from tokmill.training.launch import Launch, place; Launch(2).line(['train'])\n"
        "place(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_one_machine_needs_no_name(environment: pytest.MonkeyPatch) -> None:
    """`--standalone` would look for localhost, which a small system may not know."""
    given: list[str] = []
    environment.setattr(launch, "_torchrun", lambda arguments: given.extend(arguments) or {})
    for name in ("OMP_NUM_THREADS", launch.LAUNCHED, "GLOO_SOCKET_IFNAME", "RES_OPTIONS",
                 "TORCH_CPP_LOG_LEVEL"):  # fmt: skip
        environment.setenv(name, "1")  # put back afterwards
    assert Launch(processes=2).run(["train", "S", "-o", "R"]) == 0
    assert "--standalone" not in given and not any("localhost" in one for one in given)
    assert {"--local-addr=127.0.0.1", "--rdzv-endpoint=127.0.0.1:0"} < {*given}


def test_a_machine_that_nobody_knows(environment: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    check_host("127.0.0.1", "--master")
    environment.setattr(socket, "getaddrinfo", unknown)
    environment.setattr(launch, "_torchrun", lambda _: pytest.fail("it would wait for minutes"))
    with pytest.raises(MachineError, match="'node-a' cannot be found") as found:
        Launch(processes=2, nodes=2, master="node-a:29500").run(["train", "S", "-o", "R"])
    assert found.value.where == "--master" and "hosts file" in found.value.hint


def test_what_is_waited_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by capsys: its reading empties a buffer, and so loses what a thread writes meanwhile.
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with report_waiting("the others", 60):
        pass
    assert said.getvalue() == ""
    with report_waiting("the others", 0.01):
        until = time.monotonic() + 30
        # The line and its end may be written one after the other.
        while not said.getvalue().endswith("\n"):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert said.getvalue() == "waiting for the others\n"


def test_who_is_silent_leaves_the_word_to_the_first(environment: pytest.MonkeyPatch) -> None:
    """torchrun ends all when one has ended: the first must have spoken by then."""
    slept: list[float] = []
    environment.setattr(time, "sleep", slept.append)
    started_as(environment, Place(1, 2, 1, 2))
    for supervised in (False, True):
        if supervised:
            environment.setenv(launch.SUPERVISED, "a run")
        with pytest.raises(SystemExit), one_error_per_machine():
            raise UsageError("wrong", hint="right")
    assert slept == [launch.PATIENCE]
