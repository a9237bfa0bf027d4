"""Instructions as kTrans has them (`examples/ktrans.py`); programs are in tests/docs/scripts."""

import pytest

from ktrans import STREAMS, streams_of
from tokmill.x86.tokens.rules import decode


def streams(code: str) -> dict[str, str]:
    instruction = next(decode(bytes.fromhex(code), 0x401000, 64))
    return {name: " ".join(values) for name, values in streams_of(instruction).items()}


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
    assert list(found) == list(STREAMS)
    assert {len(values.split()) for values in found.values()} == {len(token.split())}


def test_ktrans_commas_and_prefixes_are_no_operands() -> None:
    found = streams("f0480fb10f")
    assert found["opnd_type"] == "[PAD] [PAD] MEMORY MEMORY MEMORY [PAD] REGISTER"
    assert found["reg_w"] == "[PAD] [PAD] 1 1 1 [PAD] 0"
    assert streams("7402")["eflags"] == "READ_ZF READ_ZF"
