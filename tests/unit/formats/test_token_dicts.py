"""Pickles of token dicts: read into stores, written from them, refused where they are not."""

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from making import files_of, quick_build, token_store
from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.source import Resources
from tokmill.report.describe.pickles import lengths_of_pickle
from tokmill.store.checks.validate import validate
from tokmill.store.schema import Column
from tokmill.store.store import Store
from tokmill.x86.tokens.rules import tokenize_bytes
from tokmill.x86.tokens.vocabularies.vocabulary import SPECIALS, TokenList, closed

COLUMNS = ("asm", "mne", "type", "reg", "rw", "eflag")
PUSH = {
    "asm": ["PUSH", "RBP"], "mne": "PUSH", "type": [("[PAD]", 1), ("R64_OPCODE", 1)],
    "reg": ["RSP", "RBP"], "rw": [("READ_WRITE", 1), ("READ", 1)], "eflag": "[PAD]",
}  # fmt: skip
RET = {
    "asm": ["RET"], "mne": "RET", "type": [("[PAD]", 1)], "reg": ["RSP"],
    "rw": [("READ_WRITE", 1)], "eflag": "[PAD]",
}  # fmt: skip
MOV = {
    "asm": ["MOV", "EAX", "RBP", "-", "IMM"], "mne": "MOV",
    "type": [("[PAD]", 1), ("R32_REG", 1), ("R32_OR_MEM", 3)],
    "reg": ["[PAD]", "RAX", "RBP", "[PAD]", "[PAD]"],
    "rw": [("[PAD]", 1), ("WRITE", 1), ("READ", 3)], "eflag": "READ_CF,WRITTEN_ZF",
}  # fmt: skip


