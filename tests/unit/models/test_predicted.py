"""Positions that are predicted are found once for several columns, and taken out of their rows."""

import numpy as np
import torch

from tokmill.models.model import predicted, taken


def test_places_come_in_order_and_targets_with_them() -> None:
    targets = {
        "a": np.array([[-1, 4, -1, 7, -1], [-1, -1, -1, -1, -1]]),
        "b": np.array([[-1, -1, 5, 6, -1], [-1, -1, -1, -1, 8]]),
    }
    places, at = predicted(targets)
    assert places.tolist() == [[1, 2, 3], [4, -1, -1]]
    assert at["a"].tolist() == [[4, -1, 7], [-1, -1, -1]]
    assert at["b"].tolist() == [[-1, 5, 6], [8, -1, -1]]
    assert places.dtype == at["a"].dtype == np.int64


def test_a_batch_without_targets_is_a_batch_still() -> None:
    places, at = predicted({"a": np.full((3, 7), -1)})
    assert places.tolist() == [[-1]] * 3 and at["a"].tolist() == [[-1]] * 3


def test_what_is_taken_is_what_a_loop_takes() -> None:
    x, places = torch.randn(2, 5, 3), torch.tensor([[4, 0], [2, 2]])
    found = taken(x, places)
    for row in range(2):
        for i in range(2):
            assert torch.equal(found[row, i], x[row, places[row, i]])
