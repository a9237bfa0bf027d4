"""The `semanticbbv` rules: which operand a printed one is. tests/docs/scripts holds the rest."""

from typing import Any

import pytest
from iced_x86 import Code, Instruction

from tokmill.x86.tokens.rules import DecodeError, decode
from tokmill.x86.tokens.semanticbbv import SemanticbbvRules


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