def put(path: Path, value: Any, protocol: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def export(store: Store, out: Path, **options: Any) -> dict[str, Any]:
    part = plugins.load(plugins.EXPORTS, "token-dicts")
    found: dict[str, Any] = part(part.Config(**options)).write(store, out)
    return found


def plain(path: Path | str) -> Any:
    return pickle.loads(Path(path).read_bytes())  # noqa: S301


def names(store: Store) -> dict[str, list[str]]:
    return {c: json.loads(store.vocabulary_file(c).read_bytes())["tokens"] for c in COLUMNS}


def test_levels_of_functions(tmp_path: Path) -> None:
    """`*_blame.pkl`: a list of {level: [sequence]} or {level: sequence}; and the same by name."""
    first = {"O0": [[PUSH, MOV, RET], [PUSH]], "O3": [[MOV, RET]]}
    single = {"O0": [PUSH, MOV, RET], "O3": [], "Og": [MOV]}
    values = {
        "list": [first, {"Os": [[RET]], "O1": []}, single],
        "dict": {"main": first, "use": [[RET], [MOV]], "one": [PUSH, RET], "more": single},
        "alone": single, "levels": first,
    }  # fmt: skip
    wanted = {
        "list": [
            ("0", "O0", 0), ("0", "O0", 1), ("0", "O3", 0), ("1", "Os", 0),
            ("2", "O0", 0), ("2", "Og", 0),
        ],
        "dict": [
            ("main", "O0", 0), ("main", "O0", 1), ("main", "O3", 0),
            ("use", "", 0), ("use", "", 1), ("one", "", 0), ("more", "O0", 0), ("more", "Og", 0),
        ],
        "alone": [("", "O0", 0), ("", "Og", 0)],
        "levels": [("", "O0", 0), ("", "O0", 1), ("", "O3", 0)],
    }  # fmt: skip
    for name, value in values.items():
        path = put(tmp_path / name / "x_blame.pkl", value)
        store = quick_build("token-dicts", path, tmp_path / name / "store")
        keys = [(record["function"], record["level"], record["variant"]) for record in store]
        assert keys == wanted[name]
        assert shown(store)[-1] == aligned([MOV, RET] if name == "levels" else [MOV])
        # `inspect`, `plot lengths` and a build see the same sequences, but for empty ones.
        unit, lengths = lengths_of_pickle(path)
        assert unit == "tokens" and lengths[lengths > 0].tolist() == [len(r["asm"]) for r in store]


@pytest.mark.parametrize("files", [0, 2])
def test_levels_go_in_and_come_out(tmp_path: Path, files: int) -> None:
    functions = {
        "main": {"O0": [[PUSH, MOV, RET], [PUSH]], "O3": [[MOV, RET]]},
        "use": {"O3": [[RET]], "O0": [[MOV], [RET, MOV]]},
        "no level": [[PUSH], [RET]],
    }
    store = quick_build("token-dicts", put(tmp_path / "a.pkl", functions), tmp_path / "s")
    found = export(store, tmp_path / "b.pkl", key="function,level", sequences_per_file=files)
    assert len(found["files"]) == (files or 1) and "note" not in found
    assert {k: v for path in found["files"] for k, v in plain(path).items()} == functions
    again = quick_build("token-dicts", found["files"], tmp_path / "t")
    assert shown(again) == shown(store)
    by_level = export(store, tmp_path / "c.pkl", key="level,function")
    assert plain(by_level["files"][0])["O3"] == {"main": [[MOV, RET]], "use": [[RET]]}
    # What would be lost is said.
    for key in ("function", ""):
        said = export(store, tmp_path / f"{key}d.pkl", key=key)["note"]
        assert "levels of sequences (O0, O3) are not in the file" in said
        assert "--key function,level" in said
    flat = quick_build("select", store.path, tmp_path / "u", where=("function = no level",))
    assert "note" not in export(flat, tmp_path / "e.pkl")
    with pytest.raises(UsageError, match="no column 'levels' of strings"):
        export(store, tmp_path / "f.pkl", key="function,levels")


def shown(store: Store) -> list[dict[str, Any]]:
    """Records with tokens in place of ids."""
    tokens = names(store)
    return [
        {c: [tokens[c][i] for i in record[c]] for c in COLUMNS}
        | {"border": record["border"].tolist()}
        for record in store
    ]


def aligned(sequence: list[dict[str, Any]], end: list[str] | None = None) -> dict[str, Any]:
    """What a record of a sequence should be, by hand."""
    found: dict[str, list[Any]] = {column: [] for column in (*COLUMNS, "border")}
    for instruction in sequence:
        for column in COLUMNS:
            value = instruction[column]
            if column in ("mne", "eflag"):
                value = [value] * len(instruction["asm"])
            elif column in ("type", "rw"):
                value = [name for name, run in value for _ in range(run)]
            found[column] += value + (end or [])
        length = len(instruction["asm"]) + len(end or [])
        found["border"] += [1] + [0] * (length - 1)
    return found


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_list_of_sequences(tmp_path: Path, protocol: int) -> None:
    sequences = [[PUSH, MOV, RET], [], [RET], [MOV, MOV, PUSH]]
    path = put(tmp_path / "saved_tokens.pkl", sequences, protocol)
    store = quick_build("token-dicts", path, tmp_path / "s")
    assert shown(store) == [aligned(s) for s in sequences if s]
    assert store.manifest.skipped == {"empty": 1} and validate(store).ok
    assert [store.record(i)["function"] for i in range(3)] == ["", "", ""]
    assert store.schema["asm"] == Column("u1", phrase=True, vocab="asm")
    for column, tokens in names(store).items():
        assert tuple(tokens[:5]) == SPECIALS and tokens[5:] == sorted(tokens[5:])
        assert store.vocabularies[column].roles["sep"] == 1
    listed = TokenList.from_json(store.vocabulary_file("reg").read_bytes())
    counts = dict(zip(listed.tokens, listed.counts or [], strict=True))
    # Aligned: once a token of `asm`.
    assert counts == {
        "[PAD]": 9, "[SEP]": 0, "[CLS]": 0, "[UNK]": 0, "[MASK]": 0, "RSP": 4, "RBP": 5, "RAX": 3,
    }  # fmt: skip
    # Each instruction is in the table once.
    assert len(store.shard(0)["table_offsets"]) == 1 + 3


def merged(sequence: list[Any]) -> list[dict[str, Any]]:
    """Token dicts whose neighbouring equal runs are one."""

    def merge(runs: list[tuple[str, int]]) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for name, run in runs:
            if found and found[-1][0] == name:
                run += found.pop()[1]
            found.append((name, run))
        return found

    return [{**d, "type": merge(d["type"]), "rw": merge(d["rw"])} for d in sequence]


@st.composite
def instructions(draw: Any) -> dict[str, Any]:
    count = draw(st.integers(1, 4))
    name = st.sampled_from(["A", "B", "é", "[PAD]", "READ_WRITE", "x" * 300, "\n"])

    def runs() -> list[tuple[str, int]]:
        values = draw(st.lists(name, min_size=count, max_size=count))
        return [(value, 1) for value in values]

    return {
        "asm": draw(st.lists(name, min_size=count, max_size=count)), "mne": draw(name),
        "type": runs(), "reg": draw(st.lists(name, min_size=count, max_size=count)),
        "rw": runs(), "eflag": draw(name),
    }  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    functions=st.dictionaries(
        st.text(max_size=3), st.lists(st.lists(instructions(), max_size=4), max_size=3), max_size=4
    ),
    protocol=st.integers(0, 5),
)
def test_a_round_trip(functions: dict[str, Any], protocol: int) -> None:
    assume(any(row for rows in functions.values() for row in rows))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = quick_build("token-dicts", put(folder / "a.pkl", functions, protocol), folder / "s")
        export(store, folder / "b.pkl", key="function")
        export(store, folder / "c.pkl")
        kept = {key: [merged(s) for s in rows if s] for key, rows in functions.items()}
        assert plain(folder / "b.pkl") == {key: rows for key, rows in kept.items() if rows}
        assert plain(folder / "c.pkl") == [row for rows in kept.values() for row in rows]
        again = quick_build("token-dicts", folder / "b.pkl", folder / "t")
        assert shown(again) == shown(store)
        assert names(again) == names(store)


