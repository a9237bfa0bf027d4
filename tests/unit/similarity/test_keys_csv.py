"""A table of functions in a CSV file: what is read, and what is refused, with its line."""

from pathlib import Path

import pytest

from tokmill.base.errors import TokmillError
from tokmill.similarity.keys_csv import read_keys

HEAD = "project,function,compiler,level"


def read(tmp_path: Path, text: str | bytes) -> tuple[object, list[str]]:
    path = tmp_path / "keys.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_keys(path)


def test_columns_in_any_order(tmp_path: Path) -> None:
    text = '\ufefflevel,note,function,project,compiler,blocks,size,code\nO0,x,"a, b",p,gcc,7,,c\n\n'
    made, unread = read(tmp_path, text + "O3,,ü\u202e,p,gcc,,120,\nO3,,z,p,gcc,,,\n")
    assert unread == ["note", "size"]
    assert made.names["function"].names == ["a, b", "z", "ü\u202e"]
    assert made.text("function", 0) == "a, b" and made.text("program", 2) == ""
    assert made.blocks.tolist() == [7, -1, -1]
    assert made.code is not None and len(set(made.code.tolist())) == 3
    assert made.named.all() and made.record is None


def test_levels_are_written_as_options_too(tmp_path: Path) -> None:
    made, _ = read(tmp_path, f"{HEAD}\np,f,gcc,-O2\np,f,gcc,O3\n")
    assert made.names["level"].names == ["O2", "O3"]
    with pytest.raises(TokmillError, match="already"):
        read(tmp_path, f"{HEAD}\np,f,gcc,-O2\np,f,gcc,O2\n")


def test_many_lines(tmp_path: Path) -> None:
    lines = [f"p{i % 2},f{i % 5},gcc,O{i // 5}" for i in range(10)]
    made, _ = read(tmp_path, "\n".join([HEAD, *lines]))
    assert [made.text("function", i) for i in range(10)] == [f"f{i % 5}" for i in range(10)]
    assert made.code is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "keys.csv:1: the first line names no column 'project'"),
        ("\n\n\n", "keys.csv:1: the first line names no column 'project'"),
        ("project,function,compiler\n", "no column 'level'"),
        (HEAD + "\n", "keys.csv: the file has no functions"),
        (HEAD + ",level\n", "names the column 'level' twice"),
        (HEAD + "\np,f,gcc,O0\np,f,gcc\n", "keys.csv:3: the line has 3 cells"),
        (HEAD + "\np,f,gcc,O0,\n", "keys.csv:2: the line has 5 cells"),
        (HEAD + "\n\n\np,,gcc,O0\n", "keys.csv:4: the function is empty"),
        (HEAD + '\n"p\nq",f,gcc,O0\np,f,gcc,\n', "keys.csv:4: the level is empty"),
        (HEAD + '\np,"f"x,gcc,O0\n', "keys.csv:2: the line is not CSV"),
        (HEAD + '\np,"f,gcc,O0\n', "the line is not CSV"),
        (HEAD + ",blocks\np,f,gcc,O0,-1\n", "keys.csv:2: the number of blocks is '-1'"),
        (HEAD + ",blocks\np,f,gcc,O0,1e9\n", "keys.csv:2: the number of blocks is '1e9'"),
        (HEAD + ",blocks\np,f,gcc,O0,99999999999999999999\n", "the number of blocks is '9999"),
        (HEAD + ",blocks\np,f,gcc,O0,²\n", "the number of blocks is '²'"),
        (HEAD + "\np,f,gcc,O0\nq,f,gcc,O0\np,f,gcc,O0\n", "keys.csv:4: the function is in "
         "line 2 already"),
        (HEAD.encode() + b"\np,\xff,gcc,O0\n", "the text is not UTF-8"),
        (HEAD + "\np," + "x" * 200_000 + ",gcc,O0\n", "the line is not CSV: field larger"),
        (HEAD + "\n" + "\0" * (1 << 21), "keys.csv:2: the line has 1,048,576 characters or more"),
        (b"\x93NUMPY\x01\x00", "the text is not UTF-8"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str | bytes, what: str) -> None:
    with pytest.raises(TokmillError) as refused:
        read(tmp_path, text)
    assert what in str(refused.value) and "hint: " in str(refused.value)


def test_no_file(tmp_path: Path) -> None:
    for path, what in ((tmp_path / "no.csv", "there is no such file"), (tmp_path, "is not a file")):
        with pytest.raises(TokmillError, match=what):
            read_keys(path)


def test_zero_bytes(tmp_path: Path) -> None:
    """Python's reader takes them for characters since 3.11; they are no reason to fail."""
    made, _ = read(tmp_path, HEAD + "\np,f\0g,gcc,O0\n")
    assert made.text("function", 0) == "f\0g"
