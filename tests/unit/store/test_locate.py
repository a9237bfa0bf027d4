"""From a record to its input and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import UNSET
from tokmill.store.checks.locate import find_input, find_records, locate

from making import jsonl, quick_build, token_store
from tokmill.base.errors import UsageError
from tokmill.store.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("locate")
    (folder / "in/deep").mkdir(parents=True)
    jsonl(folder / "in/a.jsonl", [{"text": "é", "id": 1}, "", {"text": "two", "id": 2}])
    jsonl(folder / "in/deep/b.jsonl", [{"text": "three", "id": 2}])
    return quick_build("jsonl", folder / "in", folder / "s", keep=["id"])


def test_the_input_at_that_byte_holds_the_record(store: Store) -> None:
    texts = [b'"\xc3\xa9"', b'"two"', b'"three"']
    token = 0
    for number, text in enumerate(texts):
        place = locate(store, number)
        line = Path(place.path).read_bytes()[place.byte :].split(b"\n")[0]
        assert text in line
        assert place.item == ("deep/b.jsonl" if number == 2 else "a.jsonl")
        assert (place.record, place.record_in_shard, place.token_start) == (number, number, token)
        assert place.tokens == len(store.record(number)["token"])
        assert Path(place.shard).exists()
        assert find_input(store, place.item, place.byte) == number
        token += place.tokens


def test_records_by_value(store: Store) -> None:
    assert list(find_records(store, "id", "2")) == [1, 2]
    assert list(find_records(store, "id", "3")) == []
    with pytest.raises(UsageError, match="no column 'idd'") as caught:
        list(find_records(store, "idd", "1"))
    assert "'id'" in caught.value.hint
    with pytest.raises(UsageError, match="no column 'token'"):
        list(find_records(store, "token", "1"))


def test_places_that_do_not_exist(store: Store) -> None:
    with pytest.raises(UsageError, match="no record 3"):
        locate(store, 3)
    assert find_input(store, "a.jsonl", 1) is None
    assert find_input(store, "b.jsonl", 0) is None


def test_what_places_count_stands_in_the_manifest(tmp_path: Path) -> None:
    manifest = token_store(tmp_path / "s", [[[1]]]).manifest
    chosen = quick_build("select", tmp_path / "s", tmp_path / "c").manifest
    assert (manifest.places, chosen.places) == (UNSET, "record")
    assert (manifest.unit, chosen.unit) == ("byte", "record")