def test_python_reads_what_is_written_as_if_written_by_python(tmp_path: Path) -> None:
    sequences = [[PUSH, MOV, RET] * 3] * 2500
    store = quick_build("token-dicts", put(tmp_path / "a.pkl", sequences), tmp_path / "s")
    written = export(store, tmp_path / "b.pkl")
    found = plain(tmp_path / "b.pkl")
    assert found == sequences
    # A script may change one instruction, and changes no other by it.
    assert found[0][0] is not found[0][3] and found[0][0]["asm"] is not found[0][3]["asm"]
    # But strings are there once.
    assert found[0][0]["asm"][1] is found[9][3]["asm"][1]
    assert {type(value) for value in found[0][0].values()} == {list, str}
    assert written["sequences"] == 2500 and written["tokens"] == store.tokens
    assert written["bytes"] == (tmp_path / "b.pkl").stat().st_size
    assert list(found[0][0]) == list(COLUMNS)


def test_files_in_chunks(tmp_path: Path) -> None:
    functions = {f"f{i}": [[PUSH] * (i + 1), [RET]] for i in range(5)}
    store = quick_build("token-dicts", put(tmp_path / "a.pkl", functions), tmp_path / "s")
    lists = export(store, tmp_path / "l", sequences_per_file=4, name="merged_tokens")
    expected = [tmp_path / f"l/merged_tokens_{i}.pkl" for i in range(3)]
    assert lists["files"] == [str(path) for path in expected]
    rows = [row for rows in functions.values() for row in rows]
    assert [plain(path) for path in expected] == [rows[:4], rows[4:8], rows[8:]]
    dicts = export(store, tmp_path / "d", sequences_per_file=2, key="function")
    assert [list(plain(path)) for path in dicts["files"]] == [["f0", "f1"], ["f2", "f3"], ["f4"]]
    assert {k: v for path in dicts["files"] for k, v in plain(path).items()} == functions
    with pytest.raises(TokmillError, match=r"holds tokens_\*.pkl files of another"):
        export(store, tmp_path / "d", sequences_per_file=2)
    # A folder of chunks is one input, whose files are read by name.
    again = quick_build("token-dicts", tmp_path / "l", tmp_path / "t")
    assert shown(again) == shown(store)
    assert export(store, tmp_path / "folder")["files"] == [str(tmp_path / "folder/tokens.pkl")]


def test_a_separator_is_put_behind_each_instruction_and_left_out_again(tmp_path: Path) -> None:
    path = put(tmp_path / "a.pkl", [[PUSH, RET]])
    store = quick_build("token-dicts", path, tmp_path / "s", separator=True)
    assert shown(store) == [aligned([PUSH, RET], ["[SEP]"])]
    export(store, tmp_path / "b.pkl")
    assert plain(tmp_path / "b.pkl") == [[PUSH, RET]]


