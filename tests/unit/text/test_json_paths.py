"""Paths into JSON: nested keys, lists, quoted keys; and what an error says of absent ones."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from making import TOKENIZER, jsonl, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.store.store import Store
from tokmill.text.jsonl import seen_keys
from tokmill.text.make_document import Paths, Step, parse_path, quoted


def texts(store: Store) -> list[str]:
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(TOKENIZER)
    return [tokenizer.decode(r["token"].tolist()).removesuffix("<|endoftext|>") for r in store]


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("text", [("text", 0)]),
        ("a b-c", [("a b-c", 0)]),
        ("meta.title", [("meta", 0), ("title", 0)]),
        ("messages[].content", [("messages", 1), ("content", 0)]),
        ("a[][].b", [("a", 2), ("b", 0)]),
        ("tags[]", [("tags", 1)]),
        ('"a.b"', [("a.b", 0)]),
        ('x."a[\\"].é"[].y', [("x", 0), ('a["].é', 1), ("y", 0)]),
    ],
)
def test_steps(path: str, steps: list[tuple[str, int]]) -> None:
    assert parse_path(path) == tuple(Step(*step) for step in steps)


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", "a[", "a]", "a[0]", '"a', '"a"b'])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(UsageError, match="path"):
        parse_path(path)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_quoted_keys_come_back(keys: list[str]) -> None:
    path = ".".join(map(quoted, keys))
    assert [step.key for step in parse_path(path)] == keys


def slow(value: Any, steps: tuple[Step, ...]) -> list[Any]:
    """What stands at the ends of a path, step by step in plain Python."""
    if not steps:
        return [value]
    if not isinstance(value, dict):
        return []
    found = [value.get(steps[0].key)]
    for _ in range(steps[0].lists):
        found = [inner for each in found if each is not None for inner in each]
    return [end for each in found if each is not None for end in slow(each, steps[1:])]


LEAF = st.none() | st.text(max_size=3)
INNER = st.none() | st.fixed_dictionaries({}, optional={"b": LEAF, "c": st.none() | st.lists(LEAF)})
RECORD = st.fixed_dictionaries(
    {},
    optional={
        "a": INNER,
        "l": st.none() | st.lists(INNER, max_size=3),
        "m": st.none() | st.lists(st.none() | st.lists(INNER, max_size=2), max_size=2),
        "x.y": LEAF,
        "other": st.integers(),
    },
)


@given(RECORD)
def test_values_against_the_slow_twin(record: dict[str, Any]) -> None:
    names = ("a.b", "a.c[]", "l[].b", "l[].c[]", "m[][].b", '"x.y"')
    paths = Paths(names)
    decoded = paths.decoder.decode(msgspec.json.encode(record))
    for name in names:
        found = paths.values([decoded], name)[0]
        wanted = slow(record, parse_path(name))
        if paths.has_lists(name):
            assert (found or []) == [end for end in wanted if end is not None]
        else:
            assert [found] == (wanted or [None])


def test_paths_of_which_one_holds_the_other_are_refused() -> None:
    for names in (("a", "a.b"), ("a.b", "a"), ("a[]", "a"), ("a[].b", "a.b"), ("a[]", "a[].b")):
        with pytest.raises(UsageError, match="cannot be read together"):
            Paths(names)


def test_documents_of_nested_fields(tmp_path: Path) -> None:
    rows = [
        {"meta": {"title": "T"}, "messages": [{"content": "one"}, {"content": " two"}]},
        {"meta": None, "messages": [{"content": None}, {"content": "[deleted]"}, {"content": "x"}]},
        {"messages": []},
        {"messages": [{"content": 5}]},
        {"messages": {"content": "no list"}},
        {"meta": {"title": "alone"}},
    ]
    path = jsonl(tmp_path / "x.jsonl", rows)
    fields = ["meta.title", "messages[].content"]
    store = quick_build("jsonl", path, tmp_path / "s", fields=fields, keep=["meta.title"], join="|")
    assert texts(store) == ["T|one| two", "x", "alone"]
    assert [record["meta_title"] for record in store] == ["T", "", "alone"]
    assert (store.manifest.skipped, store.manifest.rejected) == ({"missing": 1}, {"type": 2})
    store = quick_build("jsonl", path, tmp_path / "t", fields=fields, strip=True, join="|")
    assert texts(store)[0] == "T|one|two"


def test_a_line_that_is_nested_too_deep_is_one_reject(tmp_path: Path) -> None:
    deep = '{"a": ' * 5000 + "1" + "}" * 5000
    path = jsonl(tmp_path / "x.jsonl", [{"a": {"b": "one"}}, deep, {"a": {"b": "two"}}])
    store = quick_build("jsonl", path, tmp_path / "s", fields=["a.b"])
    assert texts(store) == ["one", "two"]
    assert sum(store.manifest.rejected.values()) == 1


def test_seen_keys_are_counted(tmp_path: Path) -> None:
    rows = [{"id": 1, "m": {"t": "x"}, "a.b": "y", "l": ["z", {"k": "w"}]}, {"id": "s"}, "{", "5"]
    path = jsonl(tmp_path / "x.jsonl", rows)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, tmp_path / "x.jsonl.gz"):
        seen = seen_keys(str(file))
        assert seen.lines == 2
        assert dict(seen.texts) == {"m.t": 1, '"a.b"': 1, "l[]": 1, "l[].k": 1, "id": 1}
        assert dict(seen.others) == {"id": 1}
    assert seen.nearest(["a.b"]) == '"a.b"'
    assert seen.nearest(["t"]) == "m.t"


@pytest.mark.parametrize(
    ("row", "fields", "said"),
    [
        ({"content": "a", "id": 7}, ["contents"], r"--field content\? .*content \(3\), id \(3, no"),
        ({"meta": {"title": "a"}}, ["title"], r"--field meta\.title\?"),
        ({"a.b": "a"}, ["a.b"], r"--field '\"a\.b\"'\?"),
        ({"messages": [{"role": "user", "content": "a"}]}, ["messages"], "docs/chats.md"),
        ({"conversations": [{"from": "human", "value": "a"}]}, ["text"], "docs/chats.md"),
        ({"text": ["a"]}, ["text"], r"--field 'text\[\]'\?"),
        ({"n": 5}, ["text"], r"name yours with --field: .*n \(3, no text\)"),
    ],
)
def test_a_wrong_key_is_answered_with_the_keys_that_are_there(
    tmp_path: Path, tokmill: Any, row: dict[str, Any], fields: list[str], said: str
) -> None:
    path = jsonl(tmp_path / "x.jsonl", [row] * 3)
    with pytest.raises(TokmillError, match="no record was found") as caught:
        quick_build("jsonl", path, tmp_path / "s", fields=fields)
    assert re.search(said, caught.value.hint)
    flags = [part for field in fields for part in ("--field", field)]
    done = tokmill(
        *("build", "jsonl", path, *flags, "--vocab-size", "300", "-o", "t", "-q"), code=1
    )
    assert re.search(said, done.stderr)


def test_many_rejects_are_answered_with_the_keys_too(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": {"body": "a"}}] * 1500)
    with pytest.raises(TokmillError, match="1,500 type") as caught:
        quick_build("jsonl", path, tmp_path / "s")
    assert "--field text.body? the first 1,000 lines have text.body (1,000)" in caught.value.hint
    # Where a reason has nothing to do with keys, the keys are no answer.
    path = jsonl(tmp_path / "y.jsonl", [json.dumps({"text": "a"}) + "x"] * 1500)
    with pytest.raises(TokmillError, match="1,500 json") as caught:
        quick_build("jsonl", path, tmp_path / "t")
    assert "--field" not in caught.value.hint
