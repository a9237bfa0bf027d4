"""`build mine`: triplets and groups of functions."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from function_stores import Function, families, many, reasons, write_keyed
from making import files_of, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.mining import name_columns
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store

TRIPLE = ("anchor", "positive", "negative")


@pytest.fixture
def functions(tmp_path: Path) -> tuple[Path, list[Function]]:
    shards = many()
    write_keyed(tmp_path / "functions", shards)
    return tmp_path / "functions", [one for shard in shards for one in shard]


def triples(store: Store) -> list[tuple[int, ...]]:
    return list(zip(*(store.column(name).tolist() for name in TRIPLE), strict=True))


@pytest.mark.parametrize("count", [1, 5])
def test_triplets_are_what_they_are_called(
    tmp_path: Path, functions: tuple[Path, list[Function]], count: int
) -> None:
    path, rows = functions
    store = quick_build("mine", path, tmp_path / "mined", count=count)
    left, family = reasons(rows), families(rows)
    partners = [
        [
            j
            for j, other in enumerate(rows)
            if not left[j] and other.same == one.same and other.build != one.build
        ]
        for one in rows
    ]
    able = [
        i
        for i, one in enumerate(rows)
        if not left[i] and any(rows[j].tokens != one.tokens for j in partners[i])
    ]
    assert store.column("anchor").tolist() == [i for i in able for _ in range(count)]
    for anchor, positive, negative in triples(store):
        assert positive in partners[anchor]
        assert rows[positive].tokens != rows[anchor].tokens
        assert family[negative] != family[anchor] and not left[negative]
        assert rows[negative].function != rows[anchor].function
    assert store.column("group").tolist() == [[family[i] for i in t] for t in triples(store)]
    # What makes no triplet is counted, each record once.
    wanted = Counter(reason for reason in left if reason)
    for i in set(range(len(rows))) - set(able):
        if not left[i]:
            alone = not partners[i]
            why = "no partner in another build" if alone else "partners have the same content"
            wanted[why] += 1
    assert store.manifest.skipped == wanted and len(wanted) == 5
    assert store.manifest.notes["draws avoided as negatives: same content under another name"]
    if count > 1:
        assert store.manifest.notes["draws avoided as negatives: same name elsewhere"]
    assert validate(store).ok
    assert store.reference("anchor").fingerprint == Store(path).fingerprint


def test_positives_and_negatives_are_spread(
    tmp_path: Path, functions: tuple[Path, list[Function]]
) -> None:
    """Each partner is drawn about as often, and negatives come from the whole store."""
    path, rows = functions
    store = quick_build("mine", path, tmp_path / "mined", count=300)
    anchor, positive, negative = np.asarray(triples(store)).T
    one = int(anchor[0])
    found = Counter(positive[anchor == one].tolist())
    assert len(found) == 3 and set(found.values()) == {100}
    drawn = np.bincount(negative, minlength=len(rows))
    usable = drawn[drawn > 0]
    assert len(usable) > 150 and usable.max() < 2.5 * usable.mean()


def test_seeds_and_blocks(
    tmp_path: Path,
    functions: tuple[Path, list[Function]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A seed decides all; how many anchors are drawn at a time decides nothing."""
    path, _ = functions
    first = quick_build("mine", path, tmp_path / "a", seed=1)
    other = quick_build("mine", path, tmp_path / "b", seed=2)
    assert triples(first) != triples(other) and len(first) == len(other)
    for what in ("triplets", "groups"):
        whole = quick_build("mine", path, tmp_path / f"{what}-whole", what=what)
        with monkeypatch.context() as patch:
            patch.setattr(name_columns, "BLOCK", 7)
            cut = quick_build("mine", path, tmp_path / f"{what}-cut", what=what)
        assert files_of(whole.path) == files_of(cut.path)
    with pytest.raises(TokmillError, match="seed: 1 → 2"):
        quick_build("mine", path, first.path, seed=2)


@pytest.mark.parametrize("members", [2, 3, 8])
def test_groups_are_builds_of_one_function(
    tmp_path: Path, functions: tuple[Path, list[Function]], members: int
) -> None:
    path, rows = functions
    store = quick_build("mine", path, tmp_path / "mined", what="groups", members=members)
    left, family = reasons(rows), families(rows)
    seen = Counter[int]()
    for record in store:
        here = record["member"].tolist()
        assert 2 <= len(here) <= members
        assert len({rows[i].same for i in here}) == 1
        assert len({rows[i].tokens for i in here}) == len(here)
        assert {family[i] for i in here} == {record["group"]}
        seen.update(here)
    assert set(seen.values()) == {1} and not any(left[i] for i in seen)
    assert len(seen) + sum(store.manifest.skipped.values()) == len(rows)
    # Of each function with two contents all contents are there, but one where pairs are not even.
    contents: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for i, one in enumerate(rows):
        if not left[i]:
            contents.setdefault(one.same, set()).add(one.tokens)
    wanted = sum(len(c) - (members == 2 and len(c) % 2) for c in contents.values() if len(c) > 1)
    assert len(seen) == wanted
    assert validate(store).ok


