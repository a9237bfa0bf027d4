"""Whether code can be the entry of a function: an entry reads no register that is not set.

At an entry only arguments and the stack pointer have defined values. Other registers are saved but
not read, and no flag is set (System V ABI for x86-64, section 3.2.3; the argument registers of
Microsoft's convention are among these). Code of compilers follows this, random bytes do not.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.lift.code import Code

if TYPE_CHECKING:
    from iced_x86 import Instruction

LOOK = 6
"""Instructions that are checked."""
REACH = 32
"""Bytes after an impossible entry that are searched for a possible one."""
SAMPLE = 2048
"""Known functions whose first instructions are counted."""
KEPT = 0.95
"""Share of them that must follow the convention; some languages have other conventions."""
FEWEST = 3
"""Known functions that must have the same first instruction as a guessed one."""
BYTES = 15 * LOOK
ONES = 0xFF
NOWHERE = -1


def nearest_entries(code: Code, functions: Array, offsets: Array, stop: Array) -> Array:
    """Return offsets (i8, n) in which impossible entries are moved to a possible one, or `NOWHERE`.

    An entry is moved to the place before `stop` (i8, n) that begins like most known `functions`
    (i8). Nothing is moved if the program's functions do not follow the convention, and in 32-bit
    code, whose arguments are on the stack.
    """
    moved = offsets.copy()
    if code.bits != 64 or not len(functions):
        return moved
    entries = _Entries(code)
    wrong = [row for row, at in enumerate(offsets.tolist()) if not entries.possible(at)]
    if not wrong:
        return moved
    step = -(-len(functions) // SAMPLE)
    known = functions[::step].tolist()
    if sum(map(entries.possible, known)) < KEPT * len(known):
        return moved
    begins = Counter(map(entries.first, known))
    for row in wrong:
        at = int(offsets[row])
        places = range(at + 1, min(at + 1 + REACH, int(stop[row])))
        # Among equally frequent ones, the first.
        best = max(
            (place for place in places if entries.possible(place)),
            key=lambda place: begins[entries.first(place)],
            default=at,
        )
        usual = best > at and begins[entries.first(best)] >= FEWEST
        moved[row] = best if usual else NOWHERE
    return moved


def possible_entries(code: Code, offsets: Array) -> Array:
    """Return which offsets (i8) are possible entries: bool; in 32-bit code none."""
    if code.bits != 64 or not len(offsets):
        return np.zeros(len(offsets), bool)
    entries = _Entries(code)
    return np.asarray([entries.possible(at) for at in offsets.tolist()], bool)


class _Entries:
    """Checks the first instructions at offsets of a program's code, with iced-x86."""

    def __init__(self, code: Code) -> None:
        iced = plugins.require("iced_x86")
        self.code, self.iced = code, iced
        self.info = iced.InstructionInfoFactory().info
        register, access, kind, flow = iced.Register, iced.OpAccess, iced.OpKind, iced.FlowControl
        names = ("RDI", "RSI", "RDX", "RCX", "R8", "R9", "RSP", "RIP")
        self.arguments = {getattr(register, name) for name in names}
        self.general = set(range(register.RAX, register.R15 + 1))
        self.reads = {access.READ, access.COND_READ, access.READ_WRITE, access.READ_COND_WRITE}
        self.writes = {access.WRITE, access.READ_WRITE}
        self.memory, self.register = kind.MEMORY, kind.REGISTER
        self.stack = {register.RSP, register.RBP}
        self.segments = {register.NONE, register.FS, register.GS}
        self.goes_on = {flow.NEXT, flow.CONDITIONAL_BRANCH}
        self.ends = {
            flow.CALL, flow.INDIRECT_CALL, flow.RETURN, flow.UNCONDITIONAL_BRANCH,
            flow.INDIRECT_BRANCH, flow.EXCEPTION,
        }  # fmt: skip
        mnemonic = iced.Mnemonic
        self.push, self.pop, self.mov = mnemonic.PUSH, mnemonic.POP, mnemonic.MOV
        self.test, self.nop = mnemonic.TEST, mnemonic.NOP
        self.clearing, self.or_ = {mnemonic.XOR, mnemonic.SUB}, mnemonic.OR
        self.bytes = {kind.IMMEDIATE8TO16, kind.IMMEDIATE8TO32, kind.IMMEDIATE8TO64}

    def _instructions(self, offset: int) -> Any:
        data = self.code.linked[offset : offset + BYTES].tobytes()
        return self.iced.Decoder(64, data)

    def first(self, offset: int) -> int:
        """Return the `Code` of the first instruction."""
        code: int = self._instructions(offset).decode().code
        return code

    def possible(self, offset: int) -> bool:
        known = set(self.arguments)
        flags = pushed = False
        for _, instruction in zip(range(LOOK), self._instructions(offset), strict=False):
            odd = instruction.segment_prefix not in self.segments
            if instruction.is_invalid or (odd and instruction.mnemonic != self.nop):
                return False
            if instruction.rflags_read & ~self.iced.RflagsBits.DF and not flags:
                return False
            pushed |= instruction.mnemonic == self.push
            if instruction.mnemonic == self.pop and not pushed:
                return False
            if not self._reads_known(instruction, known):
                return False
            flags |= bool(instruction.rflags_modified)
            if instruction.flow_control not in self.goes_on:
                return instruction.flow_control in self.ends
        return True

    def _reads_known(self, instruction: Instruction, known: set[int]) -> bool:
        """Say whether an instruction reads only known registers; add those that it sets."""
        # The results of `xor eax, eax` and `or eax, -1` do not depend on the register.
        clears = (
            instruction.mnemonic in self.clearing
            and instruction.op0_kind == instruction.op1_kind == self.register
            and instruction.op0_register == instruction.op1_register
        ) or (
            instruction.mnemonic == self.or_
            and instruction.op0_kind == self.register
            and instruction.op1_kind in self.bytes
            and instruction.immediate8 == ONES
        )
        saves = instruction.mnemonic == self.push or (
            instruction.mnemonic == self.mov
            and instruction.op0_kind == self.memory
            and instruction.memory_base in self.stack
        )
        written = set()
        for used in self.info(instruction).used_registers():
            register = self.iced.RegisterExt.full_register(used.register)
            if register not in self.general:
                continue
            # With a variable number of arguments, AL is the number of vector registers used.
            counts = instruction.mnemonic == self.test and register == self.iced.Register.RAX
            free = clears or saves or counts
            if used.access in self.reads and register not in known and not free:
                return False
            if used.access in self.writes or clears:
                written.add(register)
        known |= written
        return True
