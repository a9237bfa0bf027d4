"""Stores that a run cannot read, and what is said of them."""

import json
from pathlib import Path

import numpy as np
import pytest

import tokmill
from tokmill.base.errors import TokmillError
from tokmill.store.schema import Column
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.task_inputs import Facts
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import Run, check_store, facts_from
from toy import cycles, make_store, recipe


def test_a_store_of_other_columns_is_another_kind_of_store(tmp_path: Path) -> None:
    names = ("asm", "mne")
    facts = Facts(
        fingerprint="f" * 64,
        columns=dict.fromkeys(names, 9),
        schema={name: Column("u1", phrase=True, vocab=name) for name in names},
        vocabularies={name: Vocabulary(f"{name}.json", "0" * 64, 9) for name in names},
    )
    texts = Store(make_store(tmp_path / "texts", cycles(3)))
    with pytest.raises(TokmillError) as caught:
        check_store(facts, texts)
    said = "the run was trained on the columns asm, mne; the store has token"
    assert caught.value.what == said and "recode" not in caught.value.hint
    check_store(facts_from(from_dict({}), [texts]), texts)


def test_a_run_is_opened_and_tells_its_history(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", cycles(20))
    value = recipe(store, 4, data={"val": str(store)}, run={"eval_every": 2, "log_every": 1})
    trained = tokmill.train(value, tmp_path / "r<n", quiet=True)
    run = Run(str(tmp_path / "r<n"))
    assert repr(run) == repr(trained) and run.metrics == trained.metrics and run.step == 4
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    history = run.history()
    assert history["step"].dtype == np.int64
    for name in {name for line in lines for name in line}:
        right = [line.get(name, np.nan) for line in lines]
        np.testing.assert_array_equal(history[name], right)
    assert np.isnan(history["val_loss"]).any() and not np.isnan(history["loss"]).all()
    shown = run._repr_html_()
    assert "r&lt;n" in shown and f"<td>{run.metrics['loss']:.4f}</td>" in shown
    (run.path / "metrics.jsonl").unlink()
    assert [*Run(run.path).history()] == ["step"]
    with pytest.raises(TokmillError, match="holds no run"):
        Run(store)


def test_a_run_that_was_pushed_is_continued(tmp_path: Path) -> None:
    """Its recipe has a key that is there no more."""
    store, out = make_store(tmp_path / "store", cycles(20)), tmp_path / "run"
    tokmill.train(recipe(store, 2), out, quiet=True)
    before = json.loads((out / "recipe.json").read_text())
    before["run"]["push"] = "s3://bucket/run"
    (out / "recipe.json").write_text(json.dumps(before))
    assert Run(out).step == 2
    assert tokmill.train(None, out, options={"run": {"steps": 3}}, quiet=True).step == 3
    assert "push" not in json.loads((out / "recipe.json").read_text())["run"]
