"""The loss of each token, and which instructions a row holds whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tokmill.feed.feed import Batch
from tokmill.models.transformers.layers import CHUNK
from tokmill.tasks.scores import token_scores, whole_instructions


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("ids", [30, CHUNK // 256 + 1])
def test_scores_are_those_of_the_logits(ids: int, biased: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 100, 4), torch.randn(ids, 4)
    targets = torch.randint(-1, ids, (3, 100))
    bias = torch.randn(ids) if biased else None
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    likeliest = logits.argmax(-1).view(3, 100)
    targets[:, ::3] = likeliest[:, ::3]
    found = token_scores(hidden, weight, targets, bias)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="none")
    torch.testing.assert_close(found.loss.flatten(), loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.right, likeliest == targets) and found.right[:, ::3].all()


def rows_of(instructions: list[list[int]], length: int) -> Batch:
    """Rows of T + 1 tokens over documents, each a list of the sizes of its instructions."""
    begins = [[n == 0 for size in sizes for n in range(size)] for sizes in instructions]
    owner = np.repeat(np.arange(len(begins)), [*map(len, begins)])
    flat = np.concatenate(begins)
    count = -(-(len(flat) - 1) // length)
    document = np.full((count, length + 1), -1)
    border = np.zeros((count, length + 1), np.uint8)
    for row in range(count):
        part = slice(row * length, row * length + length + 1)
        here = owner[part]
        document[row, : len(here)], border[row, : len(here)] = here - here[0], flat[part]
    return Batch({"border": border}, document, np.zeros(count, np.uint64))


@pytest.mark.parametrize("length", [1, 4, 7, 30, 80])
def test_instructions_are_counted_where_a_row_holds_them_whole(length: int) -> None:
    random = np.random.default_rng(length)
    documents = [random.integers(1, 5, random.integers(1, 9)).tolist() for _ in range(12)]
    batch = rows_of(documents, length)
    learned = (batch.document[:, 1:] == batch.document[:, :-1]) & (batch.document[:, 1:] >= 0)
    found = whole_instructions(batch, batch.columns["border"].astype(bool), learned)
    # By hand: a row shows it and the place behind it; the first of a document is no target.
    expected, place = [], 0
    for sizes in documents:
        for number, size in enumerate(sizes):
            row, first = divmod(place, length)
            first, row = (length, row - 1) if first == 0 and row else (first, row)
            if number and first + size <= length and row < len(found):
                expected.append((row, [*range(first - 1, first + size - 1)]))
            place += size
    whole = []
    for row, numbers in enumerate(found):
        for number in dict.fromkeys(numbers[numbers >= 0].tolist()):
            whole.append((row, np.flatnonzero(numbers == number).tolist()))
    assert whole == expected
