"""Vocabularies of whole operands made smaller, and lists in which a line stands again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tokmill.base.errors import TokmillError
from tokmill.x86.tokens.vocabularies.operand_classes import compressed, operand_class
from tokmill.x86.tokens.vocabularies.vocabulary import (
    SPECIALS,
    TokenList,
    read_list,
    read_vocabularies,
)


@pytest.mark.parametrize(
    ("token", "wanted"),
    [
        ("dword [rax+0x10]", "MEM_dword[REG+IMM]"),
        ("dword [rax+IMM]", "MEM_dword[REG+IMM]"),
        ("qword ptr [rbx + r12*8 - 20h]", "MEM_qword[REG+REG*8-IMM]"),
        ("byte fs:[0x28]", "MEM_byte_fs[IMM]"),
        ("[rip+1234]", "MEM_any[REG+IMM]"),
        ("xmmword [rsp]", "MEM_xmmword[REG]"),
        ("0x401000", "IMM"),
        ("rax", "rax"),
        ("movups", "movups"),
        ("sub_401000", "sub_401000"),
        ("r10d", "r10d"),
    ],
)
def test_classes_of_operands(token: str, wanted: str) -> None:
    assert operand_class(token) == wanted
    assert operand_class(wanted) == wanted, "a class is its own class"


def test_counts_are_added_and_ids_follow() -> None:
    names = [*SPECIALS, "dword [rax+4]", "dword [rbx+8]", "mov"]
    made = compressed({"asm": TokenList("asm", "semanticbbv", names, [0] * 5 + [3, 4, 5])})
    assert made.lists["asm"].tokens == [*SPECIALS, "MEM_dword[REG+IMM]", "mov"]
    assert made.lists["asm"].counts == [0] * 5 + [7, 5]
    assert made.became == {
        "asm": dict.fromkeys(("dword [rax+4]", "dword [rbx+8]"), "MEM_dword[REG+IMM]")
    }


def test_lines_that_stand_again(tmp_path: Path, tokmill: Callable[..., object]) -> None:
    lines = [*SPECIALS, "mov", "add", "mov", "sub"]
    (tmp_path / "asm_tokens.txt").write_text("\n".join(lines) + "\n")
    found = read_list(tmp_path / "asm_tokens.txt")
    assert found.tokens.tokens == [*SPECIALS, "mov", "add", "sub"]
    assert found.repeated == ("mov",)
    assert found.ids == [0, 1, 2, 3, 4, 5, 6, 5, 7] and found.renumbered
    with pytest.raises(TokmillError, match="'mov' is repeated in the list"):
        read_vocabularies(tmp_path)
    done = tokmill("vocab", "import", "asm_tokens.txt", "-o", "made", cwd=tmp_path)
    assert "duplicate lines were dropped: 'mov'" in done.stderr  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "made/ids.json").read_bytes())["asm"] == found.ids
