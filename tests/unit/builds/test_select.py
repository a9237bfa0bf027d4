"""`build select`: filters, draws, splits and merges against plain Python."""

import hashlib
from decimal import Decimal
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from making import TOKENS, change_sealed, here, ids_of, quick_build, rec, write_store
from phrase_records import PHRASES, expand
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds import plan
from tokmill.builds.plan import How
from tokmill.builds.selection.conditions import parse_condition
from tokmill.store.checks.validate import validate
from tokmill.store.manifest import MANIFEST, Reference
from tokmill.store.schema import Column, Schema
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary

SCHEMA: Schema = {
    "token": Column("u2", vocab="token"),
    "name": Column("utf8", per="record"),
    "level": Column("i8", per="record"),
    "score": Column("f4", per="record"),
    "vector": Column("u1", per="record", width=2),
}
RECORDS = [
    rec(
        [i % 5] * (i % 7),
        name=f"{'ab'[i % 2]}{i % 4}",
        level=i - 20,
        score=i / 8,
        vector=[i, 1],
    )
    for i in range(40)
]


def make(path: Path, *shards: list[dict[str, Any]], roles: dict[str, int] | None = None) -> Store:
    digest = hashlib.sha256(b"{}").hexdigest()
    vocabulary = Vocabulary("tokenizer.json", digest, 10, roles or {})
    store = write_store(path, SCHEMA, shards, vocabularies={"token": vocabulary})
    (path / "vocab/tokenizer.json").write_bytes(b"{}")
    return store


KEPT = ["5", "10", "100", "9", "9.5", "-1", "1000.0", "", "x", "nan", "1e400", "9007199254740993"]
"""Values that `--keep` writes for numbers, a string, NaN and none at all."""


def strings(store: Store) -> list[str]:
    return [store.record(i)["n"] for i in range(store.records)]


@pytest.mark.parametrize("text", ["n > 9", "n >= 10", "n < 9", "n <= 9.5", "n == 10", "n != 10"])
def test_numbers_in_strings_are_compared_as_numbers(tmp_path: Path, text: str) -> None:
    _, sign, number = text.split()
    schema: Schema = {"token": Column("u2"), "n": Column("utf8", per="record")}
    write_store(tmp_path / "a", schema, [[rec([1], n=value) for value in KEPT]])
    found = quick_build("select", tmp_path / "a", tmp_path / "b", where=[text])

    compare = {">": gt, ">=": ge, "<": lt, "<=": le, "==": eq, "!=": ne}[sign]
    missing = Decimal("nan")
    values = [missing if v in ("", "x") else Decimal(v) for v in KEPT]
    ordered = sign not in ("==", "!=")
    right = [
        text
        for text, value in zip(KEPT, values, strict=True)
        if not (ordered and value.is_nan()) and compare(value, Decimal(number))
    ]
    assert strings(found) == right
    no_number = 3 if sign not in ("==", "!=") else 0
    assert found.manifest.skipped.get(f"no number: {text}", 0) == no_number


