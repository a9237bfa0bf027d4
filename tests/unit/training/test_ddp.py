"""Real processes that share each step: the same training, exact resumes, and ends told once."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokmill
import toy
from processes import End, together, values
from tokmill.base.errors import Interrupted, MachineError, TokmillError, UsageError
from tokmill.tasks.next_token import NextToken
from tokmill.training.launch import place
from tokmill.training.session import Session
from toy import cycles, losses, make_store, stop_after, weights

torch.set_num_threads(1)

EXACT = ("model.safetensors", "optimizer.safetensors", "rng-00000.json", "rng-00001.json")
DROPOUT = {"model": {"dropout": 0.2}}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "train", cycles(120))


def recipe(store: Path, steps: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe whose runs need not measure how fast the machine is."""
    run = {"peak_flops": 1e12, **sections.pop("run", {})}
    return toy.recipe(store, steps, run=run, **sections)


def train(value: dict[str, Any], out: Path, stop_at: int = 0) -> int:
    """Train in this process, one of several; stop after a step, as the last one gets a signal."""
    with pytest.MonkeyPatch.context() as patch:
        if place().rank == place().world - 1:
            stop_after(stop_at, patch)
        return tokmill.train(value, out, quiet=True).step


def same_training(left: Path, right: Path) -> None:
    for name in ("loss", "grad_norm"):
        assert losses(left, name) == pytest.approx(losses(right, name), abs=1e-6), name
    assert losses(left, "targets") == losses(right, "targets")
    for name, tensor in weights(left).items():
        torch.testing.assert_close(weights(right)[name], tensor, atol=1e-5, rtol=1e-5)


def test_it_is_the_training_of_one_process(store: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": {"val": str(store)}}
    # Micro-batches of two rows: two a step in each of two processes, four in one.
    options["run"] = {"eval_rows": 1, "precision": "fp32", "micro_tokens": 32}
    train(recipe(store, 8, **options), tmp_path / "one")
    options["run"]["recompute"] = True
    assert values(together(2, train, recipe(store, 8, **options), tmp_path / "two")) == [8, 8]
    # Nothing is left of the look at whether they share the folder.
    assert not list((tmp_path / "two").glob(".tmp*"))
    same_training(tmp_path / "one", tmp_path / "two")
    # Of one row, one process evaluates it and the other none.
    val = losses(tmp_path / "one", "val_loss")
    assert losses(tmp_path / "two", "val_loss") == pytest.approx(val, abs=1e-6)
    files = sorted(path.name for path in (tmp_path / "two/checkpoints/step-00000008").iterdir())
    assert files == sorted([*EXACT, "state.json"])


@pytest.mark.parametrize("world", [3])
def test_a_resume_is_exact_to_the_last_bit(world: int, store: Path, tmp_path: Path) -> None:
    value = recipe(store, 10, data={"batch": 12}, run={"micro_tokens": 32, "seed": 7}, **DROPOUT)
    assert values(together(world, train, value, tmp_path / "whole")) == [10] * world
    for end in together(world, train, value, tmp_path / "parts", 6):
        # One tells, and the others say nothing with the same exit code.
        assert isinstance(end.error, Interrupted | SystemExit)
    assert values(together(world, train, value, tmp_path / "parts", 0)) == [10] * world
    last = "checkpoints/step-00000010"
    for name in EXACT:
        left, right = (tmp_path / run / last / name for run in ("whole", "parts"))
        assert left.read_bytes() == right.read_bytes(), name
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    # Each process draws its own dropout.
    states = [(tmp_path / "whole" / last / name).read_bytes() for name in EXACT[2:]]
    assert states[0] != states[1]


def test_a_checkpoint_continues_on_another_number(store: Path, tmp_path: Path) -> None:
    """Of one process in two, and of these in one."""
    value = recipe(store, 10)
    train(value, tmp_path / "whole")
    for world, stop in ((1, 3), (2, 6)):
        for end in together(world, train, value, tmp_path / "parts", stop):
            assert isinstance(end.error, Interrupted | SystemExit)
    assert train(value, tmp_path / "parts") == 10
    same_training(tmp_path / "whole", tmp_path / "parts")


def test_one_process_is_single_to_the_bit(store: Path, tmp_path: Path) -> None:
    for name in ("single", "ddp"):
        value = recipe(store, 4, run={"micro_tokens": 48, "engine": name}, **DROPOUT)
        train(value, tmp_path / name)
    for name in EXACT[:3]:
        left, right = (
            tmp_path / run / "checkpoints/step-00000004" / name for run in ("single", "ddp")
        )
        assert left.read_bytes() == right.read_bytes(), name


def ended(ends: list[End]) -> list[Any]:
    """What a caller would see of each process: its error, or the code of a silent exit."""
    return [
        end.error.code if isinstance(end.error, SystemExit) else type(end.error) for end in ends
    ]


def test_what_all_processes_refuse_is_told_once(store: Path, tmp_path: Path) -> None:
    train(recipe(store, 1), tmp_path / "run")
    # Rank 0 alone looks at the folder; the other one waits for it.
    other = recipe(store, 1, optim={"clip": 0.5})
    ends = together(2, train, other, tmp_path / "run")
    assert ended(ends) == [TokmillError, 1] and "optim.clip" in str(ends[0].error)
    # Both find that the model cannot be made; the first one says so.
    ends = together(2, train, recipe(store, 1, model={"heads": 3}), tmp_path / "new")
    assert sorted(map(str, ended(ends))) == sorted(["2", str(UsageError)])
    ends = together(2, train, recipe(store, 1, data={"batch": 3}), tmp_path / "new")
    assert sorted(map(str, ended(ends))) == sorted(["2", str(UsageError)])
    # Before they have met, the first process of a machine speaks.
    assert ended(together(2, train, recipe(store, 1, run={"steps": 0}), tmp_path / "new")) == [
        UsageError,
        2,
    ]
    assert ended(together(2, train, recipe(store, 1, run={"engine": "single"}), tmp_path)) == [
        UsageError,
        2,
    ]
    assert not (tmp_path / "new/recipe.json").exists()


def fail_on_rank_one(value: dict[str, Any], out: Path, how: str) -> int:
    """Train, and fail in process 1 alone after three steps."""
    forward, calls = NextToken.forward, [0]

    def failing(self: NextToken, batch: Any) -> Any:
        calls[0] += 1
        # The first call is the rehearsal.
        if os.environ["RANK"] == "1" and calls[0] == 5:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "refused":
                raise TokmillError("its rows are damaged", hint="look at them")
            if how == "bug":
                raise ZeroDivisionError
        return forward(self, batch)

    NextToken.forward = failing  # type: ignore[method-assign]
    return tokmill.train(value, out, quiet=True).step


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("refused", [1, TokmillError]),
        ("bug", [70, ZeroDivisionError]),
        ("killed", [MachineError, type(None)]),
    ],
)
def test_a_process_that_fails_ends_all(
    how: str, seen: list[Any], store: Path, tmp_path: Path
) -> None:
    value = recipe(store, 6, run={"checkpoint_every": 2})
    ends = together(2, fail_on_rank_one, value, tmp_path / "run", how)
    found = ended(ends)
    assert found[1] == seen[1]
    assert found[0] == seen[0] or issubclass(found[0], seen[0])
    if how == "killed":
        assert "has ended" in str(ends[0].error) and "the same command continues" in str(
            ends[0].error
        )
    names = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert names == ["step-00000002"]
    if how != "killed":
        return
    assert values(together(2, train, value, tmp_path / "run", 0)) == [6, 6]
    train(value, tmp_path / "whole")
    same_training(tmp_path / "whole", tmp_path / "run")


