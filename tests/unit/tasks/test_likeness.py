"""Losses of similar vectors against their formulas, one query and one pair at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tokmill.tasks.comparison.comparison_losses import (
    circle,
    in_batch,
    over_entries,
    rank_metrics,
    ranks,
    relations,
    triplet,
)

TRIPLETS: dict[str, list[Any]] = {
    "entry": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "role": [0, 1, 2] * 3,
    # The negative of the entry 1 is the anchor of the entry 2, and 0 and 2 have one anchor; the
    # negative of the entry 0 is the function of the entry 1, in a third build.
    "record": [4, 5, 6, 7, 8, 4, 4, 9, 6],
    "group": [4, 4, 7, 7, 7, 4, 4, 4, 7],
}
GROUPS: dict[str, list[Any]] = {
    "entry": [0, 0, 0, 1, 2, 2],
    "role": [0] * 6,
    "record": [0, 1, 2, 3, 4, 5],
    "group": [3, 3, 3, 5, 3, 3],
}


def tensors(case: dict[str, list[Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in case.items()}


def known(case: dict[str, list[Any]]) -> list[tuple[list[int], list[int], list[int]]]:
    """For each row (positives, negatives, own negatives), by the definition."""
    made = []
    for i, (entry, role, group) in enumerate(
        zip(case["entry"], case["role"], case["group"], strict=True)
    ):
        similar, other, own = [], [], []
        for j in range(len(case["entry"])):
            same = case["entry"][j] == entry
            if role == 2 or i == j:
                continue
            if same and case["role"][j] != 2:
                similar.append(j)
                continue
            if case["record"][j] == case["record"][i] or (not same and case["group"][j] == group):
                continue
            other.append(j)
            if same:
                own.append(j)
        made.append((similar, other, own))
    return made


def cosines(count: int) -> Tensor:
    torch.manual_seed(3)
    units = F.normalize(torch.randn(count, 4).double(), dim=1)
    return units @ units.T


@pytest.mark.parametrize("case", [TRIPLETS, GROUPS])
def test_relations_are_those_of_the_definition(case: dict[str, list[Any]]) -> None:
    found = relations(tensors(case))
    for row, wanted in enumerate(known(case)):
        for which, places in zip(found, wanted, strict=True):
            assert torch.nonzero(which[row])[:, 0].tolist() == places
    some = torch.tensor([4, 1])
    for part, whole in zip(relations(tensors(case), some), found, strict=True):
        assert torch.equal(part, whole[some])


@pytest.mark.parametrize("case", [TRIPLETS, GROUPS])
def test_in_batch(case: dict[str, list[Any]]) -> None:
    s = cosines(len(case["entry"]))
    found = in_batch(s, relations(tensors(case)), 0.1)
    for i, (similar, other, _) in enumerate(known(case)):
        if not similar:
            assert found[i] == 0
            continue
        rest = sum(math.exp(s[i, n] / 0.1) for n in other)
        each = [
            -math.log(math.exp(s[i, p] / 0.1) / (math.exp(s[i, p] / 0.1) + rest)) for p in similar
        ]
        assert found[i].item() == pytest.approx(sum(each) / len(each))


@pytest.mark.parametrize("case", [TRIPLETS, GROUPS])
def test_circle(case: dict[str, list[Any]]) -> None:
    s, m, gamma = cosines(len(case["entry"])), 0.25, 20.0
    found = circle(s, relations(tensors(case)), m, gamma)
    for i, (similar, other, _) in enumerate(known(case)):
        if not similar or not other:
            assert found[i] == 0
            continue
        near = sum(
            math.exp(-gamma * max(0, 1 + m - s[i, p]) * (s[i, p] - (1 - m))) for p in similar
        )
        far = sum(math.exp(gamma * max(0, s[i, n] + m) * (s[i, n] - m)) for n in other)
        assert found[i].item() == pytest.approx(math.log1p(near * far))


@pytest.mark.parametrize("negatives", ["own", "step", "auto"])
@pytest.mark.parametrize("case", [TRIPLETS, GROUPS])
def test_triplet(case: dict[str, list[Any]], negatives: Any) -> None:
    s, margin = cosines(len(case["entry"])), 0.4
    found = triplet(s, relations(tensors(case)), margin, negatives)
    for i, (similar, other, own) in enumerate(known(case)):
        each = []
        for p in similar:
            among = own if negatives == "own" or (negatives == "auto" and own) else other
            if not among:
                each.append(0.0)
                continue
            nearest = max(s[i, n].item() for n in among)
            if among is other:
                farther = [s[i, n].item() for n in among if s[i, n] < s[i, p]]
                nearest = max(farther) if farther else min(s[i, n].item() for n in among)
            each.append(max(0.0, margin - s[i, p].item() + nearest))
        assert found[i].item() == pytest.approx(sum(each) / max(1, len(each)))


def test_an_entry_counts_once_however_many_rows_ask() -> None:
    each = torch.tensor([1.0, 3.0, 100.0, 5.0])
    asks, entry = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 1])
    assert over_entries(each, asks, entry) == 2 + 5


@pytest.mark.parametrize("name", ["in_batch", "circle", "triplet"])
def test_gradients_are_finite_and_nothing_to_learn_has_none(name: str) -> None:
    """Also where there are no negatives, and where all vectors are equal."""
    alone = {key: value[:2] for key, value in GROUPS.items()}
    for case in (TRIPLETS, GROUPS, alone):
        for equal in (False, True):
            vectors = torch.ones(len(case["entry"]), 4) if equal else torch.randn(9, 4)
            vectors = vectors[: len(case["entry"])].requires_grad_()
            units, found = F.normalize(vectors, dim=1), relations(tensors(case))
            s = units @ units.T
            loss = {
                "in_batch": lambda s=s, f=found: in_batch(s, f, 0.1),
                "circle": lambda s=s, f=found: circle(s, f, 0.25, 80),
                "triplet": lambda s=s, f=found: triplet(s, f, 0.2, "auto"),
            }[name]().sum()
            loss.backward()
            assert vectors.grad is not None and vectors.grad.isfinite().all()
            if case is alone:
                assert loss == 0 and not vectors.grad.any()


def test_ranks_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    for case in (TRIPLETS, GROUPS):
        vectors, results = torch.randn(len(case["entry"]), 3), tensors(case)
        units = F.normalize(vectors, dim=1)
        s, wanted = units @ units.T, []
        for i, (similar, other, _) in enumerate(known(case)):
            if case["role"][i] == 0 and similar:
                best = max(s[i, p].item() for p in similar)
                wanted.append((1 + sum(s[i, n].item() > best for n in other), 1 + len(other)))
        rank, pool = ranks(vectors, results)
        assert list(zip(rank.tolist(), pool.tolist(), strict=True)) == wanted
        monkeypatch.setattr("tokmill.tasks.comparison.comparison_losses.CHUNK", 7)
        assert torch.equal(ranks(vectors, results)[0], rank)


def test_equal_vectors_score_as_chance() -> None:
    count = 200
    number = torch.arange(count) // 2
    results = {"entry": number, "role": number * 0, "record": torch.arange(count), "group": number}
    found = rank_metrics(torch.ones(count, 3), results)
    wanted = {"mrr": 1 / 100, "recall_1": 0, "recall_10": 0, "pool": 199}
    assert found == pytest.approx(wanted)
    assert rank_metrics(torch.ones(1, 3), {k: v[:1] for k, v in results.items()}) == {}
