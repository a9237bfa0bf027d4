"""How often tokens of vocabularies stood, as a figure."""

import pickle
from pathlib import Path

import pytest

from tokmill.base.errors import TokmillError, UsageError
from tokmill.report.pages import figures
from tokmill.x86.tokens.rules import COLUMNS
from tokmill.x86.tokens.vocabularies.vocabulary import closed, counted, write_vocabularies

COUNTS = {column: {"a": 30, "b": 60, "c": 10} for column in COLUMNS} | {"reg": {"x": 1}}


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    write_vocabularies(tmp_path / "v", counted(COUNTS, "tokmill"))
    return tmp_path / "v"


def test_a_folder_a_file_and_a_pickle(tmp_path: Path, vocabulary: Path) -> None:
    (tmp_path / "any_name.pkl").write_bytes(pickle.dumps(COUNTS["asm"]))
    paths = [vocabulary, vocabulary / "asm.json", tmp_path / "any_name.pkl"]
    figure = figures.make("frequency", paths)
    assert (figure.log_x, figure.log_y) == (10, 10)
    assert [one.label for one in figure.series] == ["v", "asm.json", "any_name.pkl"]
    for one in figure.series:
        assert one.y.tolist() == [0.6, 0.3, 0.1] and one.x.tolist() == [1, 2, 3]
        assert one.more["tokens"].tolist() == [60, 30, 10]
        assert one.more["id"].tolist() == [6, 5, 7]


def test_another_column(vocabulary: Path) -> None:
    assert figures.make("frequency", [vocabulary], column="reg").series[0].y.tolist() == [1.0]
    with pytest.raises(UsageError, match="no list of 'rag'") as caught:
        figures.make("frequency", [vocabulary], column="rag")
    assert caught.value.hint == "did you mean 'reg'?"


def test_lists_without_counts(tmp_path: Path) -> None:
    write_vocabularies(tmp_path, closed())
    with pytest.raises(TokmillError, match="has no counts"):
        figures.make("frequency", [tmp_path])


def test_folders_that_hold_neither(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="no store"):
        figures.make("frequency", [tmp_path])