def test_a_large_function_is_dealt_evenly(tmp_path: Path) -> None:
    """Ten levels of two compilers: groups of at most eight have both compilers."""
    rows = [
        Function("p", "a", compiler, f"O{level}", "f", (i + 1, level + 1))
        for i, compiler in enumerate(("gcc", "clang"))
        for level in range(10)
    ]
    path = write_keyed(tmp_path / "functions", [rows]).path
    store = quick_build(
        "mine", path, tmp_path / "m", what="groups", differ=["compiler"], same=["function"]
    )
    groups = [record["member"].tolist() for record in store]
    assert sorted(map(len, groups)) == [6, 7, 7]
    for group in groups:
        assert min(Counter(rows[i].compiler for i in group).values()) >= 3


def test_a_tenth_and_a_merge_keep_their_references(
    tmp_path: Path, functions: tuple[Path, list[Function]]
) -> None:
    """`select` samples triplets and groups, and merges what was mined of one store."""
    path, _ = functions
    for what in ("triplets", "groups"):
        parts = [
            quick_build("mine", path, tmp_path / f"{what}-{seed}", what=what, seed=seed)
            for seed in (1, 2)
        ]
        merged = quick_build("select", [p.path for p in parts], tmp_path / f"{what}-merged")
        assert len(merged) == sum(map(len, parts))
        tenth = quick_build("select", merged.path, tmp_path / f"{what}-tenth", ratio=0.2)
        rest = quick_build("select", merged.path, tmp_path / f"{what}-rest", ratio=0.2, rest=True)
        assert 0.05 < len(tenth) / len(merged) < 0.4
        assert len(tenth) + len(rest) == len(merged)
        unique = quick_build(
            "select", [parts[0].path, parts[0].path], tmp_path / f"{what}-unique", unique=True
        )
        assert len(unique) == len(parts[0])
        column = "anchor" if what == "triplets" else "member"
        for store in (merged, tenth):
            assert store.reference(column).fingerprint == Store(path).fingerprint
            assert validate(store).ok


def test_the_only_partner_is_found_among_many(tmp_path: Path) -> None:
    """Of 200 builds of a function one has other content; it is the partner of all others."""
    rows = [
        Function("p", "a", f"gcc{build}", "O2", name, (number, int(build == 130)))
        for number, name in enumerate("fg")
        for build in range(200)
    ]
    alone = [Function("p", "a", f"gcc{build}", "O2", "h", (9,)) for build in range(90)]
    write_keyed(tmp_path / "functions", [rows, alone])
    store = quick_build("mine", tmp_path / "functions", tmp_path / "m", count=2)
    assert store.column("anchor").tolist() == [i for i in range(400) for _ in range(2)]
    for anchor, positive, _ in triples(store):
        assert (anchor % 200 == 130) != (positive % 200 == 130)
        assert anchor // 200 == positive // 200
    assert store.manifest.skipped == {"partners have the same content": 90}


def test_one_function_has_no_negative(tmp_path: Path) -> None:
    rows = [Function("p", "a", "gcc", level, "f", (i + 1,)) for i, level in enumerate("012")]
    path = write_keyed(tmp_path / "functions", [rows, []]).path
    with pytest.raises(TokmillError, match=r"found \(3 no negative among 64 drawn"):
        quick_build("mine", path, tmp_path / "m")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"same": ["nonsense"]}, "same: the store has no column 'nonsense'"),
        ({"same": ["token"]}, "same: the store has no column 'token'"),
        ({"differ": ["function"]}, "cannot be the same and differ"),
        ({"nameless": "("}, "is not a regular expression"),
        ({"members": 3}, "members does nothing where triplets are mined"),
        ({"what": "groups", "count": 3}, "count does nothing where groups are mined"),
        ({"what": "groups", "members": 1}, "members: expected"),
        ({"count": 0}, "count: expected"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path, functions: tuple[Path, list[Function]], options: dict[str, object], said: str
) -> None:
    with pytest.raises(TokmillError, match=said.replace("(", r"\(")):
        quick_build("mine", functions[0], tmp_path / "m", **options)
    assert not (tmp_path / "m").exists()


def test_stores_that_cannot_be_mined(
    tmp_path: Path, functions: tuple[Path, list[Function]]
) -> None:
    path, _ = functions
    with pytest.raises(UsageError, match="refer to one store, not to 2"):
        quick_build("mine", [path, path], tmp_path / "m")
    with pytest.raises(UsageError, match="none of the columns project, program, function, part"):
        quick_build("mine", quick_build("mine", path, tmp_path / "m").path, tmp_path / "n")
    with pytest.raises(UsageError, match="have no tokenizer"):
        quick_build("mine", path, tmp_path / "o", tokenizer="x.json")


@pytest.mark.parametrize(
    "options",
    [{"near_unique": 0.9}, {"min_length": 1}, {"max_length": 9}, {"where": ["length > 3"]}],
)
def test_entries_of_references_have_no_lengths(
    tmp_path: Path, functions: tuple[Path, list[Function]], options: dict[str, object]
) -> None:
    mined = quick_build("mine", functions[0], tmp_path / "mined", count=3)
    with pytest.raises(UsageError, match="the records have no tokens"):
        quick_build("select", mined.path, tmp_path / "s", **options)
    unique = quick_build("select", [mined.path, mined.path], tmp_path / "u", unique=True)
    assert triples(unique) == triples(mined)
