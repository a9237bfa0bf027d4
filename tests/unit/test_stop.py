"""Signals and time limits: noticed once, given back."""

import math
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tokmill.base import stop as module
from tokmill.base.stop import Stop


class Second(Exception):
    """What a second signal raises here."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def raises(number: int, frame: object) -> None:
        raise Second

    before = signal.signal(signal.SIGTERM, raises)
    yield
    assert signal.getsignal(signal.SIGTERM) is raises
    signal.signal(signal.SIGTERM, before)


def send(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_signal_is_noted_and_its_moment_is_the_time_to_stop() -> None:
    with Stop(math.inf) as stop:
        assert stop.reason == "" and stop.until.value == math.inf
        send()
        assert stop.reason == stop.signal == "SIGTERM"
        assert time.monotonic() - 5 < stop.until.value <= time.monotonic()
    with pytest.raises(Second):
        send()


def test_the_end_of_the_time_is_no_signal() -> None:
    stop = Stop(0.0)
    assert stop.reason == "the time limit" and stop.signal == ""


def test_a_later_signal_acts_as_it_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once are one: `timeout` sends two."""
    with Stop(math.inf) as stop:
        send(3)
        assert stop.reason == "SIGTERM"
        monkeypatch.setattr(module, "AT_ONCE", -1.0)
        with pytest.raises(Second):
            send()


def test_one_of_several_processes_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may report the end of a launcher more than once: saving must outlast that."""
    monkeypatch.setattr(module, "AT_ONCE", -1.0)
    with Stop(math.inf, ends_at_second=False) as stop:
        send(3)
        assert stop.reason == "SIGTERM"


def test_the_note_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    with Stop(math.inf, note="stopping\n"):
        send(2)
    assert capfd.readouterr().err == "stopping\n"
