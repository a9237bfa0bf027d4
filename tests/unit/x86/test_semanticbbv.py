"""The `semanticbbv` rules: what the public tokenizer was seen to emit (docs hold the rest)."""

from __future__ import annotations

from typing import Any

import pytest
from iced_x86 import Code, Instruction

from tokmill.x86.tokens.rules import DecodeError, Tokens, decode, tokenize_binary_instruction
from tokmill.x86.tokens.semanticbbv import SemanticbbvRules


def tokens(code: str) -> Tokens:
    return tokenize_binary_instruction(bytes.fromhex(code), 0x401000, "semanticbbv")


@pytest.mark.parametrize(
    ("code", "asm", "reg"),
    [
        ("8d4408ff", "LEA EAX RAX + RCX - IMM", "[PAD] RAX RAX [PAD] ECX [PAD] [PAD]"),
        ("88e0", "MOV AL AH", "[PAD] AL AL"),
        ("4000c5", "ADD BPL AL", "[PAD] BPL AL"),
        ("660f1f440000", "NOP", "[PAD]"),
        ("6690", "NOP", "[PAD]"),
        ("480f1f00", "NOP", "[PAD]"),
        ("d8c1", "FADD ST1", "ST0 ST1"),
        ("ff2500100000", "JMP QWORD REL IMM", "[PAD] [PAD] [PAD] [PAD]"),
        ("a10000000000000001", "MOV EAX QWORD IMM", "[PAD] RAX [PAD] [PAD]"),
        ("c60001", "MOV BYTE RAX IMM", "[PAD] [PAD] RAX [PAD]"),
        ("660f3a44c101", "PCLMULHQLQDQ XMM0 XMM1", "[PAD] XMM0 XMM1"),
        ("62f17c185800", "VADDPS XMM0 XMM0 RAX { IMM TO4 }", "[PAD] ZMM0 ZMM0 RAX" + " [PAD]" * 4),
        (
            "62f17c5858c1",
            "VADDPS ZMM0 ZMM0 ZMM1 { RU - SAE }",
            "[PAD] ZMM0 ZMM0 ZMM1" + " [PAD]" * 5,
        ),
        (
            "62f17ccb5800",
            "VADDPS ZMM0 { K3 } { Z } ZMM0 RAX",
            "[PAD] ZMM0 [PAD] K3" + " [PAD]" * 4 + " ZMM0 RAX",
        ),
    ],
)
def test_text_and_registers(code: str, asm: str, reg: str) -> None:
    assert tokens(code)["asm"] == asm.split()
    assert tokens(code)["reg"] == reg.split()


def test_one_implicit_register_stands_with_the_mnemonic() -> None:
    push, cmpxchg, cwde = tokens("55"), tokens("f0480fb10f"), tokens("98")
    assert push["reg"] == ["RSP", "RBP"] and push["rw"] == [("READ_WRITE", 1), ("READ", 1)]
    assert cmpxchg["reg"][0] == "RAX" and cmpxchg["rw"][0] == ("READ_COND_WRITE", 1)
    # AX is read and RAX written: two used registers, so none is shown.
    assert cwde["reg"] == ["[PAD]"] and cwde["rw"] == [("[PAD]", 1)]


def test_two_printed_operands_of_three() -> None:
    found = tokens("6bc005")  # imul eax,eax,5, which NASM prints as imul eax,5
    assert found["asm"] == ["IMUL", "EAX", "IMM"]
    assert found["type"] == [("[PAD]", 1), ("R32_REG", 1), ("IMM8SEX32", 1)]


def test_more_is_printed_than_there_are_operands() -> None:
    found = tokens("62f17c5858c1")
    assert found["type"][-1] == found["rw"][-1] == ("[PAD]", 5)


def test_flags_and_mnemonic() -> None:
    assert tokens("c3")["eflag"] == "[PAD]"
    assert tokens("31c0")["eflag"].startswith("CLEARED_OF,CLEARED_SF,CLEARED_CF,SET_ZF")
    assert tokens("c5f1c2c200")["mne"] == "VCMPPD"  # asm has VCMPEQPD


@pytest.mark.parametrize(
    ("printed", "own", "places"),
    [
        (0, 2, []),
        (1, 1, [0]),
        (1, 2, [0]),
        (2, 3, [0, 2]),
        (3, 3, [0, 1, 2]),
        (5, 4, [0, 1, 2, 3, 4]),
        (3, 4, None),
        (1, 3, None),
        (2, 4, None),
    ],
)
def test_which_operand_a_printed_one_is(printed: int, own: int, places: list[int] | None) -> None:
    codes = {1: "50", 2: "89c0", 3: "6bc005", 4: "c4e3694ac340"}
    instruction = next(decode(bytes.fromhex(codes[own]), 0x401000, 64))
    assert instruction.op_count == own
    rules: Any = SemanticbbvRules()
    if places is None:
        with pytest.raises(DecodeError, match=f"{printed} operands are printed of") as caught:
            rules._places(instruction, printed)
        assert codes[own][:2] in caught.value.what and caught.value.where == "0x401000"
    else:
        assert list(rules._places(instruction, printed)) == places


def test_three_of_four_only_where_the_code_ends_in_an_immediate() -> None:
    rules: Any = SemanticbbvRules()
    instruction = Instruction.create(Code.EVEX_VCMPPS_KR_K1_XMM_XMMM128B32_IMM8)
    assert instruction.op_count == 4
    assert list(rules._places(instruction, 3)) == [0, 1, 2]
