"""Lists of tokens in files of three forms, and in the two older arrangements."""

import pickle
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tokmill.base.errors import TokmillError, UsageError
from tokmill.x86.commands.vocab_lists import write_lists
from tokmill.x86.tokens.rules import COLUMNS
from tokmill.x86.tokens.vocabularies.vocabulary import (
    SPECIALS,
    TokenList,
    check_target,
    closed,
    counted,
    find_lists,
    is_vocabulary,
    read_list,
    read_vocabularies,
    write_vocabularies,
)

COUNTS = {column: {"b": 3, "a": 1, "[PAD]": 2} for column in COLUMNS}


def lists() -> dict[str, TokenList]:
    return counted(COUNTS, "semanticbbv")


def text(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def pickled(path: Path, value: Any) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


def test_the_frozen_form_comes_back(tmp_path: Path) -> None:
    write_vocabularies(tmp_path, lists())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{c}.json" for c in COLUMNS)
    for rules in (None, "semanticbbv"):
        found = read_vocabularies(tmp_path, rules)
        assert list(found) == list(COLUMNS)
        for column, tokens in lists().items():
            assert (found[column].tokens, found[column].counts) == (tokens.tokens, tokens.counts)


def test_text_has_a_token_a_line_in_the_order_of_ids(tmp_path: Path) -> None:
    write_lists(tmp_path, lists())
    lines = (tmp_path / "eflag_tokens.txt").read_text().split("\n")
    assert lines == [*SPECIALS, "a", "b", ""]
    found = read_vocabularies(tmp_path)
    assert found["eflag"].tokens == [*SPECIALS, "a", "b"]
    assert (found["eflag"].rules, found["eflag"].counts) == ("semanticbbv", None)
    assert read_vocabularies(tmp_path, "tokmill")["eflag"].rules == "tokmill"


def test_pickles_hold_what_stood_and_python_reads_them(tmp_path: Path) -> None:
    large = lists()
    for tokens in large.values():
        tokens.counts = [5, 0, 0, 0, 0, 127, 1 << 40]
    first, *_ = write_lists(tmp_path, large, "pkl")
    assert first.name == "asm_tokens_dict.pkl"
    read = pickle.loads(first.read_bytes())  # noqa: S301
    assert read == {"[PAD]": 5, "a": 127, "b": 1 << 40}
    found = read_vocabularies(tmp_path)["asm"]
    assert (found.tokens, found.counts) == (large["asm"].tokens, large["asm"].counts)
    assert read_list(first).ids is None
    with pytest.raises(TokmillError, match="asm has no counts"):
        write_lists(tmp_path, closed(), "pkl")


@pytest.mark.parametrize(
    ("lines", "convention", "ids"),
    [
        ([*SPECIALS, "b", "a"], "five special tokens first", [0, 1, 2, 3, 4, 5, 6]),
        (["[PAD]", "b", "a"], "[PAD] alone first", [0, 6, 5]),
        (["b", "a"], "no special tokens", [6, 5]),
        (["[PAD]", "[UNK]", "b"], "[PAD] [UNK] not at the beginning", [0, 3, 5]),
        (["[SEP]", "[PAD]", "[CLS]", "[UNK]", "[MASK]"],
         "[PAD] [SEP] [CLS] [UNK] [MASK] not at the beginning", [1, 0, 2, 3, 4]),
    ],
)  # fmt: skip
def test_how_a_text_was_arranged(
    tmp_path: Path, lines: list[str], convention: str, ids: list[int]
) -> None:
    found = read_list(text(tmp_path / "assemble_tokens.txt", *lines))
    assert (found.tokens.column, found.convention, found.ids) == ("asm", convention, ids)
    assert found.renumbered == (convention != "five special tokens first")
    # Where the five come first the file's order is the order of ids, sorted or not.
    assert [found.tokens.tokens[i] for i in ids] == lines
    assert tuple(found.tokens.tokens[:5]) == SPECIALS


def test_a_pickle_of_ids_keeps_them(tmp_path: Path) -> None:
    ids = {token: number for number, token in enumerate([*SPECIALS, "z", "a"])}
    found = read_list(pickled(tmp_path / "reg_tokens_dict.pkl", ids))
    assert found.tokens.tokens == [*SPECIALS, "z", "a"] and not found.renumbered
    old = read_list(pickled(tmp_path / "rw_tokens_dict.pkl", {"[PAD]": 0, "z": 1, "a": 2}))
    assert (old.convention, old.ids) == ("[PAD] alone first", [0, 6, 5])


@pytest.mark.parametrize(
    "value",
    [{"a": 3, "b": 3}, Counter("aaabbb"), defaultdict(int, a=3, b=3), ["b", "a"], {"a", "b"}],
)
def test_pickles_of_the_usual_containers(tmp_path: Path, value: Any) -> None:
    found = read_list(pickled(tmp_path / "mne_tokens_dict.pkl", value))
    assert found.tokens.tokens == [*SPECIALS, "a", "b"]
    expected = [0, 0, 0, 0, 0, 3, 3] if isinstance(value, dict) else None
    assert found.tokens.counts == expected


@pytest.mark.parametrize(
    "value",
    [
        {"a": -1},
        {"a": "1"},
        {1: 1},
        {"a": True},
        {},
        [1],
        7,
        {"\ud800": 1},
        {"a": 1 << 63},
        {1, "a"},
    ],
)
def test_pickles_of_something_else(tmp_path: Path, value: Any) -> None:
    path = pickled(tmp_path / "asm_tokens_dict.pkl", value)
    with pytest.raises(
        TokmillError, match=r"asm_tokens_dict\.pkl: the pickle is not .token: frequency."
    ):
        read_list(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\n\nb\n", "asm_tokens.txt:2: the line is empty"),
        (b"a\n\xff\n", "asm_tokens.txt, byte 2: the text is not UTF-8"),
    ],
)
def test_texts_that_are_no_list(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "asm_tokens.txt").write_bytes(content)
    with pytest.raises(TokmillError) as caught:
        read_list(tmp_path / "asm_tokens.txt")
    assert message in str(caught.value)


