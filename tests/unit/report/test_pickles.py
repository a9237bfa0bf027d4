"""What is shown of pickles: structure, lengths, frequent tokens; and nothing is run."""

import collections
import functools
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest

from tokmill.report.describe import pickles
from tokmill.report.describe.inspect import describe

PUSH = {
    "asm": ["PUSH", "RBP"], "mne": "PUSH", "type": [("[PAD]", 1), ("R64_OPCODE", 1)],
    "reg": ["RSP", "RBP"], "rw": [("READ_WRITE", 1), ("READ", 1)], "eflag": "[PAD]",
}  # fmt: skip
RET = {**PUSH, "asm": ["RET"], "mne": "RET", "reg": ["RSP"]}


def shown(folder: Path, value: Any, protocol: int = 4, name: str = "a.pkl", **keys: Any) -> Any:
    (folder / name).write_bytes(pickle.dumps(value, protocol))
    found = describe(folder / name, **keys)
    # Everything can be printed as JSON.
    assert json.loads(json.dumps(found)) == found and found["kind"] == "pickle"
    return found


def test_sequences_of_token_dicts(tmp_path: Path) -> None:
    sequences = [[PUSH, RET], [RET], [PUSH] * 8, []]
    found = shown(tmp_path, sequences, name="saved_tokens.pkl")
    assert found["what"] == (
        "a pickle (protocol 4): sequences of token dicts; nothing of it was run"
    )
    assert found["sequences"] == 4
    assert found["lengths"] == {"min": 0, "max": 16, "mean": 5, "median": 2, "in": "tokens"}
    assert found["next"] == f"tokmill build token-dicts {tmp_path / 'saved_tokens.pkl'} -o STORE"
    assert found["structure"].split("\n") == [
        "list of 4: 4 list",
        "  [0] list of 2 dict",
        "    [0] token dict: 'PUSH RBP'",
        "    [1] token dict: 'RET'",
        "  [1] list of 1 dict",
        "    [0] token dict: 'RET'",
        "  [2] list of 8 dict",
        "    [0] token dict: 'PUSH RBP'",
        "    [1] token dict: 'PUSH RBP'",
        "    [2] token dict: 'PUSH RBP'",
        "    … (5 more)",
        "  … (1 more)",
    ]
    functions = collections.defaultdict(list, {"main": sequences, "f": [[RET]]})
    found = shown(tmp_path, functions)
    assert found["sequences"] == 5 and found["lengths"]["max"] == 16
    assert "'f': list of 1 list" in found["structure"]


def test_other_sequences(tmp_path: Path) -> None:
    blame = [{"O0": [[{"opnd_ids": [1, 2]}, {"opnd_ids": []}], [{"opnd_ids": [1]}]], "O3": [[]]}]
    found = shown(tmp_path, blame * 3, name="x_blame.pkl")
    assert found["sequences"] == 9
    assert found["lengths"] == {
        "min": 0, "max": 4, "mean": 2, "median": 2, "in": "opcodes and operands",
    }  # fmt: skip
    assert "next" not in found
    ids = {"main": [{name: [1] * 4 for name in PUSH}], "f": [{name: [2] for name in PUSH}]}
    found = shown(tmp_path, ids, name="saved_func_tokens_cached.pkl")
    assert found["lengths"] == {"min": 1, "max": 4, "mean": 2.5, "median": 2.5, "in": "ids"}
    assert "next" not in found
    found = shown(tmp_path, [[1, 2, 3], (4, 5), []])
    assert found["lengths"] == {"min": 0, "max": 3, "mean": 5 / 3, "median": 2, "in": "entries"}


def test_token_counts_as_the_most_frequent(tmp_path: Path) -> None:
    counts = {"MOV": 5, "RAX": 15, "\x1b[31mred": 1, **{f"T{i}": 1 for i in range(40)}}
    for value in (counts, collections.Counter(counts)):
        found = shown(tmp_path, value, name="asm_tokens_dict.pkl")
        assert found["tokens"] == 43 and found["occurrences"] == 61
        assert found["most_frequent"][:2] == [
            {"token": "RAX", "count": 15, "share": 15 / 61},
            {"token": "MOV", "count": 5, "share": 5 / 61},
        ]
        assert len(found["most_frequent"]) == 20 and "structure" not in found
        assert found["most_frequent"][2]["token"] == r"'\x1b[31mred'"
    assert "structure" in shown(tmp_path, {"a": 1, "b": -1})
    assert "structure" in shown(tmp_path, {"a": 1, "b": True})


def test_functions_of_binarycorp(tmp_path: Path) -> None:
    graph = networkx.DiGraph()
    graph.add_node(16, asm=["retn"], raw=b"\xc3")
    function = [16, ["retn"], b"\xc3", graph, None]
    found = shown(tmp_path, {"main": function}, name="a-b-O0-c_extract.pkl")
    assert "functions of 1 program (BinaryCorp)" in found["what"] and found["functions"] == 1
    assert found["next"] == f"tokmill cfg {tmp_path / 'a-b-O0-c_extract.pkl'} -o GRAPHS"
    assert found["python_would_load"] == "networkx.classes.digraph.DiGraph"
    assert "'raw': bytes of 1: c3" in found["structure"]
    found = shown(tmp_path, {"f": [function] * 5, "g": [function] * 5}, name="saved_index.pkl")
    assert "functions of 5 programs (BinaryCorp)" in found["what"] and found["functions"] == 2


