"""The cache of templates: numbers, tables, borders of the cache, errors."""

import pickle

import numpy as np
import pytest

from tokmill.x86.tokens import templates as module
from tokmill.x86.tokens.rules import COLUMNS, DecodeError
from tokmill.x86.tokens.templates import Templates
from tokmill.x86.tokens.vocabularies.vocabulary import closed, counted
from x86_code import check_equal, decodable, programs, text_of, written

PROLOGUE = bytes.fromhex("5548 89e5 4883ec20 8b45f8 8b45f0 5d c3 83c105 83c107".replace(" ", ""))


def some_code(size: int = 30_000, bits: int = 64) -> tuple[np.ndarray, np.ndarray]:
    text = text_of(next(path for path in programs() if "multiarray_umath" in path.name))
    return decodable(text[len(text) // 2 :][:size], bits)


def test_equal_instructions_have_equal_numbers() -> None:
    code, lengths = decodable(PROLOGUE)
    templates = Templates("tokmill", 64, closed())
    numbers = templates.numbers(code, lengths)
    # Two displacements of one class, two immediates of one class.
    assert numbers.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert templates.numbers(code, lengths).tolist() == numbers.tolist()
    offsets, columns = templates.table()
    assert len(offsets) == 8 and offsets[0] == 0
    assert {name: len(ids) for name, ids in columns.items()} == dict.fromkeys(COLUMNS, offsets[-1])
    assert columns["asm"].dtype == np.uint16 and columns["rw"].dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        columns["asm"][0] = 1


def test_different_code_with_equal_tokens_has_one_number() -> None:
    code, lengths = decodable(bytes.fromhex("89c8" + "8bc1" + "8b00" + "8b4000"))
    numbers = Templates("tokmill", 64).numbers(code, lengths).tolist()
    assert numbers[2] == numbers[3], "a displacement of 0 is not a token"
    # The two encodings of mov eax,ecx differ in the kinds of operands.
    assert numbers[0] != numbers[1]


def test_a_full_cache_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    code, lengths = some_code()
    templates = Templates("tokmill", 64)
    half = len(lengths) // 2
    cut = int(lengths[:half].sum())
    monkeypatch.setattr(module, "MOST_KEYS", 200)
    before = templates.numbers(code[:cut], lengths[:half])
    assert len(templates.index) > 200
    table = templates.table()
    texts = list(written(templates, before))
    templates.numbers(code[cut:], lengths[half:])
    fresh = Templates("tokmill", 64)
    fresh.numbers(code[cut:], lengths[half:])
    assert len(templates.index) == len(fresh.index)
    check_equal(templates, code[cut:], lengths[half:])
    # A table that was taken before stays what it was.
    ids = templates.ids["asm"]
    tokens = list(ids)
    first = slice(table.offsets[before[0]], table.offsets[before[0] + 1])
    assert [tokens[i] for i in table.columns["asm"][first].tolist()] == texts[0]["asm"]


def test_pickled_with_what_it_holds() -> None:
    code, lengths = some_code()
    templates = Templates("semanticbbv", 64)
    numbers = templates.numbers(code, lengths)
    copy = pickle.loads(pickle.dumps(templates))  # noqa: S301
    assert len(copy.index) == len(templates.index)
    assert (copy.numbers(code, lengths) == numbers).all()
    more = decodable(PROLOGUE)
    check_equal(copy, *more)


@pytest.mark.parametrize("rules", ["tokmill", "semanticbbv"])
def test_bytes_that_are_no_instruction(rules: str) -> None:
    code = np.frombuffer(bytes.fromhex("55" + "0f0400" + "c3"), np.uint8)
    lengths = np.array([1, 3, 1], np.uint8)
    templates = Templates(rules, 64)
    with pytest.raises(DecodeError, match="64-bit code: 0f 04 00") as caught:
        templates.numbers(code, lengths)
    assert caught.value.where == "0x1"
    assert len(templates.index) == 0 and len(templates.table().offsets) == 1
    assert templates.numbers(code[:1], lengths[:1]).tolist() == [0]


@pytest.mark.parametrize(
    ("lengths", "where"), [([2, 2], "0x0"), ([4], "0x0"), ([1, 0, 3], "0x1"), ([1, 2, 1], "0x1")]
)
def test_lengths_that_are_not_those_of_the_code(lengths: list[int], where: str) -> None:
    code = np.frombuffer(bytes.fromhex("554889e5"), np.uint8)  # push rbp; mov rbp,rsp
    with pytest.raises(DecodeError) as caught:
        Templates().numbers(code, np.array(lengths, np.uint8))
    assert caught.value.where == where


def test_an_unknown_token_is_unk() -> None:
    code, lengths = decodable(PROLOGUE)
    few = counted({"asm": {"PUSH": 1}}, "tokmill")
    templates = Templates("tokmill", 64, few)
    templates.numbers(code, lengths)
    assert templates.table().columns["asm"][:3].tolist() == [5, 3, 3]
