"""Known texts and their ids: an engine that gives others is told, whoever brings it."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import TOKENIZER, here, jsonl, quick_build, token_store
from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.builds.plan import How
from tokmill.plugins import Part
from tokmill.store.checks.probe import TEXTS, probe_path, read_probe
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store
from tokmill.text import documents
from tokmill.text.encoding.encoders import TokenizersEncoder

TOLD = "the engine gives other ids than when the store was begun: text "


def rows(first: int, count: int) -> list[dict[str, str]]:
    return [{"text": f"record {i} of some text"} for i in range(first, first + count)]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in/a.jsonl", rows(0, 9))
    return tmp_path / "in"


def with_template(folder: Path) -> Path:
    """The small tokenizer, with a template that puts a token before every text."""
    data = json.loads(TOKENIZER.read_text())
    token = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [token, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [1], "tokens": ["<|pad|>"]}},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data))
    return path


class OtherIds(TokenizersEncoder):
    """An engine whose new version cuts spaces otherwise: it loses the last id of `   x`."""

    name = "other"

    def encode_utf8(self, data: Any, offsets: Any) -> Any:
        ids, lengths = super().encode_utf8(data, offsets)
        ends = np.cumsum(lengths)
        hurt = np.flatnonzero((np.diff(offsets) == 4) & (lengths > 1))
        keep = np.ones(len(ids), bool)
        keep[ends[hurt] - 1] = False
        lengths = lengths.copy()
        lengths[hurt] -= 1
        return ids[keep], lengths


ENGINES = dict(plugins.ENCODERS)


@pytest.fixture
def another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` finds an engine that gives other ids."""
    part = Part(f"{__name__}:OtherIds", "text", "gives other ids")
    monkeypatch.setattr(plugins, "ENCODERS", {"other": part})


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Build with the engines of this program."""
    with pytest.MonkeyPatch.context() as before:
        before.setattr(plugins, "ENCODERS", ENGINES)
        yield


def drop_bos(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way from text to ids no longer puts the first token before every text."""
    whole = documents.surround

    def surround(ids: Any, lengths: Any, prefix: Any, suffix: Any, dtype: Any) -> Any:
        return whole(ids, lengths, [], suffix, dtype)

    monkeypatch.setattr(documents, "surround", surround)


def test_what_a_store_keeps(inputs: Path, tmp_path: Path) -> None:
    store = quick_build("jsonl", inputs, tmp_path / "s")
    probe = read_probe(store.path)
    assert probe.texts() == list(TEXTS)
    assert len(set(TEXTS)) == 64
    assert (probe.before, probe.after) == (0, 1)
    assert {ids[-1] for _, ids in probe.answers} == {0}
    assert dict(probe.answers)[""] == [0]
    # As a store holds the same texts.
    some = [text for text in TEXTS if text.strip()]
    again = quick_build("jsonl", jsonl(tmp_path / "x.jsonl", [{"text": t} for t in some]),
                        tmp_path / "texts")  # fmt: skip
    wanted = dict(probe.answers)
    assert [record["token"].tolist() for record in again] == [wanted[text] for text in some]
    assert validate(store).ok


def test_every_engine_writes_the_same(inputs: Path, tmp_path: Path) -> None:
    made = []
    for engine in plugins.ENCODERS:
        how = How(quiet=True, amount=here(engine=engine))
        store = quick_build("jsonl", inputs, tmp_path / engine, how=how)
        made.append((probe_path(store.path).read_bytes(), store.manifest.probe))
    assert len(set(made)) == 1


def continued(inputs: Path, store: Path, **options: Any) -> None:
    """A shard is lost, and the same build makes it again."""
    next((store / "shards").glob("*.json")).unlink()
    quick_build("jsonl", inputs, store, **options)


def grown(inputs: Path, store: Path, **options: Any) -> None:
    jsonl(inputs / "b.jsonl", rows(9, 9))
    quick_build("jsonl", inputs, store, **options)


@pytest.mark.parametrize("use", [continued, grown])
def test_an_engine_that_gives_other_ids_is_refused(
    use: Callable[..., None], inputs: Path, tmp_path: Path, another_engine: None
) -> None:
    with as_it_was():
        quick_build("jsonl", inputs, tmp_path / "s")
    with pytest.raises(TokmillError, match=TOLD + r"\d+ of 64, .* was [0-9 ]+ then and is") as told:
        use(inputs, tmp_path / "s")
    assert "--engine" in told.value.hint


@pytest.mark.parametrize("use", [continued, grown])
def test_a_build_that_drops_the_token_that_begins_a_text_is_refused(
    use: Callable[..., None], inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"tokenizer": with_template(tmp_path), "template": "add"}
    store = quick_build("jsonl", inputs, tmp_path / "s", **options)
    assert all(record["token"][0] == 1 for record in store)
    assert read_probe(store.path).before == 1
    drop_bos(monkeypatch)
    with pytest.raises(TokmillError, match="text 1 of 64, .* without the 1 that begins it"):
        use(inputs, tmp_path / "s", **options)


