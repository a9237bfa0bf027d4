"""Pickles of triplets of intervals, read and written."""

import io
import pickle
import pickletools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokmill
from interval_stores import BLOCKS, write_intervals
from making import files_of, quick_build, token_store, write_store
from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.store.checks.validate import validate
from tokmill.store.schema import ROLE, Column
from tokmill.store.store import Store


def export(store: Store, out: Path, **options: Any) -> Path:
    part = plugins.load(plugins.EXPORTS, "triplets")
    part(recipe.convert(part.Config, options)).write(store, out)
    return out


@pytest.fixture
def mined(tmp_path: Path) -> Store:
    profiles = write_intervals(tmp_path / "profiles")
    return quick_build("mine", profiles.path, tmp_path / "mined", what="bbv", cpi=True)


@pytest.fixture
def vectors(tmp_path: Path, mined: Store) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(0).normal(size=(BLOCKS, 300)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", values)
    blocks = mined.reference("anchor").reference("block").path
    tokmill.build(
        "overlay", blocks, values=str(tmp_path / "vectors.npy"), name="near", per="record"
    )
    return values


def unpickled(path: Path) -> list[tuple[Any, ...]]:
    """The entries of a pickle as plain tuples, so that they can be compared and be keys."""
    with warnings.catch_warnings():
        # The old name of numpy's module, which versions 1 and 2 have.
        warnings.simplefilter("ignore", DeprecationWarning)
        entries = pickle.loads(path.read_bytes())  # noqa: S301 (written here)
    assert isinstance(entries, list)
    return [tuple(plain(part) for part in entry) for entry in entries]


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(plain(one) for one in value) if isinstance(value, list | tuple) else value


def put(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("cpi", [False, True])
@pytest.mark.parametrize("by_vector", [False, True])
def test_python_reads_what_is_written(
    tmp_path: Path, mined: Store, vectors: np.ndarray[Any, Any], cpi: bool, by_vector: bool
) -> None:
    """The tuples are those of the script; the same store gives the same bytes."""
    options = {"cpi": cpi, "vectors": "near" if by_vector else ""}
    path = export(mined, tmp_path / "t.pkl", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        entries = pickle.loads(path.read_bytes())  # noqa: S301 (written here)
    assert isinstance(entries, list) and len(entries) == len(mined) > 50
    profiles = mined.reference("anchor")
    for entry, row in zip(entries, mined, strict=True):
        assert isinstance(entry, tuple) and len(entry) == (9 if cpi else 6)
        members = [profiles.record(int(row[name])) for name in ("anchor", "positive", "negative")]
        for i, record in enumerate(members):
            blocks, weights = entry[2 * i], entry[2 * i + 1]
            assert weights == sorted(record["count"].tolist())
            pairs = {int(b): int(c) for b, c in zip(record["block"], record["count"], strict=True)}
            if by_vector:
                assert all(one.dtype == np.float32 and one.shape == (300,) for one in blocks)
                blocks = [int(np.flatnonzero((vectors == one).all(1))[0]) for one in blocks]
            assert dict(zip(blocks, weights, strict=True)) == pairs
            if cpi:
                assert entry[6 + i] == record["cpi"]
    again = export(mined, tmp_path / "u.pkl", **options)
    assert again.read_bytes() == path.read_bytes()
    pickletools.dis(path.read_bytes(), out=io.StringIO())


@pytest.mark.parametrize("by_vector", [False, True])
def test_what_is_written_is_read(
    tmp_path: Path, mined: Store, vectors: np.ndarray[Any, Any], by_vector: bool
) -> None:
    path = export(mined, tmp_path / "t.pkl", cpi=True, vectors="near" if by_vector else "")
    store = quick_build("triplets", path, tmp_path / "s")
    profiles = mined.reference("anchor")
    assert len(store) == 3 * len(mined) and validate(store).ok
    names = ("anchor", "positive", "negative")
    for number, record in enumerate(store):
        entry, role = divmod(number, 3)
        assert record["role"] == role
        theirs = profiles.record(int(mined.column(names[role])[entry]))
        order = np.lexsort((theirs["block"], theirs["count"]))
        assert np.array_equal(record["weight"], theirs["count"][order])
        if by_vector:
            assert np.array_equal(record["vector"], vectors[theirs["block"][order]])
        else:
            assert np.array_equal(record["block"], theirs["block"][order])
        assert record["cpi"] == theirs["cpi"]
    assert [int(v) for v in store.shard(0)["start"]] == [
        n for n in range(len(mined)) for _ in "123"
    ]
    # What was imported is written again as it was; the pickle has the same bytes but for memos.
    again = export(store, tmp_path / "again.pkl", cpi=True)
    assert unpickled(again) == unpickled(path)


@pytest.mark.parametrize("protocol", range(6))
def test_all_that_the_script_may_have_written(tmp_path: Path, protocol: int) -> None:
    """Lists, tuples and arrays, weights of numpy's types, in each protocol."""
    one = np.arange(3, dtype=np.float32)
    entries = [
        ([one, one + 1], [3, 4], [one], [np.int64(9)], (one * 2, one), (0.5, 1)),
        ([one.tolist()], np.asarray([7]), np.stack([one, one]), [1, 2], [one], [2**40]),
        ([], [], [one], [1], [one], [1]),
        [[one], [1], [one], [1], [one], [1]],
    ]
    store = quick_build("triplets", put(tmp_path / "a.pkl", entries, protocol), tmp_path / "s")
    assert store.manifest.skipped == {"a member has no blocks": 1}
    assert [len(record["weight"]) for record in store] == [2, 1, 2, 1, 2, 1, 1, 1, 1]
    assert store.record(2)["vector"].tolist() == [[0, 2, 4], [0, 1, 2]]
    assert store.record(5)["weight"].tolist() == [2**40]
    assert [int(v) for v in store.shard(0)["start"]] == [0] * 3 + [1] * 3 + [3] * 3
    ids = [([1, 2], [3, 4], [2**40], [1], [0], [1])]
    store = quick_build("triplets", put(tmp_path / "b.pkl", ids, protocol), tmp_path / "t")
    assert [record["block"].tolist() for record in store] == [[1, 2], [2**40], [0]]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([(1, 2)], "entry 0: no triplet|tuple of 2"),
        ({"a": 1}, "the file is a dict"),
        ({3: ([1], [1], [1], [1], [1], [1])}, "the file is a dict"),
        ([1 << 8000], "int is not a tuple of 6 or 9"),
        ([([1], [1, 2], [1], [1], [1], [1])], "1 blocks and 2 weights"),
        ([([-1], [1], [1], [1], [1], [1])], "from 0 on"),
        ([([1.5], [1], [1], [1], [1], [1])], "in place of a list of numbers"),
        ([([1], ["x"], [1], [1], [1], [1])], "weights or CPI that are not numbers"),
        ([([1], [float("nan")], [1], [1], [1], [1])], "not finite"),
        ([([1], [2**70], [1], [1], [1], [1])], "numbers of more than 64 bits"),
        ([([1 << 64], [1], [1], [1], [1], [1])], "more than 64 bits"),
        ([([1], [True], [1], [1], [1], [1])], "not numbers"),
        ([([[1.0, 2.0], [1.0]], [1, 1], [1], [1], [1], [1])], "several lengths"),
        ([([[1.0]], [1], [1], [1], [1], [1])], "vectors of 0, 1 numbers"),
        ([([1], [1], [1], [1], [1], [1], 1.0, 2.0, float("inf"))], "not finite"),
        ([([1],) * 6, ([1],) * 9], "tuple of|in place of|CPI"),
        ([([1], [1]) * 3, (*([1], [1]) * 3, 1.0, 2.0, 3.0)], "CPI in some entries, not in all"),
        ([([1], [1]) * 3, ([[1.0]], [1]) * 3], "blocks of 1 numbers, not of no"),
        ("text", "list"),
        ([], "nothing|no record"),
    ],
)
def test_what_is_no_triplet(tmp_path: Path, value: Any, said: str) -> None:
    path = put(tmp_path / "a.pkl", value)
    with pytest.raises(TokmillError) as error:
        quick_build("triplets", path, tmp_path / "s")
    text = f"{error.value.where}: {error.value}"
    assert any(part in text for part in said.split("|")), text


def test_parts_hold_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [([i, 1], [2, 3], [i], [1], [5], [i + 1]) for i in range(200)]
    path = put(tmp_path / "a.pkl", entries)
    whole = quick_build("triplets", path, tmp_path / "whole")
    monkeypatch.setattr("tokmill.builds.source.MAX_ITEM", 500)
    cut = quick_build("triplets", path, tmp_path / "cut")
    assert len(cut.shards) > 5 and len(whole.shards) == 1
    for one, other in zip(whole, cut, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in whole.schema)
    again = quick_build("triplets", path, tmp_path / "cut")
    assert files_of(again.path) == files_of(cut.path)


def test_exports_that_cannot_be(tmp_path: Path, mined: Store) -> None:
    plain = token_store(tmp_path / "plain", [[[1]]])
    with pytest.raises(UsageError, match="no column 'anchor'"):
        export(plain, tmp_path / "t.pkl")
    with pytest.raises(TokmillError, match="no overlay 'none'"):
        export(mined, tmp_path / "t.pkl", vectors="none")
    profiles = mined.reference("anchor").path
    known = quick_build("mine", profiles, tmp_path / "all", what="bbv")
    with pytest.raises(TokmillError, match="the CPI of interval .* is not known"):
        export(known, tmp_path / "t.pkl", cpi=True)
    assert not (tmp_path / "t.pkl").exists()


Members = list[tuple[list[Any], list[float], float]]


def drawn_entries(count: int, kind: str, seed: int = 0) -> list[tuple[Any, ...]]:
    """Entries of few intervals, so that some are equal; `kind`: of their blocks and weights."""
    draw = np.random.default_rng(seed)
    table = draw.normal(size=(30, 4))
    members: Members = []
    for _ in range(14):
        size = int(draw.integers(1, 7))
        block = draw.permutation(30)[:size].tolist()
        if kind == "float32":
            blocks: list[Any] = [*table[block].astype(np.float32)]
        else:
            blocks = table[block].tolist() if kind == "float64" else block
        weight = draw.random(size) if kind == "float64" else draw.integers(1, 1 << 60, size)
        members.append((blocks, weight.tolist(), float(draw.random() * 3)))
    found = []
    for numbers in draw.integers(0, len(members), (count, 3)).tolist():
        three = [members[number] for number in numbers]
        parts = [part for blocks, weights, _ in three for part in (blocks, weights)]
        found.append((*parts, *(cpi for _, _, cpi in three)))
    return found


def is_part(entries: list[Any], of: list[Any]) -> bool:
    """Say whether entries are some of others, in their order."""
    others = iter(of)
    return all(entry in others for entry in entries)


@pytest.mark.parametrize("kind", ["numbers", "float32", "float64"])
def test_a_tenth_of_two_files_is_whole_entries(tmp_path: Path, kind: str) -> None:
    """Drawn, split, merged, drawn again: entries stay whole, exact and in order."""
    files = [
        put(tmp_path / f"{name}.pkl", drawn_entries(400, kind, seed), 4)
        for seed, name in enumerate("ab")
    ]
    entries = [tuple(map(plain, entry)) for path in files for entry in unpickled(path)]
    store = quick_build("triplets", files, tmp_path / "s")
    assert len(store) == 3 * len(entries)

    def chosen(name: str, source: Any, **options: Any) -> list[Any]:
        made = quick_build("select", source, tmp_path / name, **options)
        found = unpickled(export(made, tmp_path / f"{name}.pkl", cpi=True))
        assert len(made) == 3 * len(found) and validate(made).ok
        return found

    tenth = chosen("tenth", store.path, ratio=0.1)
    rest = chosen("rest", store.path, ratio=0.1, rest=True)
    assert 40 < len(tenth) < 130 and is_part(tenth, entries) and is_part(rest, entries)
    # Equal entries are on one side, and each entry is on one side.
    assert sorted(map(str, tenth + rest)) == sorted(map(str, entries))
    assert not set(tenth) & set(rest)
    again = chosen("again", tmp_path / "rest", ratio=0.5, seed=3)
    assert 200 < len(again) < 500 and is_part(again, rest)
    assert chosen("both", [tmp_path / "rest", tmp_path / "tenth"]) == rest + tenth
    assert chosen("new", store.path, not_in=[str(tmp_path / "tenth")]) == rest


def test_conditions_are_on_all_records_of_an_entry(tmp_path: Path) -> None:
    """Entries in plain Python, for each condition."""
    path = put(tmp_path / "a.pkl", drawn_entries(700, "numbers", seed=2))
    entries = unpickled(path)
    store = quick_build("triplets", path, tmp_path / "s")
    sizes = [[len(entry[i]) for i in (0, 2, 4)] for entry in entries]
    first = [i for i, entry in enumerate(entries) if entries.index(entry) == i]
    low = [max(entry[6:]) < 2.5 for entry in entries]
    cases: dict[str, tuple[dict[str, Any], list[int]]] = {
        "long": ({"min_length": 2}, [i for i, one in enumerate(sizes) if min(one) >= 2]),
        "short": ({"max_length": 4}, [i for i, one in enumerate(sizes) if max(one) <= 4]),
        "where": ({"where": ["cpi < 2.5"]}, [i for i, good in enumerate(low) if good]),
        "unique": ({"unique": True}, first),
        # Elements differ wherever an entry differs, so the nearest two have fewer in common.
        "near": ({"near_unique": 1.0, "shingle": 1}, first),
    }
    for name, (options, wanted) in cases.items():
        found = quick_build("select", store.path, tmp_path / name, **options)
        assert unpickled(export(found, tmp_path / f"{name}.pkl", cpi=True)) == [
            entries[i] for i in wanted
        ], name
        assert 0 < len(wanted) < len(entries), name
    short = sum(size < 2 for one in sizes for size in one)
    others = sum(size >= 2 for one in sizes if min(one) < 2 for size in one)
    assert Store(tmp_path / "long").manifest.skipped == {
        "too short": short,
        "too short: another record of the entry": others,
    }
    # Entries of equal anchors are drawn together.
    sides = [
        {entry[:2] for entry in unpickled(export(part, tmp_path / f"{rest}.pkl"))}
        for rest in (False, True)
        for part in [quick_build("select", store.path, tmp_path / f"by {rest}", ratio=0.5,
                                 by="content", rest=rest)]
    ]  # fmt: skip
    assert len(sides[0]) + len(sides[1]) == 14 and not sides[0] & sides[1]
    with pytest.raises(UsageError, match="by: the stores have no column 'role'"):
        quick_build("select", store.path, tmp_path / "no", ratio=0.5, by="role")


def test_the_place_of_a_border_is_part_of_an_entry(tmp_path: Path) -> None:
    entries = [([1, 2], [1, 1], [3], [1], [4], [1]), ([1], [1], [2, 3], [1, 1], [4], [1])]
    store = quick_build("triplets", put(tmp_path / "a.pkl", entries), tmp_path / "s")
    assert len(quick_build("select", store.path, tmp_path / "u", unique=True)) == 6


def test_batches_and_shards_do_not_cut_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "a.pkl", drawn_entries(300, "numbers"))
    whole = quick_build("triplets", path, tmp_path / "s")
    wanted = unpickled(export(quick_build("select", whole.path, tmp_path / "a", ratio=0.3),
                              tmp_path / "a.pkl", cpi=True))  # fmt: skip
    monkeypatch.setattr("tokmill.builds.selection.minhash.BATCH_RECORDS", 7)
    monkeypatch.setattr("tokmill.builds.source.MAX_ITEM", 900)
    cut = quick_build("triplets", path, tmp_path / "t")
    found = quick_build("select", cut.path, tmp_path / "b", ratio=0.3)
    assert len(cut.shards) > 5
    assert unpickled(export(found, tmp_path / "b.pkl", cpi=True)) == wanted


