"""A step of a task that compares the entries of a batch with each other.

Its loss needs the vectors of the whole step, of all micro-batches and processes. They are computed
without gradients and gathered. The loss and its gradient for each vector are computed once. Then
each micro-batch is computed again with the same dropout, and its backward pass starts from its part
of that gradient (the gradient cache of Gao et al. 2021, arXiv 2101.06983). So loss and gradients
are the same for any number of processes and micro-batches, and memory is that of one micro-batch.
Where a process has one micro-batch, it is computed once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokmill.models.model import Tensors
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.device import set_torch_states, torch_states
from tokmill.training.engines.engine import Engine, on_first


def compare_step(
    engine: Engine, task: Task, parts: Sequence[Tensors], scale: float
) -> dict[str, Tensor]:
    """Run forward and backward of the summed loss × `scale` of a step; return the task's sums.

    `parts`: the micro-batches of this process, equally many in each. Every process calls this. The
    sums are those of the whole step on rank 0 and 0 elsewhere, so that they can be added up.

    The gradient flows through the vectors alone: `Task.compare` has no weights.
    """
    sums: dict[str, Tensor] = {}
    if len(parts) == 1:
        (only,) = parts

        def pull(results: dict[str, Tensor]) -> Tensor:
            nonlocal sums
            results = {name: value.detach() for name, value in results.items()}
            (result,), sums = pulls_of(engine, task, [with_entries(results, only, 0)], scale)
            return result

        engine.micro(only, True, 1.0, pull)
        return on_first(engine, sums)
    states: list[list[Tensor]] = []
    outputs: list[dict[str, Tensor]] = []
    for part in parts:
        states.append(torch_states())
        outputs.append(results_of(engine, part, sum(map(len_of, outputs))))
    pulls, sums = pulls_of(engine, task, outputs, scale)
    for number, (part, state, own) in enumerate(zip(parts, states, pulls, strict=True), 1):
        set_torch_states(state)
        engine.micro(part, number == len(parts), 1.0, own)
    return on_first(engine, sums)


def pulls_of(
    engine: Engine, task: Task, results: Sequence[dict[str, Tensor]], scale: float
) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
    """Return the gradient of the loss × `scale` for the vectors of each micro-batch, and the sums.

    `results`: those of this process's micro-batches (`with_entries`). Every process calls this.
    """
    rows, order, counts = of_all(engine, results)
    vectors = rows.pop("vectors").float().requires_grad_()
    loss, sums = task.compare(vectors, rows)
    (gradient,) = torch.autograd.grad(loss, vectors)
    pull = gradient.new_zeros(sum(counts), *gradient.shape[1:])
    pull[order] = gradient * scale
    own = torch.split(pull, counts)[engine.rank]
    return torch.split(own, [len_of(one) for one in results]), sums


def results_of_all(engine: Engine, parts: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return the results of a task for all rows of a batch, without dropout, for `Task.compare`.

    `parts`: the micro-batches of this process, equally many in each. Every process calls this and
    gets the results of all.
    """
    results: list[dict[str, Tensor]] = []
    for part in parts:
        results.append(results_of(engine, part, sum(map(len_of, results)), train=False))
    return of_all(engine, results)[0]


def of_all(
    engine: Engine, results: Sequence[dict[str, Tensor]]
) -> tuple[dict[str, Tensor], Tensor, list[int]]:
    """Return (results, order, counts) of all processes and micro-batches.

    The results are without rows that are in no entry, and their entries are numbered from 0.
    `order`: the number of each of their rows among the rows of all processes end to end
    (`order_of`); `counts`: how many of those each process has.
    """
    own = {name: torch.cat([one[name] for one in results]) for name in results[0]}
    whole = {name: engine.gather(value) for name, value in own.items()}
    order, entry = order_of(whole["entry"])
    rows = {name: torch.cat(values)[order] for name, values in whole.items()}
    return rows | {"entry": entry}, order, [len(one) for one in whole["entry"]]


def results_of(engine: Engine, part: Tensors, before: int, train: bool = True) -> dict[str, Tensor]:
    """Return the results of a task for the rows of a micro-batch, with the entry of each row.

    `before`: number of rows in earlier micro-batches, for batches in which each row is an entry.
    `train`: with dropout.
    """
    return with_entries(engine.act(part, train=train), part, before)


def with_entries(results: dict[str, Tensor], part: Tensors, before: int) -> dict[str, Tensor]:
    """Return results with the entry of each row; `before` as for `results_of`."""
    some = next(iter(results.values()))
    entry = torch.arange(before, before + len(some)) if part.entry is None else part.entry
    return results | {"entry": entry.to(some.device)}


def len_of(results: dict[str, Tensor]) -> int:
    return len(results["entry"])


def order_of(entries: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the order of a step's rows over all processes, and the entry of each, both int64 (N,).

    entries: for each process (rows,) int64, numbers within its part of the batch; rows with -1 are
    left out. The order is by process, then by entry, so it does not depend on how batches were cut.
    The entries that are returned are numbered from 0.
    """
    most = max(int(one.max()) for one in entries) + 1
    number = torch.cat([rank * most + one for rank, one in enumerate(entries)])
    there = torch.cat(list(entries)) >= 0
    order = torch.argsort(number, stable=True)
    order = order[there[order]]
    return order, torch.unique_consecutive(number[order], return_inverse=True)[1]
