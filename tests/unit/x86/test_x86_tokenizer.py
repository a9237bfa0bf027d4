"""Programs and machine code as ids in memory, and back as text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokmill
from making import quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.x86.graphs.graph_files import write_graph
from tokmill.x86.lift.cfg import lift
from tokmill.x86.tokens.rules import (
    COLUMNS,
    DecodeError,
    align,
    tokenize_binary_instruction,
    tokenize_bytes,
)
from tokmill.x86.tokens.vocabularies.vocabulary import (
    SPECIALS,
    TokenList,
    closed,
    counted,
    write_vocabularies,
)
from tokmill.x86.walks import Walking
from tokmill.x86.x86_tokenizer import X86Coder, X86Tokenizer, tokens_of
from x86_programs import C_SOURCE, compiles

CODE = bytes.fromhex("55 4889e5 f3aa c3")
LINES = ["PUSH RBP RSP", "MOV RBP RSP", "REP STOSB BYTE RDI AL RCX", "RET RSP"]


@pytest.fixture(scope="session")
def program(built: Path) -> Path:
    return compiles(built, "tokenized", C_SOURCE, "-O2")


def aligned(code: bytes, rules: str) -> dict[str, list[str]]:
    streams = [align(tokens) for tokens in tokenize_bytes(code, 0, rules)]
    return {column: [t for one in streams for t in one[column]] for column in COLUMNS}


def semanticbbv() -> dict[str, TokenList]:
    counts = {
        column: dict.fromkeys(tokens, 1) for column, tokens in aligned(CODE, "semanticbbv").items()
    }
    return counted(counts, "semanticbbv")


def test_bytes_and_back() -> None:
    tokenizer = tokmill.X86Tokenizer()
    ids = tokenizer.encode_bytes(CODE)
    expected = aligned(CODE, "tokmill")
    for column in COLUMNS:
        assert tokens_of(tokenizer.vocabularies[column], ids[column]) == expected[column]
    assert ids["border"].tolist() == [3, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    assert tokenizer.decode(ids) == LINES
    assert tokenizer.decode(ids["asm"]) == tokenizer.decode(ids["asm"].tolist()) == LINES


def test_rules_and_vocabularies(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="semanticbbv have no closed vocabularies"):
        X86Tokenizer(rules="semanticbbv")
    write_vocabularies(tmp_path, semanticbbv())
    for vocab in (tmp_path, semanticbbv()):
        tokenizer = X86Tokenizer(vocab, "semanticbbv")
        assert tokenizer.decode(tokenizer.encode_bytes(CODE)) == [
            "PUSH RBP", "MOV RBP RSP", "STOSB", "RET"
        ]  # fmt: skip
        unknown = tokenizer.encode_bytes(b"\x90")["asm"].tolist()
        assert unknown == [SPECIALS.index("[UNK]")]
    with pytest.raises(TokmillError, match="for the rules semanticbbv, not tokmill"):
        X86Tokenizer(tmp_path, "tokmill")
    # Lists name their rules.
    for vocab in (tmp_path, semanticbbv()):
        tokenizer = X86Tokenizer(vocab)
        assert tokenizer.rules == "semanticbbv"
        assert tokenizer.decode(tokenizer.encode_bytes(b"\xc3")) == ["RET"]


@pytest.mark.parametrize("given", ["4889e5", 5, [0x55]])
def test_what_is_no_machine_code(given: Any) -> None:
    for take in (tokenize_bytes, tokenize_binary_instruction):
        with pytest.raises(TypeError, match=r"machine code is bytes, not \w+: bytes.fromhex"):
            take(given, 0)
    with pytest.raises(TypeError, match="machine code is bytes"):
        X86Tokenizer().encode_bytes(given)


def test_addresses_that_are_none() -> None:
    for address in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"the address {address} is not from 0 to"):
            tokenize_bytes(b"\xc3", address)
    assert tokenize_bytes(memoryview(b"\xc3"), (1 << 64) - 1)


def test_a_separator_behind_each_instruction() -> None:
    tokenizer = X86Tokenizer(separator=True)
    ids = tokenizer.encode_bytes(CODE)
    assert [int((ids[column] == 1).sum()) for column in COLUMNS] == [4] * 6
    lines = [f"{line} [SEP]" for line in LINES]
    assert tokenizer.decode(ids) == tokenizer.decode(ids["asm"]) == lines


def test_code_of_other_widths_and_no_code() -> None:
    tokenizer = X86Tokenizer()
    assert tokenizer.decode(tokenizer.encode_bytes(b"\x40", bits=32)) == ["INC EAX"]
    with pytest.raises(UsageError, match="16 bits"):
        tokenizer.encode_bytes(b"\x40", bits=16)
    with pytest.raises(DecodeError) as caught:
        tokenizer.encode_bytes(b"\x90\x06", address=0x1000)
    assert caught.value.where == "0x1001"
    nothing = tokenizer.encode_bytes(b"")
    assert {len(ids) for ids in nothing.values()} == {0} and tokenizer.decode(nothing) == []


def test_functions_of_a_program_are_those_of_a_store(tmp_path: Path, program: Path) -> None:
    store = quick_build("x86", program, tmp_path / "s")
    found = list(tokmill.X86Tokenizer().encode_program(program))
    assert len(found) == store.records > 10
    for number, one in enumerate(found):
        record = store.record(number)
        assert (one.function, one.address) == (record["function"], record["address"])
        for column in (*COLUMNS, "border"):
            assert np.array_equal(one.columns[column], record[column])
    # The store's vocabularies do as well as those in the package.
    for place in (store.path, str(store.path), store):
        again = next(iter(X86Tokenizer(place).encode_program(program)))
        assert np.array_equal(again.columns["asm"], found[0].columns["asm"])


def test_blocks_of_a_graph(tmp_path: Path, program: Path) -> None:
    graph = lift(program)
    write_graph(graph, tmp_path / "g.parquet")
    blocks = list(X86Tokenizer().encode_program(tmp_path / "g.parquet", unit="block"))
    assert [one.address for one in blocks] == graph.block_address.tolist()
    assert all(one.columns["border"][0] == 3 for one in blocks)


def test_walks_are_those_of_a_store(tmp_path: Path, program: Path) -> None:
    options = {"seed": 3, "walk_tokens": 64, "min_tokens": 20}
    store = quick_build("x86", program, tmp_path / "s", unit="walk", **options)
    walking = Walking(seed=3, walk_tokens=64)
    tokenizer = X86Tokenizer()
    found = list(tokenizer.encode_program(program, "walk", walking=walking, min_tokens=20))
    assert len(found) == store.records > 10
    for number, one in enumerate(found):
        assert np.array_equal(one.columns["asm"], store.record(number)["asm"])


def test_inputs_that_are_none(tmp_path: Path) -> None:
    tokenizer = X86Tokenizer()
    (tmp_path / "text").write_text("no program")
    for path, error in (
        (tmp_path, "a folder"),
        (tmp_path / "text", "not a program"),
        (tmp_path / "x", "no such"),
    ):
        with pytest.raises(TokmillError, match=error):
            list(tokenizer.encode_program(path))
    with pytest.raises(UsageError, match="no unit"):
        list(tokenizer.encode_program(tmp_path / "text", unit="path"))  # type: ignore[arg-type]


def test_instructions_are_told_apart_without_borders(program: Path) -> None:
    tokenizer = X86Tokenizer()
    for one in tokenizer.encode_program(program):
        assert tokenizer.decode(one.columns["asm"]) == tokenizer.decode(one.columns)


def test_decoding_what_a_model_might_say() -> None:
    tokenizer = X86Tokenizer()
    ids = tokenizer.vocabularies["asm"].ids
    said = [
        ids[token] for token in ("RAX", "MOV", "[MASK]", "[UNK]", "[SEP]", "RBX", "LOCK", "ADD")
    ]
    assert tokenizer.decode(said) == ["RAX", "MOV [MASK] [UNK] [SEP]", "RBX", "LOCK ADD"]
    for wrong in (-1, len(ids)):
        with pytest.raises(UsageError, match=f"{wrong} is not an id of asm"):
            tokenizer.decode([wrong])
    with pytest.raises(UsageError, match="no ids of `asm`"):
        tokenizer.decode({"mne": [1]})  # type: ignore[dict-item]


def test_a_record_that_begins_within_an_instruction() -> None:
    tokenizer = X86Tokenizer()
    ids = {column: values[1:] for column, values in tokenizer.encode_bytes(CODE).items()}
    assert tokenizer.decode(ids) == ["RBP RSP", *LINES[1:]]


def test_what_sampling_asks_for(tmp_path: Path) -> None:
    write_vocabularies(tmp_path, closed())
    coder = X86Coder.from_files({column: tmp_path / f"{column}.json" for column in COLUMNS})
    ids = coder.encode("55 4889e5")
    assert list(ids) == list(COLUMNS) and {len(values) for values in ids.values()} == {6}
    assert coder.decode(ids) == "\nPUSH RBP RSP\nMOV RBP RSP"
    only = X86Coder.from_files({"rw": tmp_path / "rw.json"})
    assert only.encode("90") == {"rw": [closed()["rw"].ids["-"]]}
    assert only.decode(only.encode("9055")) == "\nrw: - - READ READ_WRITE"
    assert only.encode("") == {"rw": []}
    with pytest.raises(UsageError, match="not machine code"):
        coder.encode("mov")
