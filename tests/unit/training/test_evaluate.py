"""The loss of a run on a store: that of the loop, and that of the definition."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tokmill
from tokmill.base.errors import TokmillError, UsageError
from tokmill.feed.rows import Whole
from tokmill.models.model import Tensors
from tokmill.store.store import Store
from tokmill.tasks.next_token import NextToken
from tokmill.training.data import cut_notes
from tokmill.training.evaluate import evaluate
from tokmill.training.runs.run import load_task, read_run
from tokmill.training.runs.weights import FINAL, save_weights
from toy import EOT, cycles, losses, make_store, recipe


@pytest.fixture(scope="module")
def run(store: Path, val: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = recipe(store, 24, data={"val": str(val)}, run={"eval_every": 12, "eval_rows": 0})
    return tokmill.train(plain, tmp_path_factory.mktemp("runs") / "run", quiet=True).path


def test_progress_counts_all_rows(
    run: Path, val: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tokmill.base.progress.EVERY", 0)
    evaluate(run, val, rows=7, batch=3, device="cpu")
    assert not capsys.readouterr().err
    evaluate(run, val, rows=7, batch=3, device="cpu", quiet=False)
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("eval: 7 of 7 rows (100%)")


def test_it_is_the_mean_over_all_targets(run: Path, val: Path) -> None:
    task = load_task(run)
    assert isinstance(task, NextToken)
    documents = cycles(30, seed=1)
    ids = torch.from_numpy(np.concatenate(documents).astype(np.int64))
    owner = torch.from_numpy(np.repeat(np.arange(30), [*map(len, documents)]))
    total, count = 0.0, 0
    # Rows of 17 tokens, 16 apart; in each, every document by itself.
    for start in range(0, len(ids) - 1, 16):
        row, owners = ids[start : start + 17], owner[start : start + 17]
        for one in owners.unique():
            places = torch.nonzero(owners == one)[:, 0]
            places = places[places < len(row) - 1]
            part, ahead = row[places], row[places + 1]
            # The token that ends a document predicts the first one of the next; another does not.
            learned = (owners[places + 1] == one) | (part == EOT)
            zeros, place = torch.zeros(1, len(part), dtype=torch.int64), torch.arange(len(part))
            if len(part):
                with torch.no_grad():
                    hidden = task.model(Tensors({"token": part[None]}, zeros, place[None], True))
                    each = F.cross_entropy(task.logits(hidden)[0], ahead, reduction="none")
                total, count = total + each[learned].sum().item(), count + int(learned.sum())
    found = evaluate(run, val, device="cpu")
    assert found["targets"] == count == len(ids) - 1
    # Windows share the token that one predicts last and the next one reads first.
    assert found["tokens"] == len(ids) + found["rows"] - 1
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / count / math.log(2) / 2, rel=1e-5)


def test_wrong_arguments_of_python(run: Path, val: Path) -> None:
    with pytest.raises(UsageError, match="from 0, not -1"):
        evaluate(run, val, rows=-1)
    with pytest.raises(TokmillError, match="no weights of step 5"):
        evaluate(run, val, at=5)  # type: ignore[arg-type]


def test_some_rows_and_other_weights(run: Path, val: Path) -> None:
    some = evaluate(run, val, rows=7, device="cpu")
    assert some["rows"] == 7 and 0 < some["targets"] <= 7 * 16
    assert "the whole store, not of these rows" in some["notes"][-1]
    best = evaluate(run, val, at="best", device="cpu")
    assert not any("bits_per_byte" in note for note in best["notes"])
    found = losses(run, "val_loss")
    assert best["loss"] == pytest.approx(min(found.values()), rel=1e-6)
    with pytest.raises(TokmillError, match="no weights of step 5"):
        evaluate(run, val, at="5")


def test_foreign_and_unfinished_stores_are_refused(run: Path, tmp_path: Path) -> None:
    foreign = make_store(tmp_path / "foreign", cycles(9), vocabulary=b"another")
    with pytest.raises(TokmillError, match="the vocabulary 'token' differs"):
        evaluate(run, foreign)
    partial = make_store(tmp_path / "partial", cycles(9), complete=False)
    with pytest.raises(TokmillError, match="not complete"):
        evaluate(run, partial)
    assert evaluate(run, partial, partial=True, device="cpu")["targets"] > 0
    with pytest.raises(TokmillError, match="holds no run"):
        evaluate(tmp_path, foreign)


def test_rows_with_nothing_to_predict_have_no_loss(run: Path, tmp_path: Path) -> None:
    """Documents of one token have no next token: no training, no validation, no evaluation."""
    ones = make_store(tmp_path / "ones", [np.array([3])] * 40)
    for refused in (
        lambda: evaluate(run, ones, device="cpu"),
        lambda: tokmill.train(recipe(ones, 2), tmp_path / "a", quiet=True),
        lambda: tokmill.train(
            recipe(run.parent / "none", 2, data={"train": str(ones), "val": str(ones)}),
            tmp_path / "b",
            quiet=True,
        ),
    ):
        with pytest.raises(TokmillError, match="nothing to predict") as caught:
            refused()
        assert caught.value.where == str(ones) and caught.value.hint


def test_a_step_with_nothing_to_predict_has_no_loss(tmp_path: Path) -> None:
    """Rows of 3 tokens, one a step: three of single tokens, and one of a document of 3 or more."""
    documents = [np.array([3])] * 8 + [np.array([1, 2, 3, 4, 5])]
    store = make_store(tmp_path / "store", documents)
    keys = {"data": {"batch": 1, "shuffle": False}, "task": {"length": 2}}
    run = tokmill.train(recipe(store, 6, **keys), tmp_path / "run", quiet=True)
    # Rows begin at tokens 0, 2, 4, …; tokens 8 to 12 are the long document.
    found = losses(run.path)
    assert sorted(found) == [5, 6] and all(loss > 0 for loss in found.values())
    assert sorted(losses(run.path, "lr")) == [1, 2, 3, 4, 5, 6]
    assert losses(run.path, "targets") == {1: 0, 2: 0, 3: 0, 4: 0, 5: 2, 6: 4}


def test_weights_that_are_not_numbers_are_an_error(run: Path, val: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    task = load_task(run)
    with torch.no_grad():
        next(task.parameters()).fill_(math.nan)
    save_weights(tmp_path / "run" / FINAL, task, read_run(run)[0], step=0)
    with pytest.raises(TokmillError, match="the loss is nan: the training diverged"):
        evaluate(tmp_path / "run", val, device="cpu")


def test_what_is_in_no_row_is_counted(val: Path) -> None:
    """By the definition: what lies behind the end of a row, of each record."""
    lengths = np.diff(Store(val).offsets())
    (note,) = cut_notes(Whole(Store(val), 20))
    cut, records = int((lengths - 20).clip(0).sum()), int((lengths > 20).sum())
    assert f"{cut:,} tokens of {records:,} records are in no row" in note
    assert cut_notes(Whole(Store(val), int(lengths.max()))) == []
