"""kTrans' streams and Asm2Vec's text."""

from __future__ import annotations

import pytest

from tokmill.x86.tokens.rules import decode
from tokmill.x86.tokens.spellings import KTRANS, asm2vec, ktrans


def streams(code: str) -> dict[str, str]:
    instruction = next(decode(bytes.fromhex(code), 0x401000, 64))
    return {name: " ".join(values) for name, values in ktrans(instruction).items()}


def test_ktrans_streams() -> None:
    assert streams("8b45f8") == {
        "token": "mov eax , dword ptr [rbp-8]",
        "itype": "MOV MOV MOV MOV MOV MOV",
        "opnd_type": "[PAD] REGISTER [PAD] MEMORY MEMORY MEMORY",
        "reg_id": "[PAD] EAX [PAD] NONE NONE NONE",
        "reg_r": "[PAD] 0 [PAD] 1 1 1",
        "reg_w": "[PAD] 1 [PAD] 0 0 0",
        "eflags": "NULL NULL NULL NULL NULL NULL",
    }


@pytest.mark.parametrize(
    ("code", "token"),
    [
        ("4883ec20", "sub rsp , const"),
        ("4883ec08", "sub rsp , 8"),
        ("428b4c8310", "mov ecx , dword ptr [rbx+r8*4+const]"),
        ("64488b042528000000", "mov rax , qword ptr fs:[const]"),
        ("e820000000", "call const"),
        ("f0480fb10f", "lock cmpxchg qword ptr [rdi] , rcx"),
        ("c3", "ret"),
        ("62f17c5858c1", "vaddps zmm0{ru-sae} , zmm0 , zmm1"),
    ],
)
def test_ktrans_text(code: str, token: str) -> None:
    found = streams(code)
    assert found["token"] == token
    assert list(found) == list(KTRANS)
    assert {len(values.split()) for values in found.values()} == {len(token.split())}


def test_ktrans_commas_and_prefixes_are_no_operands() -> None:
    found = streams("f0480fb10f")
    assert found["opnd_type"] == "[PAD] [PAD] MEMORY MEMORY MEMORY [PAD] REGISTER"
    assert found["reg_w"] == "[PAD] [PAD] 1 1 1 [PAD] 0"
    assert streams("7402")["eflags"] == "READ_ZF READ_ZF"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("8b45f8", " mov eax,dword ptr [rbp+CONST]"),
        ("428b4c8310", " mov ecx,dword ptr [rbx+r8*CONST+CONST]"),
        ("83c005", " add eax,CONST"),
        ("d8c1", " fadd st,st(1)"),
        ("e820000000", " call CONST"),
        ("7402", " je CONST"),
        ("c3", " ret"),
        ("ff2500100000", " jmp qword ptr [rip+CONST]"),
        ("62f17c5858c1", " vaddps zmm0{ru-sae},zmm0,zmm1"),
    ],
)
def test_asm2vec_lines(code: str, line: str) -> None:
    assert asm2vec(list(decode(bytes.fromhex(code), 0x401000, 64))) == [line]


def test_asm2vec_labels() -> None:
    code = bytes.fromhex("4885ff" + "7405" + "48ffcf" + "ebf6" + "e8f1ffffff" + "c3")
    assert asm2vec(list(decode(code, 0x401000, 64))) == [
        "LABEL0:",
        " test rdi,rdi",
        " je LABEL4",
        " dec rdi",
        " jmp LABEL0",
        "LABEL4:",
        " call CONST",  # a call is no branch, wherever it goes
        " ret",
    ]
    assert asm2vec([]) == []
