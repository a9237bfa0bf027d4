"""The rules `numbers`: the streams of `tokmill`, and the values of numbers beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from making import quick_build
from tokmill.errors import UsageError
from tokmill.store.hashes import mix
from tokmill.x86.lift.cfg import lift
from tokmill.x86.tokenizer import X86Tokenizer
from tokmill.x86.tokens.count import count_programs
from tokmill.x86.tokens.number_rules import number_lists, word
from tokmill.x86.tokens.rules import COLUMNS, NUMBER, align, tokenize_bytes
from tokmill.x86.tokens.templates import Templates
from tokmill.x86.tokens.vocabulary import closed
from x86_programs import C_SOURCE, compiles

EXAMPLES = {
    "81f9ef010000": "- - 495",  # cmp ecx, 495
    "83f8ff": "- - -1",
    "4883ec20": "- - -",  # sub rsp, 32
    "4883c020": "- - 32",  # add rax, 32
    "8b45f8": "- - - - -",  # mov eax, [rbp-8]
    "8b4510": "- - - - 16",  # mov eax, [rbp+16]
    "8b442408": "- - - - -",  # mov eax, [rsp+8]
    "8b4328": "- - - - 40",  # mov eax, [rbx+40]
    "c7430805000000": "- - - 8 5",  # mov dword [rbx+8], 5
    "c744240805000000": "- - - - 5",  # mov dword [rsp+8], 5
    "488d0508000000": "- - - - -",  # lea rax, [rip+8]
    "8b83f8ffffff": "- - - - -8",  # mov eax, [rbx-8] with 32 bits
    "e820000000": "- - -",
    "74f0": "- -",
    "c3": "- -",
    "9a010203040506": "- - - -",  # call far, of 32-bit code
}


@pytest.mark.parametrize("code", EXAMPLES)
def test_numbers_that_say_what_is_computed(code: str) -> None:
    bits = 32 if code.startswith("9a") else 64
    (made,) = tokenize_bytes(bytes.fromhex(code), 0x401000, "numbers", bits)
    numbers = made.pop(NUMBER)
    assert (made,) == (tokenize_bytes(bytes.fromhex(code), 0x401000, "tokmill", bits)[0],)
    assert " ".join(numbers) == EXAMPLES[code]


def test_large_numbers_are_hashed() -> None:
    assert [word(value) for value in (-256, -1, 0, 1023)] == ["-256", "-1", "0", "1023"]
    for value in (-257, 1024, 0x9E3779B97F4A7C15, -(1 << 63), (1 << 64) - 1000):
        hashed = int(mix(np.array([value & (1 << 64) - 1], np.uint64))[0])
        assert word(value) == f"#{hashed % 4096:03x}"
    (made,) = tokenize_bytes(bytes.fromhex("69c0b179379e"), 0, "numbers")  # imul eax, 0x9e3779b1
    assert made[NUMBER] == ["-", "-", "-", word(0x9E3779B1 - (1 << 32))]
    assert word(0x9E3779B1 - (1 << 32))[0] == "#"
    lists = number_lists()
    assert [*lists] == [*COLUMNS, NUMBER] and len(lists[NUMBER]) == 5 + 1 + 1280 + 4096
    assert all(lists[name].tokens == closed()[name].tokens for name in COLUMNS)


def test_a_store_has_the_streams_of_tokmill_and_the_numbers(tmp_path: Path) -> None:
    program = compiles(tmp_path, "tool", C_SOURCE, "-O2", "-g")
    plain = quick_build("x86", program, tmp_path / "plain")
    store = quick_build("x86", program, tmp_path / "numbers", rules="numbers")
    assert store.token_columns == [*COLUMNS, NUMBER, "border"]
    assert store.vocabularies[NUMBER].size == len(number_lists()[NUMBER])
    assert len(store) == len(plain) > 5
    for one, other in zip(store, plain, strict=True):
        for name, value in other.items():
            assert np.array_equal(one[name], value), name
    # A record has the numbers that its instructions have one by one.
    graph, words = lift(program), number_lists()[NUMBER]
    for number, record in enumerate(store):
        first, last = graph.block_bytes[graph.function_blocks[number : number + 2]].tolist()
        code = graph.code[first:last].tobytes()
        wanted = [
            token for made in tokenize_bytes(code, 0, "numbers") for token in align(made)[NUMBER]
        ]
        assert [words.tokens[i] for i in record[NUMBER]] == wanted
    reader = X86Tokenizer(store)
    assert reader.rules == "numbers"
    coded = reader.encode_bytes(bytes.fromhex("81f9ef010000"))
    assert [words.tokens[i] for i in coded[NUMBER]] == ["-", "-", "495"]


def test_a_cache_tells_numbers_apart() -> None:
    made = Templates("numbers", 64, number_lists())
    code = bytes.fromhex("83f80283f80383f802e802000000e803000000")
    lengths = np.array([3, 3, 3, 5, 5], np.uint8)
    numbers = made.numbers(np.frombuffer(code, np.uint8), lengths).tolist()
    assert numbers[0] == numbers[2] != numbers[1]
    # Calls of two functions are one template, as their tokens are equal.
    assert numbers[3] == numbers[4] and len(made.table().offsets) == 4


def test_its_vocabularies_are_closed(tmp_path: Path) -> None:
    program = compiles(tmp_path, "tool", C_SOURCE)
    with pytest.raises(UsageError, match="needs no counting"):
        count_programs([str(program)], "numbers")
    with pytest.raises(UsageError, match="do not make"):
        quick_build("pairs", program, tmp_path / "p", rules="numbers", all_pairs=True)
    with pytest.raises(UsageError, match="know no vocab"):
        quick_build("x86", program, tmp_path / "s", rules="numbers", vocab=str(tmp_path))
