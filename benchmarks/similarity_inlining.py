"""Weights of the sum of vectors and code, and of what is inlined, learned from pairs of functions.

A vector of a function with what would be inlined into it is

    own + caller · Σ callee · vector of the callee

over what it calls, twice. `caller` and `callee` are exp(w · shape + b), of `SHAPE` of a function:
logarithms of its counts of blocks, instructions, edges, loops, calls, callees and callers. In the
vector of callers each counts by a third weight of this form. All are learned together with the
weights of the cosines, with the least cross entropy among the functions of the same way.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tokmill.x86.features.learned_sums import COMMON
from tokmill.x86.features.learned_weights import LOG_WEIGHTS
from tokmill.x86.features.store_functions import StoreFunctions

Array = np.ndarray[Any, np.dtype[Any]]
STEPS, RATE, QUERIES = 100, 0.06, 120
CENTRE = (2.0, 4.0, 2.0, 0.0, 1.0, 1.0, 1.0)
"""Subtracted from the shape while it is learned, so that all weights are of one scale."""
FIRST = 0.3
"""What a callee counts at the start."""
DECAY, DECAY_OF_CALLS = 2e-4, 2e-3


class Learned(NamedTuple):
    """What was learned."""

    weights: dict[str, float]
    """Part → its weight."""
    calls: dict[str, Array]
    """`CALLEE`, `CALLER` and `CALLING` of `learned_weights.py`: (8,) f4 each, the last is b."""


class _Product(torch.autograd.Function):
    """The product of a matrix of scipy, which is given with its transpose, and a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Any, transposed: Any) -> Tensor:
        ctx.transposed = transposed
        return torch.from_numpy(matrix @ x.detach().numpy())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.from_numpy(ctx.transposed @ gradients[0].numpy()), None, None


def vectors_of(functions: StoreFunctions, own: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return the parts of `learned_sums.vector_parts` of F functions by weights, (3, 8)."""
    calls, turned = functions.calls, functions.calls.T.tocsr()
    shape = torch.from_numpy(functions.shape) - torch.tensor(CENTRE)
    logs = (shape @ weights[:, :7].T + weights[:, 7]).clamp(*LOG_WEIGHTS)
    callee, caller, calling = logs.exp().T[:, :, None]

    def product(x: Tensor, matrix: Any, transposed: Any) -> Tensor:
        found: Tensor = _Product.apply(x, matrix, transposed)
        return found

    inlined = caller * product(callee * own, calls, turned)
    further = caller * product(callee * inlined, calls, turned)
    parts = {
        "vectors": own,
        "vectors of callees": product(own, calls, turned),
        "vectors of callers": product(calling * own, turned, calls),
        "vectors, inlined": own + inlined + further,
    }
    return {name: _apart(rows) for name, rows in parts.items()}


def _apart(rows: Tensor) -> Tensor:
    """Return rows as `learned_sums.py` does: without a part of what all have in common."""
    units = F.normalize(rows, eps=1e-9)
    there = (units != 0).any(dim=1, keepdim=True)
    common = COMMON * units.sum(dim=0) / there.sum().clamp(min=1)
    return F.normalize(units - there * common, eps=1e-9)


def learn(
    functions: StoreFunctions,
    own: Array,
    code: Mapping[str, Any],
    sides: Sequence[tuple[Array, Array]],
) -> Learned:
    """Return the weights that find the match of each query among those of its way.

    Args:
        functions: of the store.
        own: (F, d) f4, the vector of each function, of length 1 or 0.
        code: name → rows of the records, parts that are not learned.
        sides: (query, match) records of each way.
    """
    random = np.random.default_rng(0)
    known = [
        np.stack([_dense(rows[query] @ rows[match].T) for rows in code.values()], axis=-1)
        for query, match in sides
    ]
    start = torch.zeros(3, 8)
    start[0, 7] = float(np.log(FIRST))
    calls = start.clone().requires_grad_(True)
    weights = torch.full((len(code) + 4,), float(np.log(5.0)), requires_grad=True)
    optimizer = torch.optim.Adam([calls, weights], lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    names = [*code]
    for _ in range(STEPS):
        parts = vectors_of(functions, torch.from_numpy(own), calls)
        names = [*code, *parts]
        loss = DECAY_OF_CALLS * ((calls - start) ** 2).sum() + DECAY * (weights**2).sum()
        for (query, match), cosines in zip(sides, known, strict=True):
            asked = random.permutation(len(query))[:QUERIES]
            scores = torch.from_numpy(cosines[asked]) @ weights[: len(code)].exp()
            a = torch.from_numpy(functions.record[query[asked]])
            b = torch.from_numpy(functions.record[match])
            for weight, rows in zip(weights[len(code) :].exp(), parts.values(), strict=True):
                scores = scores + weight * (rows[a] @ rows[b].T)
            loss = loss + F.cross_entropy(scores, torch.from_numpy(asked)) / len(sides)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    found = calls.detach().clone()
    found[:, 7] -= found[:, :7] @ torch.tensor(CENTRE)
    return Learned(
        dict(zip(names, weights.detach().exp().tolist(), strict=True)),
        dict(zip(("CALLEE", "CALLER", "CALLING"), found.numpy(), strict=True)),
    )


def _dense(products: Any) -> Array:
    full = products.toarray() if hasattr(products, "toarray") else products
    return np.asarray(full, np.float32)