def refused_early(value: dict[str, Any], out: Path) -> None:
    """Process 0 refuses as soon as it has met the other, which is still about to."""
    if place().rank == 0:
        tokmill.train(value, out, quiet=True)
        return
    meet = dist.init_process_group

    def slow(*arguments: Any, **options: Any) -> None:
        meet(*arguments, **options)
        # It saw the end of process 0 while gloo was connecting, as on a busy machine.
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", slow)
        tokmill.train(value, out, quiet=True)


def test_a_process_that_ends_while_another_meets_it(store: Path, tmp_path: Path) -> None:
    tokmill.train(recipe(store, 2), tmp_path / "run", quiet=True)
    other = recipe(store, 2, optim={"clip": 0.5})
    first, second = together(2, refused_early, other, tmp_path / "run")
    # Either may be the first to leave; the error comes once.
    told = [type(end.error).__name__ for end in (first, second)]
    assert told == ["TokmillError", "SystemExit"]
    assert isinstance(second.error, SystemExit) and second.error.code == 1


def leave_late(value: dict[str, Any], out: Path) -> tuple[str, float]:
    """Be stopped, and take long to leave as rank 0; return how and when this process left."""
    interrupt = Session.interrupt

    def slow(self: Session) -> None:
        try:
            interrupt(self)
        finally:
            if self.engine.rank == 0:
                time.sleep(0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "interrupt", slow)
        stop_after(2, patch)
        try:
            tokmill.train(value, out, quiet=True)
        except BaseException as error:
            return type(error).__name__, time.monotonic()
    raise AssertionError


def test_rank_0_is_waited_for_when_a_run_is_stopped(store: Path, tmp_path: Path) -> None:
    """Whoever ended first would make torchrun end the others, while rank 0 may still write."""
    ends = values(together(2, leave_late, recipe(store, 9), tmp_path / "run"))
    assert [how for how, _ in ends] == ["Interrupted", "SystemExit"]
    # Rank 0 lets the other one go just before it leaves itself.
    assert ends[1][1] > ends[0][1] - 0.4
