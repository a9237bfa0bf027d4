"""A classifier that sees how often each token stands in each half of a pair, and nothing else."""

from __future__ import annotations

import numpy as np
import torch

from tokmill.feed.feed import Feed
from tokmill.feed.halves import OTHER, Halves


def bags(
    rows: Halves, column: str, size: int, epochs: range, most: int = 4000
) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of each id in both halves, and in both beside each other, and the labels."""
    feed = Feed(rows, 256, columns=[column], shuffle=False)
    found, labels = [], []
    for epoch in epochs:
        # Those of one place would meet others of elsewhere, which is not what an epoch does.
        chosen = np.random.default_rng(epoch).permutation(len(rows))[:most]
        for start in range(0, len(chosen), 256):
            row = chosen[start : start + 256]
            batch = feed.make(np.full(len(row), epoch), row)
            counts = []
            for half in (batch.document == 0, batch.document > 0):
                flat = batch.columns[column] + np.arange(len(row))[:, None] * size
                each = np.bincount(flat[half], minlength=len(row) * size).reshape(-1, size)
                counts.append(np.log1p(each))
            found.append(np.concatenate([*counts, np.minimum(*counts)], 1).astype(np.float32))
            labels.append((batch.document == OTHER).any(1))
    return np.concatenate(found), np.concatenate(labels)


def accuracy(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], decay: float = 1e-3
) -> float:
    """Return how often logistic regression on the first pairs is right about the second ones."""
    x, y, z = (torch.tensor(part) for part in (*train, test[0]))
    mean, std = x.mean(0), x.std(0) + 1e-3
    x, z = (x - mean) / std, (z - mean) / std
    weight = torch.zeros(x.shape[1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        solver.zero_grad()
        logits = x @ weight + bias
        value = torch.nn.functional.binary_cross_entropy_with_logits(logits, y.float())
        value = value + decay * weight.square().sum()
        value.backward()
        return value

    solver.step(loss)
    found = (z @ weight.detach() + bias.detach() > 0).numpy()
    return float((found == test[1]).mean())
