"""What is said of long work, and of numbers."""

import io
import threading

import pytest

from tokmill.base.progress import (
    Progress,
    elapsed,
    human_share,
    live,
)


def test_what_is_reached_is_shown_before_it_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock, 10.0))
    progress = Progress("build", 1000, done=100)
    progress.reach(600)
    assert (progress.done, progress.reached) == (100, 600)
    progress._show()
    assert capsys.readouterr().err == "build: 600 B of 1.0 KB (60%), 50 B/s, 8.0s left\n"
    progress.advance(200)
    progress.reach(500)
    assert (progress.done, progress.reached) == (300, 600)
    progress.advance(700)
    assert progress.reached == 1000


def test_a_line_does_not_wrap(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    progress = Progress("build", 1000, extra=lambda: "a long word about memory and other things")
    progress.terminal = True
    progress._show()
    shown = capsys.readouterr().err.removeprefix("\r")
    assert len(shown) == 39 and shown.endswith("…")


def test_a_notebook_shows_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Jupyter's stderr is not a terminal, but its pages obey a return.
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("build", 100) as progress:
        for _ in range(2):
            progress.shown = 0
            progress.advance(50)
    lines = stream.getvalue().split("\r")
    assert [line[:13] for line in lines] == ["", "build: 50 B o", "build: 100 B ", "build: 100 B "]
    assert len({len(line.rstrip("\n")) for line in lines[1:]}) == 1
    assert live()


def test_what_is_running_may_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokmill.base.progress.EVERY", 0.001)
    stages = iter(["flags", "tiles"])
    told = threading.Event()

    def stage() -> str:
        now = next(stages, None)
        if now is None:
            told.set()
        return now or "end"

    with elapsed(stage):
        assert told.wait(60)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines][:2] == ["flags", "tiles"]


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (0, 1, "0.0%"),
        (1, 1, "100.0%"),
        (0.125, 1, "12.5%"),
        (1 / 30_001, 2, "<0.01%"),
        (3462 / 3463, 1, ">99.9%"),
        (0.996, 0, ">99%"),
        (1 - 1e-12, 4, ">99.9999%"),
        (-1e-9, 2, "0.00%"),
        (1.5, 0, "150%"),
    ],
)
def test_a_share_is_rounded_to_none_or_all_only_if_it_is(
    share: float, digits: int, text: str
) -> None:
    assert human_share(share, digits) == text
