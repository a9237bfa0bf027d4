"""Calls in several real processes that stand to each other as torchrun would have started them."""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
# Loaded once, in the process that the others are forked from.
CONTEXT.set_forkserver_preload(
    ["tokmill.training.session", "tokmill.training.engines.several", "torch._dynamo"]
)
SECONDS = 150


class End(NamedTuple):
    """How a process ended: what it returned or raised; None: it was killed."""

    value: Any = None
    error: BaseException | None = None


def together(world: int, function: Callable[..., Any], *arguments: Any) -> list[End]:
    """Call a function in `world` processes; return how each ended, by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(world):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_call, args=(theirs, environment, function, arguments))
        process.start()
        theirs.close()
        started.append((process, ours))
    ends = []
    for process, ours in started:
        try:
            ends.append(ours.recv() if ours.poll(SECONDS) else End(error=TimeoutError()))
        except EOFError:
            ends.append(End())
        process.kill() if isinstance(ends[-1].error, TimeoutError) else process.join()
    return ends


def values(ends: list[End]) -> list[Any]:
    """Return what each process returned; raise what one raised.

    One that waits for another which has failed only runs out of time: that comes last.
    """
    for end in sorted(ends, key=lambda end: isinstance(end.error, TimeoutError)):
        if end.error is not None:
            raise end.error
    return [end.value for end in ends]


def _call(
    pipe: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        end = End(function(*arguments))
    except BaseException as error:
        end = End(error=error)
    pipe.send(end)
    pipe.close()