def test_nothing_is_asked_where_nothing_is_made(
    inputs: Path, tmp_path: Path, another_engine: None
) -> None:
    with as_it_was():
        store = quick_build("jsonl", inputs, tmp_path / "s")
    assert quick_build("jsonl", inputs, tmp_path / "s").fingerprint == store.fingerprint


@pytest.mark.parametrize("harm", ["lost", "torn", "flipped"])
def test_a_damaged_probe_is_seen_and_mended(harm: str, inputs: Path, tmp_path: Path) -> None:
    store = quick_build("jsonl", inputs, tmp_path / "s").path
    path = probe_path(store)
    good = path.read_bytes()
    if harm == "lost":
        path.unlink()
    else:
        path.write_bytes(good[:50] if harm == "torn" else good.replace(b"fox", b"fix"))
    [problem] = validate(Store(store)).problems
    assert "the probe" in problem.what
    quick_build("jsonl", inputs, store)
    assert path.read_bytes() == good
    assert validate(Store(store)).ok


def test_a_damaged_probe_is_not_taken_from_another_engine(
    inputs: Path, tmp_path: Path, another_engine: None
) -> None:
    with as_it_was():
        store = quick_build("jsonl", inputs, tmp_path / "s").path
    probe_path(store).unlink()
    with pytest.raises(TokmillError, match="the probe was damaged, and the engine gives other ids"):
        quick_build("jsonl", inputs, store)
    assert not probe_path(store).exists()


def test_a_selection_keeps_it_and_a_merge_compares(
    inputs: Path, tmp_path: Path, another_engine: None
) -> None:
    with as_it_was():
        one = quick_build("jsonl", inputs, tmp_path / "one").path
        bare = quick_build("jsonl", inputs, tmp_path / "bare", end_of_record="none").path
    chosen = quick_build("select", one, tmp_path / "chosen", max_length=90)
    assert read_probe(chosen.path) == read_probe(one)
    assert validate(chosen).ok
    # What is put around a text is a choice; then no probe holds for all records.
    merged = quick_build("select", [one, bare], tmp_path / "merged")
    assert not isinstance(merged.manifest.probe, str)
    assert validate(merged).ok
    other = quick_build("jsonl", inputs, tmp_path / "other").path
    with pytest.raises(TokmillError, match="its engine gave other ids than that of .*one"):
        quick_build("select", [one, other], tmp_path / "both")


def test_stores_without_text_have_none(tmp_path: Path) -> None:
    store = token_store(tmp_path / "s", [[[1, 2]]])
    chosen = quick_build("select", store.path, tmp_path / "c")
    assert not isinstance(chosen.manifest.probe, str)
    assert not probe_path(chosen.path).exists()


def test_a_tokenizer_that_refuses_a_text_still_builds(inputs: Path, tmp_path: Path) -> None:
    vocab = {
        word: i for i, word in enumerate(["record", "of", "some", "text", *map(str, range(9))])
    }
    data = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "none"},
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data))
    store = quick_build("jsonl", inputs, tmp_path / "s", tokenizer=path, end_of_record="none")
    answers = dict(read_probe(store.path).answers)
    assert answers["hello"] == []
    assert answers["0"] == [4]


def test_a_store_that_is_begun_anew_asks_the_engine_of_now(
    inputs: Path, tmp_path: Path, another_engine: None
) -> None:
    with as_it_was():
        before = probe_path(quick_build("jsonl", inputs, tmp_path / "s").path).read_bytes()
    how = How(quiet=True, fresh=True, amount=here())
    store = quick_build("jsonl", inputs, tmp_path / "s", how=how)
    assert probe_path(store.path).read_bytes() != before
    assert validate(store).ok


def test_workers_that_begin_together_write_one(inputs: Path, tmp_path: Path) -> None:
    for name in "bcd":
        jsonl(inputs / f"{name}.jsonl", rows(ord(name) * 10, 9))
    with pytest.MonkeyPatch.context() as small:
        small.setattr("tokmill.builds.plan.SHARD_BYTES", 1 << 8)
        how = How(quiet=True, amount=here(workers=2))
        store = quick_build("jsonl", inputs, tmp_path / "s", how=how)
        # A kill may leave the lock.
        (store.path / "vocab/.probe.lock").touch()
        jsonl(inputs / "e.jsonl", rows(900, 9))
        quick_build("jsonl", inputs, store.path)
    assert len(store.shards) > 1
    assert read_probe(store.path).texts() == list(TEXTS)
    assert sorted(path.name for path in (store.path / "vocab").iterdir()) == [
        "probe.json",
        "tokenizer.json",
    ]
