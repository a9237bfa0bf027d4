"""The error of a step that is not finite: it names rows, micro-batches or weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.feed.feed import Feed
from tokmill.store.schema import Array
from tokmill.tasks.task import Task
from tokmill.training.engines.engine import Engine

PartLoss = tuple[Array, Tensor]
"""The entry of each row of a micro-batch (a number within the process's share); its summed loss."""


def not_finite(
    feed: Feed,
    task: Task,
    engine: Engine,
    step: int,
    norm: float,
    losses: Sequence[PartLoss],
    where: str,
) -> TokmillError:
    """Return the error of a step whose loss or gradient is not finite; every process calls this.

    It names the micro-batches whose loss is not finite, with their rows. If all losses are finite,
    it names all rows, and the weights whose gradients are not finite. `step`: the number of steps
    that are done; metrics and the message count from 1. `losses`: of this process.
    """
    # The first process reports, so it needs the results of all: for each row the number of its
    # micro-batch, if the loss of that is not finite.
    flags = np.zeros((engine.world, feed.batch_size // engine.world))
    for number, (entries, loss) in enumerate(losses, 1):
        if not math.isfinite(loss.item()):
            flags[engine.rank, entries] = number
    flags = np.asarray(engine.total(flags.ravel().tolist())).reshape(flags.shape).astype(np.int64)
    named = []
    for rank, found in enumerate(flags):
        rows_of_all = feed.rows_of(step, rank, engine.world)
        for part in np.unique(found[found > 0]).tolist():
            process = f"process {rank}, " if engine.world > 1 else ""
            which = f"micro-batch {part} of {len(losses)}, " if len(losses) > 1 else ""
            some = feed.describe(*(values[found == part] for values in rows_of_all))
            named.append(process + which + some)
    what = "the loss is not finite"
    if not named:
        names = engine.bad_gradients()
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        through = f", through that of {names[0]}{more}" if names else ""
        what = f"every loss is finite, but the gradient's norm is {norm}{through}"
        named = [feed.describe(*feed.rows_of(step))]
    return TokmillError(
        f"step {step + 1}: {what} ({'; '.join(named[:4])}{'; …' if len(named) > 4 else ''})",
        where=where,
        hint="a checkpoint holds the weights from before this step; a smaller optim.lr or a longer "
        "optim.warmup helps most often: in a new run, which may begin --from this one",
    )
