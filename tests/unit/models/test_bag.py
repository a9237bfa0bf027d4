"""A bag of n-grams: counts as a plain counter has them, and nothing of order beyond n-grams."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from small_models import small_model
from tokmill.base.errors import UsageError
from tokmill.feed.feed import Batch
from tokmill.models.model import Tensors
from tokmill.models.sets.bag import Bag, Gram, counted, grams, hash_of, log_counts, mix
from tokmill.store.checks.hashes import mix as mix_of_stores
from tokmill.tasks.task import to_tensors

SIZES = {"token": 5, "other": 3}


def batch_of(
    rows: list[list[tuple[int, int]]], documents: list[list[int]] | None = None
) -> Tensors:
    """Rows of (token, other), padded."""
    longest = max(map(len, rows))
    ids = np.zeros((2, len(rows), longest), np.int64)
    document = np.full((len(rows), longest), -1, np.int32)
    for place, row in enumerate(rows):
        ids[:, place, : len(row)] = np.array(row).reshape(-1, 2).T
        document[place, : len(row)] = documents[place] if documents else 0
    columns = {"token": ids[0], "other": ids[1]}
    return to_tensors(Batch(columns, document, np.zeros(len(rows), np.uint64)), torch.device("cpu"))


def drawn(seed: int, *lengths: int) -> list[list[tuple[int, int]]]:
    rng = np.random.default_rng(seed)
    return [
        [(int(a), int(b)) for a, b in rng.integers(0, (5, 3), (length, 2))] for length in lengths
    ]


def test_the_hash_is_that_of_stores() -> None:
    values = np.random.default_rng(0).integers(-(1 << 63), 1 << 63, 1000)
    found = mix(torch.from_numpy(values)).numpy().astype(np.uint64)
    assert (found == mix_of_stores(values.astype(np.uint64))).all()


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_counts_of_ngrams_are_those_of_a_counter(size: int, runs: bool) -> None:
    rows = drawn(size, 200, 57, 1, 2, 3)
    batch = batch_of(rows)
    key = hash_of([batch.columns["token"]])
    made, there = grams(key, batch.document >= 0, Gram(size=size, runs=runs))
    weight = log_counts(made.masked_fill(~there, 0)).masked_fill(~there, 0)
    for place, row in enumerate(rows):
        tokens = [token for token, _ in row]
        if runs:
            tokens = [t for i, t in enumerate(tokens) if not i or t != tokens[i - 1]]
        counter = Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
        here = there[place]
        assert int(here.sum()) == counter.total()
        assert len(set(made[place][here].tolist())) == len(counter)
        wanted = sum(math.log1p(count) for count in counter.values())
        assert float(weight[place].sum()) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        # In buckets, those that share one are one.
        for buckets in (7, 1 << 24):
            ids, logs = counted(made[place : place + 1], here[None], buckets)
            wanted_in: Counter[int] = Counter((made[place][here] % buckets).tolist())
            found = {int(i): float(w) for i, w in zip(ids[0], logs[0], strict=True) if w}
            assert found == pytest.approx({i: math.log1p(n) for i, n in wanted_in.items()})


def test_a_sum_is_that_of_logarithms_of_counts() -> None:
    """Of single tokens by their own embeddings, of n-grams by those that their hashes name."""
    keys: dict[str, Any] = {
        "layers": 0,
        "grams": [{"size": 2, "columns": ["other"]}],
        "buckets": 1 << 20,
    }
    model = small_model("bag", SIZES, **keys)
    assert isinstance(model, Bag)
    (row,) = drawn(0, 90)
    batch = batch_of([row])
    with torch.no_grad():
        model.size.zero_()
        found = model.bags(batch, batch.document)[0]
        same = model.bags(batch, batch.document, model.fields(batch.columns))[0]
        torch.testing.assert_close(found, same, atol=1e-4, rtol=1e-4)
    token, other = (model.fields.weight(name) for name in SIZES)
    table = model.get_submodule("tables.0").weight
    assert isinstance(table, torch.Tensor)
    wanted = torch.zeros(model.dim)
    for (a, b), count in Counter(row).items():
        wanted += math.log1p(count) * (token[a] + other[b])
    pairs = [(row[i][1], row[i + 1][1]) for i in range(len(row) - 1)]
    for pair, count in Counter(pairs).items():
        hashed, _ = grams(
            hash_of([torch.tensor([pair])]), torch.ones(1, 2, dtype=torch.bool), Gram(size=2)
        )
        wanted += math.log1p(count) * table[int(hashed[0, 0]) % len(table)]
    torch.testing.assert_close(found, wanted.detach(), atol=1e-4, rtol=1e-4)


def test_a_vector_is_of_the_row_alone() -> None:
    """Neither padding nor other rows change it, and of order only n-grams are known."""
    rows = drawn(1, 40, 7, 1, 2)
    model = small_model("bag", SIZES)
    assert isinstance(model, Bag)
    with torch.no_grad():
        together = model.signature(batch_of(rows))
        for place, row in enumerate(rows):
            alone = model.signature(batch_of([row]))[0]
            torch.testing.assert_close(together[place], alone, atol=1e-5, rtol=1e-5)
        # The same three tokens between others stand elsewhere: all n-grams are the same.
        a, b, c = (1, 1), (2, 2), (3, 0)
        one = [a, a, a, b, b, b, a, a, a, c, c, c, a, a, a]
        other = [a, a, a, c, c, c, a, a, a, b, b, b, a, a, a]
        made = model.signature(batch_of([one, other, sorted(one)]))
        torch.testing.assert_close(made[0], made[1], atol=1e-5, rtol=1e-5)
        assert (made[0] - made[2]).abs().max() > 0.1


def test_dropout_leaves_out_whole_ngrams_and_keeps_the_mean() -> None:
    """While training alone, others each time; all places of an n-gram share its lot."""
    model = small_model("bag", SIZES, dropout=0.25).train()
    assert isinstance(model, Bag)
    batch = batch_of(drawn(3, *[400] * 8))
    key, there = hash_of([batch.columns["token"], batch.columns["other"]]), batch.document >= 0
    whole = log_counts(key)
    assert bool(there.all()) and model.kept(key, whole, None) is whole
    torch.manual_seed(0)
    sums = []
    for _ in range(40):
        made = model.kept(key, whole, model.salt(key.device))
        kept = made > 0
        torch.testing.assert_close(made[kept], whole[kept] / 0.75)
        for row in range(len(key)):
            gone = set(key[row][~kept[row]].tolist())
            assert not gone & set(key[row][kept[row]].tolist())
        sums.append(float(made.sum() / whole.sum()))
    assert len(set(sums)) > 30 and np.mean(sums) == pytest.approx(1, abs=0.05)
    assert model.eval().salt(key.device) is None


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"dim": 0}, ">= 1"),
        ({"layers": -1}, ">= 0"),
        ({"buckets": 0}, "buckets"),
        ({"buckets": 1 << 40}, "buckets"),
        ({"dropout": 1.0}, "dropout"),
        ({"grams": [{"size": 0}]}, "grams"),
        ({"grams": [{"columns": ["tokne"]}]}, "no column 'tokne'"),
    ],
)
def test_impossible_sizes_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        small_model("bag", SIZES, **keys)