@pytest.mark.parametrize(
    ("weights", "options", "said"),
    [
        ([2**24 + 1, 2**53 + 1, 2**64 - 1], {}, ""),
        ([0.1, 1e300, 3], {}, ""),
        ([-1, 2**40, 7], {}, ""),
        ([1, 2, 3.0], {"weights": "u8"}, ""),
        ([1, 2, 0.5], {"weights": "u8"}, "0.5 in weights, which u8 does not hold"),
        ([1, 2, -5], {"weights": "u8"}, "-5 in weights, which u8 does not hold"),
        ([1, 2, 2**53 + 1], {"weights": "f8"}, "9007199254740993 in weights, which f8"),
        ([0.5, 2, 2**53 + 1], {}, "fractions, and a whole number that no float holds"),
        ([-1, 2, 2**64 - 1], {}, "numbers of more than 64 bits"),
    ],
)
def test_weights_are_exact_or_refused(
    tmp_path: Path, weights: list[float], options: dict[str, Any], said: str
) -> None:
    path = put(tmp_path / "a.pkl", [([1, 2, 3], weights, [1], [1], [2], [1])])
    if said:
        with pytest.raises(TokmillError, match=said):
            quick_build("triplets", path, tmp_path / "s", **options)
    else:
        store = quick_build("triplets", path, tmp_path / "s", **options)
        assert store.record(0)["weight"].tolist() == weights
        [entry] = unpickled(export(store, tmp_path / "b.pkl"))
        assert entry[1] == tuple(weights)


