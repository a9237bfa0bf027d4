"""What workers count is read without their lock, which a killed one never gives back."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.sharedctypes import Synchronized

from tokmill.builds.make_shard import reached


def _die_while_counting(read: Synchronized[int]) -> None:
    read.get_lock().acquire()
    read.get_obj().value = 7
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_while_it_counts_stops_nobody() -> None:
    context = multiprocessing.get_context("spawn")
    read = context.Value("q")
    worker = context.Process(target=_die_while_counting, args=(read,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    assert not read.get_lock().acquire(block=False), "it died with the lock"
    assert reached(read) == 7
