"""Instructions in columns: the same as iced-x86 says one by one."""

import random

import numpy as np
import pytest
from iced_x86 import Decoder, FlowControl, Mnemonic, OpKind, Register

from tokmill.base.errors import TokmillError
from tokmill.x86.image.image import Program, Section
from tokmill.x86.lift.code import Code
from tokmill.x86.lift.decode import Flow, Instructions
from x86_programs import flat

FLOW = {
    FlowControl.NEXT: Flow.NEXT,
    FlowControl.UNCONDITIONAL_BRANCH: Flow.JUMP,
    FlowControl.INDIRECT_BRANCH: Flow.JUMP_INDIRECT,
    FlowControl.CONDITIONAL_BRANCH: Flow.BRANCH,
    FlowControl.RETURN: Flow.RETURN,
    FlowControl.CALL: Flow.CALL,
    FlowControl.INDIRECT_CALL: Flow.CALL_INDIRECT,
    FlowControl.INTERRUPT: Flow.NEXT,
    FlowControl.XBEGIN_XABORT_XEND: Flow.NEXT,
    FlowControl.EXCEPTION: Flow.STOP,
}
STOPS = (Mnemonic.INT3, Mnemonic.HLT, Mnemonic.INT1)


def expected(instruction: object, bits: int) -> tuple[int, int]:
    """Return the flow and the address that iced-x86 gives, with the exceptions that we make."""
    flow = FLOW[instruction.flow_control]
    mnemonic = instruction.mnemonic
    if mnemonic in STOPS or (mnemonic == Mnemonic.INT and instruction.immediate8 == 0x29):
        return Flow.STOP, 0
    if mnemonic in (Mnemonic.SYSCALL, Mnemonic.SYSENTER, Mnemonic.VMLAUNCH, Mnemonic.VMRESUME,
                    Mnemonic.VMCALL, Mnemonic.VMMCALL):  # fmt: skip
        return Flow.NEXT, 0
    if mnemonic == Mnemonic.XBEGIN:
        return Flow.BRANCH, instruction.near_branch_target
    if flow in (Flow.JUMP, Flow.BRANCH, Flow.CALL):
        if instruction.op0_kind in (OpKind.FAR_BRANCH16, OpKind.FAR_BRANCH32):
            return Flow.JUMP_INDIRECT if flow == Flow.JUMP else Flow.CALL_INDIRECT, 0
        return flow, instruction.near_branch_target
    target = 0
    if flow in (Flow.JUMP_INDIRECT, Flow.CALL_INDIRECT) and instruction.op0_kind == OpKind.MEMORY:
        plain = instruction.memory_base == instruction.memory_index == Register.NONE
        if instruction.is_ip_rel_memory_operand:
            target = instruction.ip_rel_memory_address
        elif bits == 32 and plain and instruction.memory_displ_size == 4:
            target = instruction.memory_displacement
    return flow, target


@pytest.mark.parametrize("bits", [64, 32])
def test_flow_and_targets_are_those_of_iced(bits: int) -> None:
    generator = random.Random(bits)
    pieces = []
    for _ in range(4000):
        # Bytes at random, and before them what begins transfers of control.
        opcode = generator.choice(
            ["e8", "e9", "eb", "74", "0f85", "ff15", "ff25", "ffe0", "c3", "c20800", "cc", "f4",
             "0f0b", "66e9", "660f84", "f2e9", "3e75", "cd29", "cd80", "c7f8", "e3", "67e3", "e2",
             "f2ff25", "48ff25", "41ffe3", "ff5510", "ff2485", "ffa3", "9a", "ea", "0f05", "0f07",
             "0f34", "f1", "", ""]
        )  # fmt: skip
        pieces.append(bytes.fromhex(opcode) + generator.randbytes(generator.randrange(12)))
    program = flat(b"".join(pieces), bits=bits)
    instructions = Instructions(Code(program))
    instructions.sweep()
    data = program.sections[0].data.tobytes()
    addresses = dict(zip(instructions.transfer.tolist(), instructions.target.tolist(), strict=True))
    row = 0
    for row, instruction in enumerate(Decoder(bits, data, ip=program.sections[0].address)):
        at = instruction.ip - program.sections[0].address
        assert (instructions.start[row], instructions.length[row]) == (at, instruction.len)
        found = (instructions.flow[row], addresses.get(row, 0))
        if instruction.is_invalid:
            assert found[0] == Flow.INVALID
        else:
            assert found == expected(instruction, bits), f"{instruction}: {data[at:][:15].hex()}"
    assert row + 1 == len(instructions.start) > 10_000


def test_an_offset_counts_code_and_an_address_says_where_it_lies() -> None:
    parts = [(0x1000, 3), (0x2000, 2), (0x2002, 4)]
    sections = [
        Section("", address, np.full(size, 0xC3, np.uint8), np.full(size, 0xC3, np.uint8), True)
        for address, size in parts
    ]
    sections[1].stubs = True
    code = Code(Program("x", "ELF", "executable", 64, 8, sections))
    offsets = np.arange(7)
    addresses = [0x1000, 0x1001, 0x1002, 0x2002, 0x2003, 0x2004, 0x2005]
    assert code.size == 7 and code.address(offsets).tolist() == addresses
    assert code.offset(np.asarray(addresses, np.uint64)).tolist() == offsets.tolist()
    outside = np.asarray([0, 0xFFF, 0x1003, 0x2000, 0x2001, 0x2006, (1 << 64) - 1], np.uint64)
    assert (code.offset(outside) == -1).all()


def test_code_in_the_middle_of_instructions_is_decoded_when_asked() -> None:
    # mov eax, 0x90c3eb90: within it nop; jmp back to the middle; behind it the known ret.
    instructions = Instructions(Code(flat(bytes.fromhex("b8 90eb0290 c3 e8f5ffffff 90"))))
    instructions.sweep()
    before = instructions.start.tolist()
    joined = instructions.decode(np.asarray([1]))
    assert instructions.start.tolist() == before, "what was found has to wait"
    assert instructions.waits(np.asarray([0, 1, 2, 3, 5])).tolist() == [
        False, True, True, False, False
    ]  # fmt: skip
    instructions.settle()
    assert joined.tolist() == [6]
    assert instructions.start.tolist() == sorted([*before, 1, 2])
    assert instructions.flow[instructions.row(np.asarray([2]))].tolist() == [Flow.JUMP]
    # Targets are in the order of their instructions.
    targets = dict(zip(instructions.start[instructions.transfer], instructions.target, strict=True))
    assert targets[2] - targets[6] == 6


def test_sections_do_not_run_into_each_other() -> None:
    sections = [
        Section("", address, data, data, True)
        for address, data in (
            (0x1000, np.frombuffer(b"\x90\xe8", np.uint8)),
            (0x1002, np.frombuffer(b"\0\0\0\0\xc3", np.uint8)),
        )
    ]
    instructions = Instructions(Code(Program("x", "ELF", "executable", 64, 8, sections)))
    instructions.sweep()
    assert instructions.start.tolist() == [0, 1, 2, 4, 6]
    assert instructions.flow.tolist() == [
        Flow.NEXT,
        Flow.INVALID,
        Flow.NEXT,
        Flow.NEXT,
        Flow.RETURN,
    ]


def test_more_code_than_offsets_can_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1 << 31,), (0,))
    section = Section("", 0x1000, huge, huge, True)
    with pytest.raises(TokmillError, match="more than 2 GiB of code"):
        Code(Program("big", "ELF", "executable", 64, 8, [section]))
