"""Prompts from files."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokmill.base.errors import TokmillError, UsageError
from tokmill.inference import prompts
from tokmill.inference.coders import parse_ids
from tokmill.inference.prompts import Prompts


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes('one\r\n\n  two \n   \n{"prompt": 1}\nüber'.encode())
    found = Prompts(str(path))
    assert list(found) == ["one", "  two ", '{"prompt": 1}', "über"] == found.taken
    assert found.blank == 2


def test_stdin_and_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"1,2,3\n4 5\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert list(Prompts("-", as_ids=True)) == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"\xff\n", "not UTF-8: byte 0 is 0xff"),
        (b"x" * 2000, "more than 1,000 bytes"),
    ],
)
def test_a_wrong_line_is_named(
    tmp_path: Path, line: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "LONGEST", 1000 if line == b"x" * 2000 else 1 << 20)
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"fine\n" + line)
    with pytest.raises(UsageError, match=says) as error:
        list(Prompts(str(path)))
    assert error.value.where == f"{path}:2" and error.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(TokmillError) as error:
            list(Prompts(str(path)))
        assert error.value.hint


@given(st.binary(max_size=60))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(data)
    for as_ids in (False, True):
        try:
            found = list(Prompts(str(path), as_ids=as_ids))
        except UsageError as error:
            assert error.hint and error.where.startswith(f"{path}:")
        else:
            assert all(isinstance(one, list) or (one and not as_ids) for one in found if one)


@pytest.mark.parametrize("text", ["", "a", "1,-2", "1.5", "١", "9" * 19, "1;2", ","])
def test_what_are_no_ids(text: str) -> None:
    with pytest.raises(UsageError, match="not ids"):
        parse_ids(text)
    assert parse_ids("1, 2 3,") == [1, 2, 3]