def test_given_vocabularies(tmp_path: Path) -> None:
    path = put(tmp_path / "a.pkl", [[PUSH, RET]])
    first = quick_build("token-dicts", path, tmp_path / "s")
    other = put(tmp_path / "b.pkl", [[RET, MOV]])
    vocab = str(tmp_path / "s/vocab")
    store = quick_build("token-dicts", other, tmp_path / "t", vocab=vocab)
    assert store.vocabularies == first.vocabularies
    unknown = shown(store)[0]["asm"]
    assert unknown == ["RET", "[UNK]", "[UNK]", "RBP", "[UNK]", "[UNK]"]
    assert store.manifest.notes == {
        "tokens of asm replaced by unk": 4, "tokens of eflag replaced by unk": 5,
        "tokens of mne replaced by unk": 5, "tokens of reg replaced by unk": 1,
        "tokens of rw replaced by unk": 1, "tokens of type replaced by unk": 4,
    }  # fmt: skip
    with pytest.raises(TokmillError, match="no x86 vocabulary"):
        quick_build("token-dicts", other, tmp_path / "u", vocab=str(tmp_path))
    (tmp_path / "asm.json").write_text("{}")
    with pytest.raises(TokmillError, match="not a vocabulary of an x86 column"):
        quick_build("token-dicts", other, tmp_path / "u", vocab=str(tmp_path))
    with pytest.raises(UsageError, match="have no tokenizer"):
        quick_build("token-dicts", other, tmp_path / "u", tokenizer="t.json")


def test_the_closed_vocabularies_know_all_tokens_of_their_rules(tmp_path: Path) -> None:
    for column, tokens in closed().items():
        (tmp_path / f"{column}.json").write_bytes(tokens.to_json())
    path = put(tmp_path / "a.pkl", [tokenize_bytes(bytes.fromhex("554889e5c3"), 0, "tokmill")])
    store = quick_build("token-dicts", path, tmp_path / "s", vocab=str(tmp_path))
    assert store.manifest.notes == {} and store.schema["asm"].dtype == "u2"


def test_dicts_of_other_rules_are_refused(tmp_path: Path) -> None:
    code = bytes.fromhex("554889e5c3")
    for rules, other in (("tokmill", "semanticbbv"), ("semanticbbv", "tokmill")):
        path = put(tmp_path / f"{rules}.pkl", [tokenize_bytes(code, 0, rules)])
        with pytest.raises(UsageError, match=f"only the rules {rules} make") as error:
            quick_build("token-dicts", path, tmp_path / "s", rules=other)
        assert error.value.hint == f"--rules {rules}"