def test_vectors_are_exact_or_refused(tmp_path: Path) -> None:
    """The first entry decides the type; a later one that it does not hold is an error."""
    narrow, wide = [np.float32(0.1) * np.ones(2, np.float32)], [[0.1, 0.2]]
    entries = [(narrow, [1]) * 3, (wide, [1]) * 3]
    path = put(tmp_path / "a.pkl", entries)
    with pytest.raises(TokmillError, match="0.1 in vectors, which f4 does not hold") as error:
        quick_build("triplets", path, tmp_path / "s")
    assert "--vectors f4 or f8" in (error.value.hint or "") and "entry 1" in (
        error.value.where or ""
    )
    store = quick_build("triplets", path, tmp_path / "t", vectors="f8")
    assert store.record(3)["vector"].tolist() == wide
    assert store.record(0)["vector"].tolist() == [[float(np.float32(0.1))] * 2]


def test_numbers_of_blocks_are_records_of_a_store(tmp_path: Path, mined: Store) -> None:
    blocks = mined.reference("anchor").reference("block").path
    path = export(mined, tmp_path / "t.pkl", cpi=True)
    store = quick_build("triplets", path, tmp_path / "s", blocks=str(blocks))
    assert store.reference("block").path == blocks
    beyond = put(tmp_path / "b.pkl", [([BLOCKS], [1]) * 3])
    with pytest.raises(TokmillError, match=f"a block beyond the {BLOCKS} records"):
        quick_build("triplets", beyond, tmp_path / "u", blocks=str(blocks))
    vectors = put(tmp_path / "v.pkl", [([[0.5]], [1]) * 3])
    with pytest.raises(UsageError, match="the blocks are vectors"):
        quick_build("triplets", vectors, tmp_path / "v", blocks=str(blocks))


def test_roles_that_are_damaged_are_no_entries(tmp_path: Path) -> None:
    schema = {"block": Column("u8"), "role": ROLE, "content": Column("u8", per="record")}
    rows = [{"block": [1], "role": role, "content": 1} for role in (0, 1, 2, 0, 2, 1)]
    write_store(tmp_path / "s", schema, [rows])
    with pytest.raises(TokmillError, match="does not hold 0, 1, 2 for each entry"):
        quick_build("select", tmp_path / "s", tmp_path / "t", ratio=0.5)
