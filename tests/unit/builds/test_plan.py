"""The plan: which item goes to which shard, and what is part of an identity."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import TOKENIZER, jsonl, quick_build
from tokmill.base.files import sampled
from tokmill.builds import plan as planning
from tokmill.builds.folder import stamps_of
from tokmill.builds.make_shard import InputChanged, check_unchanged
from tokmill.builds.plan import BuildRecipe, difference, group_items, prepare, shard_of
from tokmill.builds.scan import find_files
from tokmill.builds.source import Item, cut
from tokmill.store.manifest import OtherFile
from tokmill.store.receipts import read_planned

MEBI = 1 << 20
FILES = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=6), st.integers(0, 64 * MEBI), min_size=1, max_size=40
)


def items_of(files: dict[str, int]) -> list[Item]:
    return [Item(name, f"/{name}", 0, size, f"d{name}") for name, size in sorted(files.items())]


@settings(max_examples=100, deadline=None)
@given(FILES)
def test_shards_hold_all_items_in_order_and_are_bounded(files: dict[str, int]) -> None:
    items = items_of(files)
    groups = list(group_items(items))
    assert [item for group in groups for item in group] == items
    for group in groups:
        assert len(group) == 1 or sum(item.size for item in group) <= planning.MAX_SHARD_BYTES


@settings(max_examples=150, deadline=None)
@given(FILES, st.text("abcdef", min_size=1, max_size=6), st.integers(0, 64 * MEBI))
def test_a_new_file_changes_one_shard(files: dict[str, int], name: str, size: int) -> None:
    """One goes; one comes, or two where the new file ends a shard. (No shard is forced here.)"""
    files.pop(name, None)
    if not files:
        return
    before = list(group_items(items_of(files)))
    after = list(group_items(items_of({**files, name: size})))
    forced = [
        group
        for group in (*before, *after)
        if sum(item.size for item in group) > planning.MAX_SHARD_BYTES - 128 * MEBI
    ]
    if forced:
        return
    old = {shard_of("r", group) for group in before}
    new = {shard_of("r", group) for group in after}
    assert len(old - new) <= 1
    assert 1 <= len(new - old) <= 2


def test_shards_are_of_the_wanted_size_on_average() -> None:
    files = {f"{i:06d}": 4 * MEBI for i in range(4000)}
    groups = list(group_items(items_of(files)))
    mean = sum(files.values()) / len(groups)
    assert 55 * MEBI < mean < 75 * MEBI


def test_a_file_is_cut_into_items_that_tile_it(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    with path.open("wb") as file:
        file.truncate(150 * MEBI)
    (found,) = find_files([str(path)], (".txt",)).files
    items = list(cut(found))
    assert [(item.start, item.stop) for item in items] == [
        (0, 64 * MEBI),
        (64 * MEBI, 128 * MEBI),
        (128 * MEBI, 150 * MEBI),
    ]
    path.write_bytes(b"")
    (found,) = find_files([str(path)], (".txt",)).files
    assert [(item.start, item.stop) for item in cut(found)] == [(0, 0)]


def ids_of_plan(**keys: Any) -> tuple[str, str]:
    plan = prepare(BuildRecipe(**{"source": "jsonl", "tokenizer": str(TOKENIZER), **keys})).plan
    return plan.recipe_id, plan.plan_id


def test_what_is_in_recipe_and_plan_ids(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = jsonl(tmp_path / "a/x.jsonl", [{"text": "one"}, {"text": "two"}])
    inputs = (str(path),)
    recipe, plan = ids_of_plan(inputs=inputs)

    # Neither the place of the files nor of the store nor of the tokenizer.
    moved = tmp_path / "b/x.jsonl"
    moved.parent.mkdir()
    shutil.copy(path, moved)
    tokenizer = tmp_path / "other.json"
    shutil.copy(TOKENIZER, tokenizer)
    assert ids_of_plan(inputs=(str(moved),), out="elsewhere") == (recipe, plan)
    assert ids_of_plan(inputs=(str(moved.parent),), tokenizer=str(tokenizer)) == (recipe, plan)
    # Options that state the default.
    assert ids_of_plan(inputs=inputs, options={"strip": False}) == (recipe, plan)

    # The inputs: the plan alone.
    jsonl(moved, [{"text": "one"}, {"text": "twi"}])
    other = ids_of_plan(inputs=(str(moved),))
    assert other[0] == recipe
    assert other[1] != plan
    renamed = tmp_path / "b/y.jsonl"
    shutil.copy(path, renamed)
    assert ids_of_plan(inputs=(str(renamed),))[0] == recipe
    assert ids_of_plan(inputs=(str(renamed),))[1] != plan

    # Options, roles, tokenizer and kind: both.
    text = TOKENIZER.read_text().replace('"<|pad|>"', '"<|pod|>"')
    tokenizer.write_text(text)
    seen = {recipe}
    for keys in (
        {"options": {"strip": True}},
        {"options": {"fields": ["text"]}},
        {"options": {"specials_in_text": "special"}},
        {"options": {"keep": ["text"]}},
        {"roles": {"bos": "<|pad|>"}},
        {"tokenizer": str(tokenizer)},
        {"source": "text"},
    ):
        found, other_plan = ids_of_plan(inputs=inputs, **keys)
        assert found not in seen
        assert other_plan != plan
        seen.add(found)


def test_an_item_of_several_files_depends_on_all_of_them(tmp_path: Path) -> None:
    paths = [os.fsdecode(os.fsencode(tmp_path) + name) for name in (b"/a", b"/\xff", b"/c")]
    other, another = OtherFile(paths[1], "d1"), OtherFile(paths[1], "d2")
    item = Item("a <> b", paths[0], 0, 9, "d0", others=(other,))
    changed = Item("a <> b", paths[0], 0, 9, "d0", others=(another,))
    alone = Item("a <> b", paths[0], 0, 9, "d0")
    assert len({shard_of("r", [one]) for one in (item, changed, alone)}) == 3
    # What a plan holds is read back; the line of one file is that of earlier versions.
    shard = "0" * 24
    planned = [item.planned(shard), alone.planned(shard)]
    (tmp_path / "inputs.jsonl").write_bytes(b"".join(planning._lines(planned)))
    assert list(read_planned(tmp_path)) == planned
    assert [Item.again(one) for one in planned] == [item, alone]
    lines = (tmp_path / "inputs.jsonl").read_bytes().splitlines()
    assert len(json.loads(lines[0])) == 7 and len(json.loads(lines[1])) == 6
    for path in paths[:2]:
        Path(path).write_bytes(b"x")
    assert [*map(str, stamps_of(planned))] == paths[:2]


def test_a_second_file_that_changes_is_refused(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_bytes(b"what was planned")
    digest = sampled(files[0])[1]
    others = (OtherFile(str(files[1]), digest),)
    item = Item("a <> b", str(files[0]), 0, 32, digest, others=others)
    before = check_unchanged(item)
    assert len(before) == 2 and check_unchanged(item, before) == before
    os.utime(files[1], ns=(1, 1))
    with pytest.raises(InputChanged, match="changed while it was read") as error:
        check_unchanged(item, before)
    assert error.value.where == str(files[1])
    files[1].write_bytes(b"what is there now")
    with pytest.raises(InputChanged, match="changed since the build was planned"):
        check_unchanged(item)
    files[1].unlink()
    with pytest.raises(InputChanged, match="was removed"):
        check_unchanged(item)


def test_the_version_of_the_rules_is_in_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokmill.text.jsonl import JsonlSource

    path = str(jsonl(tmp_path / "x.jsonl", [{"text": "one"}]))
    before = ids_of_plan(inputs=(path,))
    monkeypatch.setattr(JsonlSource, "version", JsonlSource.version + 1)
    assert ids_of_plan(inputs=(path,))[0] != before[0]


def test_the_fingerprint_is_that_of_recipe_and_content(tmp_path: Path) -> None:
    """Not of names or digests of samples: those are the plan's."""
    path = jsonl(tmp_path / "x.jsonl", [{"text": "one"}])
    first = quick_build("jsonl", path, tmp_path / "s1")
    renamed = quick_build("jsonl", path.rename(tmp_path / "y.jsonl"), tmp_path / "s2")
    assert renamed.fingerprint == first.fingerprint
    assert renamed.manifest.plan_id != first.manifest.plan_id
    jsonl(path, [{"text": "two"}])
    assert quick_build("jsonl", path, tmp_path / "s3").fingerprint != first.fingerprint


def test_difference_names_the_keys_that_differ() -> None:
    old = {"a": 1, "b": {"c": [1], "d": "x"}, "e": None}
    new = {"a": 1, "b": {"c": [2], "d": "x", "f": True}}
    assert difference(old, new) == ["b.c: [1] → [2]", "b.f: (absent) → true", "e: null → (absent)"]
    assert difference(old, old) == []