class Thing:
    """Pickled by its attributes."""

    def __init__(self, **facts: Any) -> None:
        vars(self).update(facts)


def test_any_other_structure(tmp_path: Path) -> None:
    value = (
        [1, "x" * 100, b"\x00\xff", None, 1 << 200, 2.5],
        {("a", 1): {"inner": np.zeros((3, 4), "<u2")}, 7: {"s", "t"}, None: bytearray(b"q")},
        Thing(width=3),
        "y" * 70,
        (1, [2], (3, 4, 5, 6, 7, 8, 9)),
        os.path.join,
    )
    found = shown(tmp_path, value, 5)
    lines = found["structure"].replace("'t', 's'", "'s', 't'").split("\n")
    assert lines == [
        "tuple of 6 Name or dict or list or str or …",
        "  [0] list of 6 NoneType or bytes or float or int or …: "
        f"1, {'x' * 60!r}…, (bytes), None, an integer of 201 bits, 2.5",
        "  [1] dict of 3",
        "    ('a', 1): dict of 1",
        "      'inner': numpy array uint16 of shape (3, 4)",
        "    7: set of 2 str: 's', 't'",
        "    None: bytearray of 1: 71",
        f"  [2] {__name__}.Thing",
        "    state: dict of 1",
        "      'width': 3",
        f"  [3] str of 70: {'y' * 60!r}…",
        "  [4] tuple of 3 int or list or tuple",
        "    [0] 1",
        "    [1] list of 1 int: 2",
        "    [2] tuple of 7 int: 3, 4, 5, …",
        "  [5] posixpath.join",
    ]
    assert found["python_would_load"] == f"posixpath.join, {__name__}.Thing"
    assert shown(tmp_path, 5)["structure"] == "5"
    assert "a dict;" in shown(tmp_path, {})["what"] and "a list;" in shown(tmp_path, [])["what"]


def test_more_or_fewer_entries(tmp_path: Path) -> None:
    value = {f"k{i}": i * 1.0 for i in range(200)}
    for entries in (0, 1, 3, 150):
        lines = shown(tmp_path, value, entries=entries)["structure"].split("\n")
        assert len(lines) == 2 + entries and lines[-1] == f"  … ({200 - entries} more)"


def test_values_that_are_deep_or_doubled_are_cut(tmp_path: Path) -> None:
    deep = functools.reduce(lambda inner, _: [inner], range(300), [1])
    doubled: Any = []
    for _ in range(100):
        doubled = [doubled, doubled]
    wide = [[[[[[i] * 9] * 9] * 9] * 9] for i in range(9)]
    for value in (deep, doubled, wide, {"a": doubled}, (doubled, deep)):
        assert len(shown(tmp_path, value)["structure"].split("\n")) <= pickles.LINES + 1
    # By Python's own limit a file cannot be deeper; by hand it can.
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04" + b"(" * 50_000 + b"l" * 50_000 + b".")
    assert "list of 1" in describe(tmp_path / "a.pkl")["structure"]


class Harm:
    """Makes a folder where it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_run_and_it_says_what_would_be(tmp_path: Path, protocol: int) -> None:
    found = shown(tmp_path, {"a": [1, Harm(tmp_path / "sprung")]}, protocol)
    assert found["python_would_load"] == "posix.mkdir"
    assert "posix.mkdir" in found["structure"] and "nothing of it was run" in found["what"]
    assert not (tmp_path / "sprung").exists()


def test_names_cannot_trouble_a_terminal(tmp_path: Path) -> None:
    text = "\x1b]0;title\x07"
    name = b"\x8c%c" % len(text) + text.encode()
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04" + name + name + b"\x93)R.")
    found = describe(tmp_path / "a.pkl")
    assert "\x1b" not in json.dumps(found, ensure_ascii=False)
    assert "x1b" in found["python_would_load"]


def test_damage_is_a_problem(tmp_path: Path) -> None:
    data = pickle.dumps([[1, 2], [3]])
    path = tmp_path / "a.pkl"
    path.write_bytes(data[:-2])
    found = describe(path)
    assert "it cannot be read" in found["what"] and "cut off" in found["problem"]
    path.write_bytes(data[:-1] + b"R.")
    assert "does not fit here" in describe(path)["problem"]
    path.write_bytes(data + b"more")
    assert describe(path)["problem"] == "4 bytes follow the pickle and were not read"
    path.write_bytes(b"not a pickle at all\n")
    assert "by its name" in describe(path)["what"] and "problem" in describe(path)


def test_a_long_one_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pickles, "LONG", 1000)
    monkeypatch.setattr("tokmill.base.progress.EVERY", 0.0)
    value = [[number] * 5 for number in range(3000)]
    shown(tmp_path, value)
    assert capsys.readouterr().err == ""
    shown(tmp_path, value, quiet=False)
    shares = [int(share) for share in re.findall(r"\((\d+)%\)", capsys.readouterr().err)]
    assert shares == sorted(shares) and shares[0] < 50 and shares[-1] == 100


def test_looking_takes_no_longer_than_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokmill.base.unpickle.inert.SPARE", 1 << 16)
    found = shown(tmp_path, [[list(range(1000))] * 1000] * 1000)
    assert "makes far more data than" in found["problem"] and found["sequences"] < 100_000


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MOST_BYTES", 10)
    found = shown(tmp_path, [1] * 100)
    assert "it was not read" in found["problem"] and "structure" not in found
