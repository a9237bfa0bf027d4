"""Results made ahead in a thread, and a thread that does not end."""

import threading
from collections.abc import Iterator

import pytest

from tokmill.base import prefetch as module
from tokmill.base.prefetch import prefetch


def test_results_and_errors_come_in_order() -> None:
    def source() -> Iterator[int]:
        yield from range(3)
        raise KeyError("end")

    found = []
    with pytest.raises(KeyError):
        found.extend(prefetch(source()))
    made = prefetch(iter(range(3)))
    assert list(made) == [0, 1, 2]


def test_a_thread_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Ctrl-C would wait for it, for ever."""
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    held = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        held.wait()

    results = prefetch(source())
    assert next(results) == 1
    closer = threading.Thread(target=results.close)
    closer.start()
    closer.join(20)
    ended = not closer.is_alive()
    held.set()
    closer.join()
    assert ended