def test_numbers_in_quotes_are_text_and_large_ones_exact(tmp_path: Path) -> None:
    schema: Schema = {
        "token": Column("u2"),
        "n": Column("utf8", per="record"),
        "f": Column("f4", per="record"),
    }
    rows = [rec([1], n=n, f=f) for n, f in [("10", 0.1), ("10.0", float("nan")), ("007", 2)]]
    rows.append(rec([1], n="9007199254740993", f=1))
    write_store(tmp_path / "a", schema, [rows])

    def build(text: str) -> Store:
        name = hashlib.sha256(text.encode()).hexdigest()
        return quick_build("select", tmp_path / "a", tmp_path / name, where=[text])

    assert strings(build("n == 10")) == ["10", "10.0"]
    assert strings(build("n == '10'")) == ["10"]
    assert strings(build("n > 9007199254740992")) == ["9007199254740993"]
    assert strings(build("n < 11")) == ["10", "10.0"]  # 007 is a name
    assert strings(build("f == .1")) == ["10"]
    schema["length"] = Column("u1", per="record")
    write_store(tmp_path / "c", schema, [[{**row, "length": 9} for row in rows]])
    with pytest.raises(UsageError, match="'length' counts tokens, and"):
        quick_build("select", tmp_path / "c", tmp_path / "d", where=["length > 3"])
    missing = build("f > .5")
    assert strings(missing) == ["007", "9007199254740993"]
    assert missing.manifest.skipped["no number: f > .5"] == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("n == \"say 'no'\"", ["say 'no'"]),
        ("n == 'say \"no\"'", ['say "no"']),
        ("n == say 'no'", ["say 'no'"]),
        ("n == '\"\"'", ['""']),
        ("n == ''", [""]),
        ("n == it's", ["it's"]),
        ('n ~ "\'$"', ["say 'no'", "'"]),
        ("n ~ '^\"'", ['""']),
        ('n == "\'"', ["'"]),
        ("n == '", ["'"]),
    ],
)
def test_only_the_quotes_around_a_text_are_left_out(
    tmp_path: Path, text: str, found: list[str]
) -> None:
    schema: Schema = {"token": Column("u2"), "n": Column("utf8", per="record")}
    kept = ["say 'no'", 'say "no"', '""', "", "it's", "'", "no"]
    write_store(tmp_path / "a", schema, [[rec([1], n=value) for value in kept]])
    assert strings(quick_build("select", tmp_path / "a", tmp_path / "b", where=[text])) == found


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parent") / "store"
    make(path, RECORDS[:15], [], RECORDS[15:])
    return path


def levels(store: Store) -> list[int]:
    """What identifies a record here."""
    return store.column("level").tolist()


def chosen(condition: Any) -> list[int]:
    return [record["level"] for record in RECORDS if condition(record)]


@pytest.mark.parametrize(
    ("options", "condition"),
    [
        ({}, lambda r: True),
        ({"min_length": 3}, lambda r: len(r["token"]) >= 3),
        ({"max_length": 0}, lambda r: len(r["token"]) == 0),
        ({"min_length": 2, "max_length": 4}, lambda r: 2 <= len(r["token"]) <= 4),
        ({"where": ["length == 6"]}, lambda r: len(r["token"]) == 6),
        ({"where": ["level >= -5", "level<3"]}, lambda r: -5 <= r["level"] < 3),
        ({"where": ["level != 0"]}, lambda r: r["level"] != 0),
        ({"where": ["score > 1.5"]}, lambda r: r["score"] > 1.5),
        ({"where": ["score <= 1e0"]}, lambda r: r["score"] <= 1),
        ({"where": ["name = a2"]}, lambda r: r["name"] == "a2"),
        ({"where": ["name == 'b1'"]}, lambda r: r["name"] == "b1"),
        ({"where": ["name ~ ^a|3$"]}, lambda r: r["name"][0] == "a" or r["name"][1] == "3"),
        ({"where": ["level ~ ^-1"]}, lambda r: str(r["level"]).startswith("-1")),
    ],
)
def test_filters(tmp_path: Path, parent: Path, options: Any, condition: Any) -> None:
    store = quick_build("select", parent, tmp_path / "s", **options)
    wanted = chosen(condition)
    assert levels(store) == wanted
    by_level = {record["level"]: record for record in RECORDS}
    for record in store:
        original = by_level[int(record["level"])]
        assert record["token"].tolist() == original["token"]
        assert record["name"] == original["name"]
        assert record["vector"].tolist() == original["vector"]
    assert sum(store.manifest.skipped.values()) == len(RECORDS) - len(wanted)
    assert validate(store).ok


