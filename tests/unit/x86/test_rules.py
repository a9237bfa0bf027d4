"""The public functions, and the `tokmill` rules: the tables of the documentation are true."""

import re
from pathlib import Path

import pytest

from tokmill import align, tokenize_binary_instruction, tokenize_bytes
from tokmill.base.errors import TokmillError, UsageError
from tokmill.x86.tokens.rules import COLUMNS, DecodeError, Runs, Tokens, make_rules
from tokmill.x86.tokens.vocabularies.vocabulary import closed

ROW = re.compile(r"^\| `([0-9a-f]+)` \|.*?\| `(.*?)` \| `(.*?)` \| `(.*?)` \| `(.*?)` \|$", re.M)
PAGE = (Path(__file__).parents[3] / "docs/x86-tokens.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## The `(\w+)` rules\n(.*?)(?=^## )", PAGE, re.M | re.S))
ROWS = [(rules, row) for rules, text in SECTIONS.items() for row in ROW.findall(text)]
MORE = """\
55|PUSH RBP RSP|- R64_OPCODE IMPLICIT|- RBP RSP|- READ READ_WRITE
f0480fb10f|LOCK CMPXCHG QWORD RDI RCX RAX|-×2 R64_OR_MEM×2 R64_REG IMPLICIT|\
- - - RDI RCX RAX|-×2 READ_COND_WRITE READ READ READ_COND_WRITE
66c7000080|MOV WORD RAX -IMM16|- R16_OR_MEM×2 IMM16|- - RAX -|- WRITE READ READ
8b4500|MOV EAX DWORD RBP|- R32_REG R32_OR_MEM×2|- RAX - RBP|- WRITE READ×2
d94508|FLD DWORD RBP DISP8|- MEM×3|- - RBP -|- READ×2 -
a10000000000000001|MOV EAX DWORD DISP64|- EAX MEM_OFFS×2|- RAX - -|- WRITE READ -
54|PUSH RSP RSP|- R64_OPCODE IMPLICIT|- RSP RSP|- READ WRITE
99|CDQ EAX RDX|- IMPLICIT IMPLICIT|- RAX RDX|- READ WRITE
3effe0|NOTRACK JMP RAX|-×2 R64_OR_MEM|- - RAX|-×2 READ
62f17c18584001|VADDPS XMM0 XMM0 DWORD BROADCAST RAX DISP8|- XMM_REG XMM_VVVV XMM_OR_MEM×4|\
- ZMM0 ZMM0 - - RAX -|- WRITE READ READ - READ -
4883ec20|SUB RSP IMM8|- R64_OR_MEM IMM8SEX64|- RSP -|- READ_WRITE READ
64488b042528000000|MOV RAX QWORD FS DISP32|- R64_REG R64_OR_MEM×3|- RAX - FS -|- WRITE READ×2 -
74f0|JE -DISP8|- BR64_1|- -|- READ
c3|RET RSP|- IMPLICIT|- RSP|- READ_WRITE
31c0|XOR EAX EAX|- R32_OR_MEM R32_REG|- RAX RAX|- WRITE -
0f1f440000|NOP DWORD RAX RAX|- R32_OR_MEM×3|- - RAX RAX|- -×3
62f17c5858c1|VADDPS ZMM0 ZMM0 ZMM1 ROUND_UP|- ZMM_REG ZMM_VVVV ZMM_OR_MEM DECORATOR|\
- ZMM0 ZMM0 ZMM1 -|- WRITE READ READ -"""
"""Instructions that the page does not show, as its columns."""
MORE_SEMANTICBBV = """\
428b4c8310|MOV ECX RBX + R8 * IMM + IMM|[PAD] R32_REG R32_OR_MEM×7|\
[PAD] RCX RBX [PAD] R8 [PAD] [PAD] [PAD] [PAD]|[PAD] WRITE READ×7
4883ec20|SUB RSP IMM|[PAD] R64_OR_MEM IMM8SEX64|[PAD] RSP [PAD]|[PAD] READ_WRITE READ
48f7e1|MUL RCX|[PAD] R64_OR_MEM|[PAD] RCX|[PAD] READ
64488b042528000000|MOV RAX FS : IMM|[PAD] R64_REG R64_OR_MEM×3|[PAD] RAX FS [PAD] [PAD]|\
[PAD] WRITE READ×3
c5f1c2c200|VCMPEQPD XMM0 XMM1 XMM2|[PAD] XMM_REG XMM_VVVV XMM_OR_MEM|[PAD] ZMM0 XMM1 XMM2|\
[PAD] WRITE READ READ"""


