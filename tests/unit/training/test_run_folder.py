"""Stores that a run cannot read, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokmill.base.errors import TokmillError
from tokmill.store.schema import Column
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.task_inputs import Facts
from tokmill.training.recipe.check_recipe import from_dict
from tokmill.training.runs.run import check_store, facts_from
from toy import cycles, make_store


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