def test_kept_records_know_their_number_in_the_shard_and_the_others_are_counted(
    tmp_path: Path, parent: Path
) -> None:
    store = quick_build("select", parent, tmp_path / "s", where=["level >= 0"])
    starts = [int(v) for i in range(len(store.shards)) for v in store.shard(i)["start"]]
    levels = [int(record["level"]) for record in Store(parent)]
    numbers = [*range(15), *range(25)]
    assert starts == [n for n, level in zip(numbers, levels, strict=True) if level >= 0]
    skipped = sum(store.receipt(i).skipped["not level >= 0"] for i in range(len(store.shards)))
    assert len(store) + skipped == len(levels)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"where": ["level"]}, "is not COLUMN OP VALUE"),
        ({"where": ["lvel > 1"]}, "no column 'lvel'"),
        ({"where": ["level > x"]}, "'x' is not a number"),
        ({"where": ["name ~ ("]}, "not a regular expression"),
        ({"where": ["vector > 1"]}, "one value per record"),
        ({"ratio": 1.5}, "ratio: expected"),
        ({"rest": True}, "--rest does nothing without --ratio"),
        ({"rest": True, "ratio": 0.9, "near_unique": 0.9}, "a split would have some in both"),
        ({"by": "name"}, "--by does nothing without --ratio"),
        ({"shingle": 9}, "--shingle does nothing without --near-unique"),
        ({"ratio": 0.5, "by": "nmae"}, "no column 'nmae'"),
        ({"ratio": 0.5, "by": "token"}, "no column 'token' with one value per record"),
        ({"ratio": 0.5, "by": "vector"}, "no column 'vector' with one value per record"),
        ({"near_unique": 0.2}, "not a threshold"),
        ({"near_unique": 0.9, "shingle": 0}, "shingle: expected"),
    ],
)
def test_wrong_options(tmp_path: Path, parent: Path, options: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        quick_build("select", parent, tmp_path / "s", **options)


@pytest.mark.parametrize("number", ["1e39", "-1e39", "1" + "0" * 400, "0x" + "f" * 400])
def test_numbers_beyond_those_of_a_column(number: str) -> None:
    schema = {"x": Column("f4", "record"), "n": Column("u1", "record")}
    with pytest.raises(UsageError, match="no numbers as large"):
        parse_condition(f"x < {number}", schema)
    parse_condition(f"n < {number}", schema)
    for largest in ("inf", "3.4028235e38"):
        parse_condition(f"x < {largest}", schema)


def test_a_selection_of_nothing_names_its_conditions(tmp_path: Path, parent: Path) -> None:
    with pytest.raises(TokmillError, match=r"40 not level > 99") as error:
        quick_build("select", parent, tmp_path / "s", where=["level > 99"])
    assert "no record meets all conditions" in (error.value.hint or "")


RATIOS = st.one_of(st.sampled_from([0.25, 0.5, 0.9]), st.floats(0.05, 0.95))


@settings(max_examples=12, deadline=None)
@given(RATIOS, st.integers(0, 5), st.sampled_from(["", "name", "level"]))
def test_a_split_is_disjoint_and_complete(
    tmp_path_factory: pytest.TempPathFactory, parent: Path, ratio: float, seed: int, by: str
) -> None:
    out = tmp_path_factory.mktemp("split")
    parts = []
    for rest in (False, True):
        try:
            parts.append(
                quick_build(
                    "select", parent, out / f"{rest}", ratio=ratio, seed=seed, by=by, rest=rest
                )
            )
        except TokmillError as error:
            assert "no record" in str(error)
    found = [level for part in parts for level in levels(part)]
    assert sorted(found) == sorted(record["level"] for record in RECORDS)
    if by != "level" and len(parts) == 2:
        # What is equal in the key stands on one side.
        values = [{r["name"] if by else tuple(r["token"].tolist()) for r in part} for part in parts]
        assert not values[0] & values[1]


def test_a_draw_is_of_about_the_wanted_size_and_by_seed(tmp_path: Path) -> None:
    records = [
        rec([i % 10, i // 10 % 10, i // 100], name="", level=i, score=0, vector=[0, 0])
        for i in range(1000)
    ]
    make(tmp_path / "p", records)
    third = {"ratio": 0.3}
    ways = [third, third | {"seed": 1}, {"ratio": 0.5}, third | {"by": "level"}]
    drawn = [
        set(levels(quick_build("select", tmp_path / "p", tmp_path / f"{n}", **options)))
        for n, options in enumerate(ways)
    ]
    for found, ratio in zip(drawn, (0.3, 0.3, 0.5, 0.3), strict=True):
        assert abs(len(found) / 1000 - ratio) < 0.06
    assert drawn[0] != drawn[1]
    assert drawn[0] < drawn[2]


def test_unique_keeps_the_first_of_all_inputs(tmp_path: Path) -> None:
    rows = [[1, 2], [], [1, 2], [3], [], [1]]
    more = [[3], [4], [4]]
    make_row = lambda i, t: rec(t, name="", level=i, score=0, vector=[0, 0])  # noqa: E731
    make(tmp_path / "a", [make_row(i, t) for i, t in enumerate(rows)])
    make(tmp_path / "b", [make_row(10 + i, t) for i, t in enumerate(more)])
    both = [tmp_path / "a", tmp_path / "b"]
    assert levels(quick_build("select", both, tmp_path / "u", unique=True)) == [0, 1, 3, 5, 11]
    other = quick_build("select", tmp_path / "b", tmp_path / "n", not_in=[str(tmp_path / "a")])
    assert levels(other) == [11, 12]
    assert other.manifest.skipped == {"in another store": 1}


def test_the_other_half_of_a_split_is_no_duplicate(tmp_path: Path) -> None:
    rows = [(i, [i % 7, i % 3]) for i in range(60)]
    row = lambda i, t: rec(t, name=f"p{i % 8}", level=i, score=0, vector=[0, 0])  # noqa: E731
    make(tmp_path / "p", [row(i, t) for i, t in rows])
    split: dict[str, Any] = {"ratio": 0.5, "by": "name"}
    train = quick_build("select", tmp_path / "p", tmp_path / "train", **split)
    alone = {tuple(t) for i, t in rows if i in set(levels(train))}
    rest = [(i, t) for i, t in rows if i not in set(levels(train))]
    fresh = [i for i, t in rest if tuple(t) not in alone]
    options = split | {"rest": True, "not_in": [str(train.path)]}
    val = quick_build("select", tmp_path / "p", tmp_path / "val", **options)
    assert levels(val) == fresh
    twice = len(rest) - len(fresh)
    assert twice and val.manifest.skipped == {"not drawn": len(train), "in another store": twice}


@pytest.mark.parametrize("options", [{"unique": True}, {"near_unique": 0.9}], ids=str)
def test_a_change_in_an_earlier_shard_is_seen(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is made again when what stands before it has changed."""
    monkeypatch.setattr(plan, "SHARD_BYTES", 1)
    row = lambda i, t: rec(t, name="", level=i, score=0, vector=[0, 0])  # noqa: E731
    make(tmp_path / "p", [row(0, [1] * 9), row(1, [2] * 9)], [row(2, [1] * 9), row(3, [3] * 9)])
    out = tmp_path / "s"
    assert levels(quick_build("select", tmp_path / "p", out, **options)) == [0, 1, 3]
    make(tmp_path / "p", [row(0, [4] * 9), row(1, [2] * 9)], [row(2, [1] * 9), row(3, [3] * 9)])
    how = How(quiet=True, amount=here(), yes=True)
    assert levels(quick_build("select", tmp_path / "p", out, **options, how=how)) == [0, 1, 2, 3]


def test_merge_is_in_the_order_given_and_needs_equal_schemas(tmp_path: Path, parent: Path) -> None:
    make(tmp_path / "b", RECORDS[:3])
    merged = quick_build("select", [tmp_path / "b", parent], tmp_path / "m")
    assert levels(merged) == [r["level"] for r in [*RECORDS[:3], *RECORDS]]
    write_store(tmp_path / "c", {"token": Column("u2")}, [[rec([1])]])
    with pytest.raises(TokmillError, match="cannot be merged") as refused:
        quick_build("select", [parent, tmp_path / "c"], tmp_path / "x")
    assert "schema.name" in str(refused.value)


def test_a_store_of_another_vocabulary_is_not_compared(tmp_path: Path) -> None:
    """Equal ids would mean different tokens."""
    schema = {"token": Column("u1", vocab="token")}
    for name in "ab":
        vocabularies = {"token": Vocabulary("v", name * 64, 5)}
        write_store(tmp_path / name, schema, [[rec([1])]], vocabularies=vocabularies)
        (tmp_path / name / "vocab").mkdir(exist_ok=True)
        (tmp_path / name / "vocab/v").write_bytes(b"tokens")
    with pytest.raises(TokmillError, match="vocabularies 'token' differ"):
        quick_build("select", tmp_path / "a", tmp_path / "c", not_in=[str(tmp_path / "b")])


def test_records_of_other_columns_are_not_compared(tmp_path: Path) -> None:
    """A digest covers all token columns: none would be found in the other store."""
    number = Column("u1", ref="records")
    for name, schema in {
        "plain": {"token": Column("u1")},
        "wide": {"token": Column("u4"), "level": Column("u1", per="record")},
        "mask": {"token": Column("u1"), "loss": Column("u1")},
        "f4": {"token": Column("f4")},
        "of-a": {"member": number},
        "of-b": {"member": number},
    }.items():
        to = {"records": Reference(name * 16, "x", 9, "y" * 64)} if "of" in name else None
        row = rec([1], member=[1], loss=[1], level=1)
        write_store(tmp_path / name, schema, [[row]], references=to)
    for name, other in (("plain", "mask"), ("mask", "plain"), ("plain", "f4"), ("of-a", "of-b")):
        with pytest.raises(TokmillError, match="columns that are compared differ"):
            quick_build("select", tmp_path / name, tmp_path / "s", not_in=[str(tmp_path / other)])
    change_sealed(
        write_store(tmp_path / "half", TOKENS, [[rec([2])]]).path / MANIFEST, complete=False
    )
    with pytest.raises(TokmillError, match="half: the store is not complete"):
        quick_build("select", tmp_path / "plain", tmp_path / "s", not_in=[str(tmp_path / "half")])
    for name, other in (("plain", "wide"), ("of-a", "of-a")):
        with pytest.raises(TokmillError, match="no record was found"):
            quick_build("select", tmp_path / name, tmp_path / "s", not_in=[str(tmp_path / other)])


def test_ids_out_of_the_vocabulary(tmp_path: Path) -> None:
    """Only an imported store can hold them, as the writer refuses them."""
    rows = [rec([1, 12, 3], name="", level=0, score=0, vector=[0, 0])]
    digest = hashlib.sha256(b"{}").hexdigest()
    store = make(tmp_path / "p", rows[:0])
    wide = {**SCHEMA, "token": Column("u2")}
    write_store(tmp_path / "p", wide, [rows])
    vocabulary = Vocabulary("tokenizer.json", digest, 10, {"unk": 7})
    import msgspec

    from tokmill.store.manifest import with_checksum

    changed = msgspec.structs.replace(
        Store(tmp_path / "p").manifest, schema=SCHEMA, vocabularies={"token": vocabulary}
    )
    (tmp_path / "p/vocab/tokenizer.json").write_bytes(b"{}")
    (store.path / "manifest.json").write_bytes(with_checksum(changed))
    with pytest.raises(TokmillError, match="holds the id 12"):
        quick_build("select", tmp_path / "p", tmp_path / "a")
    mapped = quick_build("select", tmp_path / "p", tmp_path / "b", map_oov="unk")
    assert ids_of(mapped) == [[1, 7, 3]]
    assert mapped.manifest.notes == {"ids of token replaced by unk": 1}
    mapped = quick_build("select", tmp_path / "p", tmp_path / "c", map_oov="4")
    assert ids_of(mapped) == [[1, 4, 3]]
    assert mapped.manifest.notes == {"ids of token replaced by 4": 1}
    with pytest.raises(UsageError, match="map_oov = 10 is not an id of the vocabulary"):
        quick_build("select", tmp_path / "p", tmp_path / "d", map_oov="10")
    with pytest.raises(TokmillError, match="the vocabulary has no 'pad' token"):
        quick_build("select", tmp_path / "p", tmp_path / "d", map_oov="pad")


def test_phrases_are_selected_with_their_table(tmp_path: Path) -> None:
    table = {"asm": [[1, 2], [3], [4]], "type": [[0, 1], [1], [1]]}
    rows = [
        {"phrases": [(0, True), (1, False)], "side": [0, 1, 0], "address": 5},
        {"phrases": [(2, False)], "side": [1], "address": 6},
        {"phrases": [(1, True), (0, True)], "side": [1, 0, 0], "address": 7},
    ]
    write_store(tmp_path / "p", PHRASES, [rows], table=table)
    store = quick_build("select", tmp_path / "p", tmp_path / "s", where=["length == 3"])
    assert [int(r["address"]) for r in store] == [5, 7]
    for record, row in zip(store, (rows[0], rows[2]), strict=True):
        for name, wanted in {**expand(table, row), "side": row["side"]}.items():
            assert record[name].tolist() == wanted
    assert store.shard(0)["table.asm"].tolist() == [1, 2, 3]


def test_function_hash_draws_what_is_equal_together(tmp_path: Path) -> None:
    rows = [[n % 9, n % 4] for n in range(200)]
    make(
        tmp_path / "p",
        [rec(t, name="", level=i, score=0, vector=[0, 0]) for i, t in enumerate(rows)],
    )
    sides = []
    for by in ("function-hash", ""):
        parts = [
            quick_build(
                "select",
                tmp_path / "p",
                tmp_path / f"{by}{rest}",
                ratio=0.5,
                seed=2,
                by=by,
                rest=rest,
            )
            for rest in (False, True)
        ]
        sides.append([levels(part) for part in parts])
        groups = [{tuple(r["token"].tolist()) for r in part} for part in parts]
        assert groups[0] and groups[1] and not groups[0] & groups[1]
    assert sides[0] == sides[1]
    assert sorted(sides[0][0] + sides[0][1]) == list(range(200))


def share_of(capsys: pytest.CaptureFixture[str], parent: Path, out: Path, **options: Any) -> str:
    """What a selection tells of the share that it drew, in a note or in an error."""
    how = How(amount=here())
    try:
        quick_build("select", parent, out, how=how, **options)
    except TokmillError as error:
        return error.hint or ""
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    return "".join(notes).removeprefix("note: ")


def test_a_share_that_groups_make_impossible_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = lambda i, name: rec([i], name=name, level=i % 2, score=0, vector=[0, 0])  # noqa: E731
    one, three = tmp_path / "one", tmp_path / "three"
    make(one, [row(i % 10, "only") for i in range(50)])
    make(three, [row(i % 10, "abc"[i // 20]) for i in range(60)])
    told = share_of(capsys, one, tmp_path / "a", ratio=0.6, by="name")
    rest = share_of(capsys, one, tmp_path / "b", ratio=0.6, by="name", rest=True)
    why = "records with an equal 'name' are drawn together, and it has one value here, so no share"
    # All or nothing, whichever it is: both builds say the same.
    assert told.startswith(f"100 % of 50 records were drawn, not 60 %: {why}")
    assert rest.startswith(f"0 % of 50 records were drawn, not 40 %: {why}")
    shares = set()
    for seed in range(6):
        out = tmp_path / f"three {seed}"
        told = share_of(capsys, three, out, ratio=0.5, by="name", seed=seed)
        names = (
            {record["name"] for record in Store(out)} if (out / "manifest.json").exists() else ()
        )
        shares.add(len(names))
        wanted = f"{100 * len(names) / 3:.3g} % of 60 records were drawn, not 50 %"
        assert told.startswith(wanted) and "has 3 values here" in told
    assert len(shares) > 1
    # A condition before the draw is not a part of the share.
    told = share_of(capsys, one, tmp_path / "c", ratio=0.6, by="name", where=["level == 0"])
    assert told.startswith("100 % of 25 records were drawn, not 60 %")
    assert not share_of(capsys, three, tmp_path / "d", ratio=0.5, where=["level < 2"])


def test_chance_alone_is_no_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = lambda i: rec([i], name="", level=i, score=0, vector=[0, 0])  # noqa: E731
    make(tmp_path / "p", [row(i) for i in range(8)])
    make(
        tmp_path / "equal", [rec([1], name="", level=i, score=0, vector=[0, 0]) for i in range(90)]
    )
    for seed in range(8):
        told = share_of(capsys, tmp_path / "p", tmp_path / f"{seed}", ratio=0.5, seed=seed)
        assert not told or told.startswith("no record meets all conditions")
    told = share_of(capsys, tmp_path / "equal", tmp_path / "e", ratio=0.5)
    assert "records with equal tokens are drawn together" in told
    # A draw of a draw with the same seed is no new one.
    many = [rec([i % 10, i // 10 % 10, i // 100], name="", level=i, score=0, vector=[0, 0])
            for i in range(300)]  # fmt: skip
    make(tmp_path / "many", many)
    half = quick_build("select", tmp_path / "many", tmp_path / "half", ratio=0.5)
    told = share_of(capsys, half.path, tmp_path / "again", ratio=0.5)
    assert told.startswith(f"100 % of {len(half)} records") and "needs another --seed" in told
    assert not share_of(capsys, half.path, tmp_path / "new", ratio=0.5, seed=1)