def tokens(code: str, rules: str = "tokmill", bits: int = 64) -> Tokens:
    return tokenize_binary_instruction(bytes.fromhex(code), 0x401000, rules, bits)


def words(code: str) -> str:
    return " ".join(tokens(code)["asm"])


def runs(text: str) -> Runs:
    pairs = (part.partition("×") for part in text.split())
    return [(name, int(count or 1)) for name, _, count in pairs]


@pytest.mark.parametrize(
    ("rules", "row"),
    [
        *ROWS,
        *(("tokmill", line.split("|")) for line in MORE.splitlines()),
        *(("semanticbbv", line.split("|")) for line in MORE_SEMANTICBBV.splitlines()),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_documented_instructions(rules: str, row: tuple[str, ...]) -> None:
    code, asm, kinds, reg, rw = row
    found = tokens(code, rules)
    assert found["asm"] == asm.split()
    assert found["type"] == runs(kinds)
    assert found["reg"] == reg.split()
    assert found["rw"] == runs(rw)


def test_the_tables_were_found() -> None:
    assert [name for name, _ in ROWS] == ["tokmill"] * 8 + ["semanticbbv"] * 4


def test_the_six_streams_of_an_instruction() -> None:
    assert tokens("f7e1") == {  # mul ecx
        "asm": ["MUL", "ECX", "RAX", "RDX"],
        "mne": "MUL",
        "type": [("-", 1), ("R32_OR_MEM", 1), ("IMPLICIT", 1), ("IMPLICIT", 1)],
        "reg": ["-", "RCX", "RAX", "RDX"],
        "rw": [("-", 1), ("READ", 1), ("READ_WRITE", 1), ("WRITE", 1)],
        "eflag": "WRITTEN_OF,WRITTEN_CF,UNDEFINED_SF,UNDEFINED_ZF,UNDEFINED_AF,UNDEFINED_PF",
    }
    assert tokens("7402")["eflag"] == "READ_ZF"
    assert tokens("31c0")["eflag"] == "CLEARED_OF,CLEARED_SF,CLEARED_CF,SET_ZF,SET_PF,UNDEFINED_AF"


@pytest.mark.parametrize(
    ("code", "asm"),
    [
        ("83c07f", "ADD EAX IMM8"),
        ("83c080", "ADD EAX -IMM8"),
        ("83c002", "ADD EAX IMM8"),
        ("83c0fe", "ADD EAX -IMM8"),
        ("0500000080", "ADD EAX -IMM32"),
        ("48b80000000000000080", "MOV RAX -IMM64"),
        ("48b801000000ffffffff", "MOV RAX -IMM64"),
        ("48c7c0ffffffff", "MOV RAX -1"),
        ("cd80", "INT -IMM8"),
        ("c20800", "RET IMM16 RSP"),
        ("c8100001", "ENTER IMM16 1 RSP RBP"),
        ("8b4001", "MOV EAX DWORD RAX 1"),
        ("8b80ffffffff", "MOV EAX DWORD RAX -1"),
        ("678b4080", "MOV EAX DWORD EAX -DISP8"),
        ("e800000000", "CALL 0 RSP"),
        ("ebfe", "JMP -DISP8"),
        ("0f8400010000", "JE DISP32"),
        ("c4e3690ff1ff", "VPALIGNR XMM6 XMM2 XMM1 -1"),
        # EVEX counts in units of 32 bytes: 4 of them are no negative byte.
        ("62f37d203f470400", "VPCMPB K0 YMM16 YMMWORD RDI DISP8 0"),
        ("62f37d203f47fc00", "VPCMPB K0 YMM16 YMMWORD RDI -DISP8 0"),
    ],
)
def test_classes_of_numbers(code: str, asm: str) -> None:
    assert words(code) == asm


@pytest.mark.parametrize(
    ("code", "asm"),
    [
        ("f3c3", "REP RET RSP"),
        ("f2e900000000", "REPNE JMP 0"),
        ("f2f0480fb10f", "LOCK REPNE CMPXCHG QWORD RDI RCX RAX"),
        ("f390", "PAUSE"),  # here F3 is a part of the opcode
        ("2e8b00", "MOV EAX DWORD RAX"),  # CS means nothing in 64-bit code
        ("658b00", "MOV EAX DWORD GS RAX"),
        ("64a4", "MOVSB BYTE RDI BYTE FS RSI"),
        ("0fae00", "FXSAVE MEM RAX"),
        ("d7", "XLATB BYTE RBX AL AL"),
        ("0fa2", "CPUID RAX RCX RDX RBX"),
        ("c4e26990048d00000000", "VPGATHERDD XMM0 DWORD XMM1 *4 XMM2"),
        ("0f01d8", "VMRUN RAX"),
        ("62f17c1858c1", "VADDPS ZMM0 ZMM0 ZMM1 ROUND_TO_NEAREST"),
        ("62f17c185dc1", "VMINPS ZMM0 ZMM0 ZMM1 SAE"),
    ],
)
def test_prefixes_segments_and_implicit_registers(code: str, asm: str) -> None:
    assert words(code) == asm


@pytest.mark.parametrize(
    ("code", "asm"),
    [
        ("8b442404", "MOV EAX DWORD ESP DISP8"),
        ("50", "PUSH EAX ESP"),
        ("3e8b00", "MOV EAX DWORD DS EAX"),
        ("67668b4002", "MOV AX WORD BX SI DISP8"),
        ("678b06ffff", "MOV EAX DWORD -1"),
        ("9a112233445566", "CALL IMM16 IMM32 ESP"),
        ("66ea11ff2233", "JMP IMM16 -IMM16"),
    ],
)
def test_32_bit_code(code: str, asm: str) -> None:
    found = tokens(code, bits=32)
    assert found["asm"] == asm.split()
    assert set(found["reg"]) <= set(closed()["reg"].tokens)


def test_loading_a_segment_register_is_news() -> None:
    les = tokens("c400", bits=32)
    assert les["asm"] == ["LES", "EAX", "FWORD", "EAX", "ES"]
    assert les["rw"][-1] == ("WRITE", 1)


@pytest.mark.parametrize("rules", ["tokmill", "semanticbbv"])
def test_align_gives_six_lists_of_one_length(rules: str) -> None:
    for code in ("f3aa", "62f17ccb5800", "c5f877", "90", "428b4c8310"):
        found = tokens(code, rules)
        aligned = align(found)
        assert list(aligned) == list(COLUMNS)
        assert {len(values) for values in aligned.values()} == {len(found["asm"])}
        assert set(aligned["mne"]) == {found["mne"]}
    assert align(tokens("8b45f8"))["rw"] == ["-", "WRITE", "READ", "READ", "-"]


@pytest.mark.parametrize("rules", ["tokmill", "semanticbbv"])
def test_the_address_does_not_matter(rules: str) -> None:
    for code in ("e800000000", "488d0508000000", "7402", "8b042511223344"):
        raw = bytes.fromhex(code)
        for address in (0, 0x401000, 2**64 - 3):
            assert tokenize_binary_instruction(raw, address, rules) == tokens(code, rules)


@pytest.mark.parametrize("code", ["", "06", "0fff", "48", "e8000000", "f0" * 15])
def test_bytes_that_are_no_instruction(code: str) -> None:
    with pytest.raises(DecodeError, match="no instruction of 64-bit code") as caught:
        tokens(code)
    assert isinstance(caught.value, TokmillError)
    assert caught.value.where == "0x401000"
    assert bytes.fromhex(code).hex(" ") in caught.value.what
    assert caught.value.hint


def test_bytes_left_over() -> None:
    with pytest.raises(DecodeError, match="2 instructions, not one: 55 c3"):
        tokens("55c3")
    with pytest.raises(DecodeError, match="no instruction of 64-bit code: 0f ff") as caught:
        tokenize_bytes(b"\x55\x0f\xff", 0x1000)
    assert caught.value.where == "0x1001"


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="no rules are called 'semanticbb'") as caught:
        tokens("90", rules="semanticbb")
    assert "semanticbbv" in caught.value.hint
    with pytest.raises(UsageError, match="16 bits"):
        make_rules("tokmill", 16)