def test_ends_of_lines_and_marks_of_other_systems(tmp_path: Path) -> None:
    (tmp_path / "asm_tokens.txt").write_bytes(b"\xef\xbb\xbf[PAD]\r\nb\r\na")
    assert read_list(tmp_path / "asm_tokens.txt").ids == [0, 6, 5]
    # White space around a token is none of it: no token that was cut from code holds any.
    (tmp_path / "asm_tokens.txt").write_bytes(b"[PAD]\nb \n\ta\n")
    assert read_list(tmp_path / "asm_tokens.txt").tokens.tokens[5:] == ["a", "b"]


def test_ids_of_the_text_and_counts_of_the_pickle(tmp_path: Path) -> None:
    text(tmp_path / "asm_tokens.txt", *SPECIALS, "b", "a", "never")
    pickled(tmp_path / "asm_tokens_dict.pkl", {"a": 7, "b": 9})
    found = find_lists(tmp_path)["asm"].tokens
    assert found.tokens[5:] == ["b", "a", "never"] and found.counts == [0, 0, 0, 0, 0, 9, 7, 0]


def test_what_a_folder_lacks(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="no such folder"):
        read_vocabularies(tmp_path / "none")
    with pytest.raises(TokmillError, match="no x86 vocabulary"):
        read_vocabularies(tmp_path)
    assert not is_vocabulary(tmp_path)
    text(tmp_path / "asm_tokens.txt", "a")
    assert is_vocabulary(tmp_path) and list(find_lists(tmp_path)) == ["asm"]
    with pytest.raises(TokmillError, match="mne, type, reg, rw, eflag are missing"):
        read_vocabularies(tmp_path)


def test_rules_must_agree(tmp_path: Path) -> None:
    write_vocabularies(tmp_path, lists())
    with pytest.raises(TokmillError, match="is for the rules semanticbbv, not tokmill"):
        read_vocabularies(tmp_path, "tokmill")
    with pytest.raises(UsageError, match="no rules are called 'tokmil'") as caught:
        read_vocabularies(tmp_path, "tokmil")
    assert caught.value.hint == "did you mean 'tokmill'?"
    (tmp_path / "asm.json").write_bytes(closed()["asm"].to_json())
    with pytest.raises(TokmillError, match="different rules: semanticbbv, tokmill"):
        read_vocabularies(tmp_path)


def test_a_list_under_the_name_of_another_column(tmp_path: Path) -> None:
    write_vocabularies(tmp_path, lists())
    (tmp_path / "asm.json").write_bytes((tmp_path / "rw.json").read_bytes())
    with pytest.raises(TokmillError, match="of the column rw, not asm"):
        read_vocabularies(tmp_path)


def test_names_that_say_nothing(tmp_path: Path) -> None:
    path = text(tmp_path / "words.txt", "a")
    with pytest.raises(UsageError, match="does not contain the column"):
        read_list(path)
    assert read_list(path, column="reg").tokens.column == "reg"
    with pytest.raises(TokmillError, match="not that of a list"):
        read_list(text(tmp_path / "words.csv", "a"))
    with pytest.raises(TokmillError, match="no such file"):
        read_list(tmp_path / "asm_tokens.txt")


def test_a_token_that_no_line_can_hold(tmp_path: Path) -> None:
    made = {"asm": TokenList.of("asm", "semanticbbv", ["a\nb"])}
    with pytest.raises(TokmillError, match="written as a line"):
        write_lists(tmp_path, made)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_written_into_holds_lists_of_the_same_rules(tmp_path: Path) -> None:
    folder = tmp_path / "lists"
    check_target(folder, "tokmill")
    write_vocabularies(folder, closed())
    check_target(folder, "tokmill")
    with pytest.raises(
        TokmillError, match="a vocabulary of the rules tokmill, not semanticbbv"
    ) as raised:
        check_target(folder, "semanticbbv")
    assert "another folder" in raised.value.hint
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(TokmillError, match=r"other files than a vocabulary: notes\.txt"):
        check_target(folder, "tokmill")
    with pytest.raises(TokmillError, match="not a folder"):
        check_target(folder / "notes.txt", "tokmill")


def test_lists_of_other_scripts_are_not_replaced(tmp_path: Path) -> None:
    """They are called as ours are, and look the same."""
    mine = tmp_path / "asm_tokens.txt"
    mine.write_text("[PAD]\n")
    with pytest.raises(UsageError, match="would be replaced"):
        write_lists(tmp_path, closed() | lists())
    assert mine.read_text() == "[PAD]\n" and [*tmp_path.iterdir()] == [mine]
    mine.unlink()
    write_lists(tmp_path, lists())
    write_lists(tmp_path, lists())