def test_rare_tokens_become_unknown(tmp_path: Path) -> None:
    path = put(tmp_path / "a.pkl", [[PUSH, PUSH, RET]])
    store = quick_build("token-dicts", path, tmp_path / "s", min_count=2)
    with pytest.raises(UsageError, match="tokens that are counted"):
        quick_build("token-dicts", path, tmp_path / "u", min_count=2, vocab=str(tmp_path / "s"))
    assert shown(store)[0]["asm"] == ["PUSH", "RBP", "PUSH", "RBP", "[UNK]"]
    count = 70_000
    long = {**RET, "asm": [f"a{i}" for i in range(count)], "reg": ["RSP"] * count}
    long |= {name: [("x", 200)] * (count // 200) for name in ("type", "rw")}
    store = quick_build(
        "token-dicts", put(tmp_path / "b.pkl", [[long]]), tmp_path / "t", min_count=2
    )
    assert store.manifest.notes["tokens of asm replaced by unk"] == count


def test_neither_blocks_nor_parts_change_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[PUSH] * (i % 7) + [MOV, RET] * (i % 3) for i in range(400)]
    path = put(tmp_path / "a.pkl", rows)
    whole = quick_build("token-dicts", path, tmp_path / "whole")
    for block in (1, 1000):
        monkeypatch.setattr(
            "tokmill.builds.build.choose",
            lambda amount, tasks, b=block: (0, Resources(block_bytes=b)),
        )
        store = quick_build("token-dicts", path, tmp_path / f"b{block}")
        assert files_of(store.path) == files_of(whole.path)
    size = path.stat().st_size
    monkeypatch.setattr("tokmill.builds.source.MAX_ITEM", size // 3)
    parts = quick_build("token-dicts", path, tmp_path / "parts")
    assert len(parts.shards) == 3 and shown(parts) == shown(whole)
    assert sum(item.bytes for i in range(3) for item in parts.receipt(i).items) == size
    monkeypatch.setattr("tokmill.formats.pickles.token_dicts.MOST_PHRASES", 1)
    assert shown(quick_build("token-dicts", path, tmp_path / "anew")) == shown(whole)
    # A part that is lost is made again, and is what it was.
    before = files_of(parts.path)
    for file in (parts.path / "shards").glob(f"{parts.shards[1].name}*"):
        file.unlink()
    (parts.path / "manifest.json").unlink()
    quick_build("token-dicts", path, tmp_path / "parts")
    assert files_of(parts.path) == before


def changed(**values: Any) -> list[Any]:
    return [[PUSH], [RET, {**PUSH, **values}]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (changed(reg=["RSP"]), "1 entries of reg for 2 tokens"),
        (changed(type=[("[PAD]", 1)]), "1 entries of type for 2 tokens"),
        (changed(rw=[("[PAD]", 3)]), "3 entries of rw for 2 tokens"),
        (changed(asm=[], reg=[], type=[("A", 0)], rw=[("A", 0)]), "0 entries of asm for 0 tokens"),
        (changed(asm=["A", "\ud800"]), "surrogates not allowed"),
        (changed(asm=[1, 2]), "expected str instance, int found"),
        (changed(mne=["PUSH"]), "expected str instance, list found"),
        (changed(type=[("[PAD]", 1), ("A", "1")]), "cannot be interpreted as an integer"),
        (changed(type=[("[PAD]", 1), ("A", 1 << 40)]), "must be in range"),
        (changed(rw=["READ", "READ"]), "is longer|too many|unpack"),
        ([[PUSH], [RET, {"asm": ["A"]}]], "'reg' is missing"),
        ([[PUSH], [RET, 5]], "not subscriptable"),
        (changed(asm={"PUSH", "RBP"}), "not all lists"),
        (changed(reg="ab"), "not all lists"),
        (changed(type={("A", 2): 1}), "not all lists"),
    ],
)
def test_instructions_that_do_not_fit(tmp_path: Path, value: Any, message: str) -> None:
    path = put(tmp_path / "a.pkl", value)
    with pytest.raises(TokmillError, match=message) as caught:
        quick_build("token-dicts", path, tmp_path / "s")
    assert caught.value.where == f"{path}, sequence 1, instruction 1"
    assert "inspect" in caught.value.hint


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["text"], "it is a str, not a list of token dicts"),
        ([{"asm": [1], "mne": [2]}], "it is a dict of ids, not a list of token dicts"),
        ({"f": [{"asm": [1], "mne": [2]}]}, "it is a dict of ids, not a list of token dicts"),
        ([PUSH, RET], "it is one token dict, not a list of token dicts"),
        ([{"asm": ["A"]}], "it is a dict, not a list of token dicts"),
        ({"f": {"asm": []}}, "'f' holds a dict, not a list"),
        ({"f": [5]}, "it is a int, not a list of token dicts"),
        ({5: [PUSH]}, "a int is a key"),
        ({b"f": [PUSH]}, "a bytes is a key"),
        ({"f": {2: [PUSH]}}, "'f' holds a dict, not a list"),
        ((1, 2), "holds a tuple, not a dict or a list"),
    ],
)
def test_files_of_something_else(tmp_path: Path, value: Any, message: str) -> None:
    path = put(tmp_path / "a.pkl", value)
    with pytest.raises(TokmillError, match=message) as caught:
        quick_build("token-dicts", path, tmp_path / "s")
    assert str(path) in caught.value.where


def test_a_sequence_that_is_there_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokmill.base.unpickle.inert.SPARE", 1 << 16)
    path = put(tmp_path / "a.pkl", [[PUSH] * 1000] * 1000)
    with pytest.raises(TokmillError, match="makes far more data than"):
        quick_build("token-dicts", path, tmp_path / "s")


def test_stores_without_instructions_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the store has no instructions: asm, mne"):
        export(token_store(tmp_path / "t", [[[1]]]), tmp_path / "o.pkl")
    store = quick_build("token-dicts", put(tmp_path / "a.pkl", [[PUSH]]), tmp_path / "s")
    with pytest.raises(UsageError, match="no column 'functions' of strings") as caught:
        export(store, tmp_path / "o.pkl", key="functions")
    assert "did you mean 'function'?" in caught.value.hint


def test_records_of_several_shards_are_written_in_order(tmp_path: Path) -> None:
    for name, rows in {"a": [[PUSH], [MOV]], "b": [[RET, MOV]]}.items():
        put(tmp_path / f"in/{name}.pkl", rows * 40)
    store = quick_build("token-dicts", tmp_path / "in", tmp_path / "s")
    half = quick_build("select", store.path, tmp_path / "h", ratio=0.5, seed=1)
    for one in (store, half):
        export(one, tmp_path / f"{one.records}.pkl")
        found = plain(tmp_path / f"{one.records}.pkl")
        assert [aligned(sequence) for sequence in found] == shown(one)
    assert np.sum([len(record["asm"]) for record in half]) == half.tokens
