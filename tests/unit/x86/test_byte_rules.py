"""The rules `bytes`: a column of raw bytes, with the records of the other rules."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from making import quick_build
from tokmill.errors import UsageError
from tokmill.x86.lift.cfg import lift
from tokmill.x86.tokens import byte_templates
from tokmill.x86.tokens.byte_rules import byte_list
from tokmill.x86.tokens.byte_templates import ByteTemplates
from tokmill.x86.tokens.count import count_programs
from tokmill.x86.tokens.rules import DecodeError, tokenize_bytes
from x86_programs import C_SOURCE, compiles

KEYS = ("function", "address", "program", "compiler", "level", "part")


def test_a_store_holds_the_bytes_of_each_function(tmp_path: Path) -> None:
    program = compiles(tmp_path, "tool", C_SOURCE, "-O2", "-g")
    store = quick_build("x86", program, tmp_path / "bytes", rules="bytes")
    tokens = quick_build("x86", program, tmp_path / "tokens")
    assert [{key: one[key] for key in KEYS} for one in store] == [
        {key: one[key] for key in KEYS} for one in tokens
    ]
    assert store.token_columns == ["byte", "border"] and set(store.vocabularies) == {"byte"}
    graph = lift(program)
    for number, record in enumerate(store):
        first, last = graph.block_bytes[graph.function_blocks[number : number + 2]].tolist()
        assert (record["byte"] - 5).astype(np.uint8).tobytes() == graph.code[first:last].tobytes()
        assert np.count_nonzero(record["border"]) == np.count_nonzero(
            tokens.record(number)["border"]
        )
    words = byte_list()
    assert words.tokens[5 + 0x55] == "55" and len(words) == 261
    # Walks and blocks too, and a graph gives what its program gives.
    walks = quick_build(
        "x86", program, tmp_path / "walks", rules="bytes", unit="walk", min_tokens=8
    )
    assert len(walks) and walks.record(0)["byte"].min() >= 5


def test_templates_are_the_bytes_of_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    made = ByteTemplates()
    for _ in range(4):
        lengths = rng.integers(1, 16, 2000).astype(np.uint8)
        code = rng.integers(0, 3, int(lengths.sum())).astype(np.uint8)
        numbers = made.numbers(code, lengths)
        offsets, columns = made.table()
        ends = np.cumsum(lengths, dtype=int)
        for row in range(0, 2000, 7):
            one = slice(offsets[numbers[row]], offsets[numbers[row] + 1])
            wanted = code[ends[row] - lengths[row] : ends[row]]
            assert (columns["byte"][one] - 5).tolist() == wanted.tolist()
        # Equal bytes have one number.
        assert len(offsets) - 1 == len(made.index) <= 8000
    growing = made.growing
    monkeypatch.setattr(byte_templates, "MOST_KEYS", 10)
    assert made.numbers(code[: ends[0]], lengths[:1]).tolist() == [0]
    assert made.growing is not growing and len(made.table().offsets) == 2
    assert not len(made.numbers(code[:0], lengths[:0]))
    with pytest.raises(DecodeError, match="no instruction of 64-bit code"):
        made.numbers(np.zeros(16, np.uint8), np.array([16], np.uint8))
    with pytest.raises(ValueError, match="3 bytes of code, but 2"):
        made.numbers(np.zeros(3, np.uint8), np.array([2], np.uint8))


def test_what_bytes_do_not_have_is_refused(tmp_path: Path) -> None:
    tool = shutil.which("true")
    assert tool is not None
    for options, why in (
        ({"separator": True}, "know no separator"),
        ({"vocab": str(tmp_path)}, "know no vocab"),
    ):
        with pytest.raises(UsageError, match=why):
            quick_build("x86", tool, tmp_path / "s", rules="bytes", **options)
    with pytest.raises(UsageError, match="make one column, not six"):
        tokenize_bytes(b"\x90", 0, "bytes")
    with pytest.raises(UsageError, match="needs no counting"):
        count_programs([tool], "bytes")
    with pytest.raises(UsageError, match="do not make"):
        quick_build("pairs", tool, tmp_path / "p", rules="bytes", all_pairs=True)
