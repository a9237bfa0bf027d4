"""Symbolic execution of a path of instructions, which is enough to read a switch.

A value is a sum of a number and of unknowns with factors, such as `8 * index + 0x4010`. An unknown
is the value of a register at the beginning of the path, a value in memory, or anything else.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import iced_x86 as iced

MOST_TERMS = 4
LARGEST_INDEX = 1 << 31
"""A comparison with more says nothing of an index."""


class Load(NamedTuple):
    """The value in memory at an address."""

    address: "Value"
    size: int


class Start(NamedTuple):
    """The value of a register at the beginning of the path."""

    register: int


class Other(NamedTuple):
    """A value about which nothing is known."""

    number: int


Unknown = Load | Start | Other


class Value(NamedTuple):
    """`number` plus the sum of factor * unknown."""

    number: int
    terms: tuple[tuple[Unknown, int], ...] = ()

    def plus(self, other: "Value", sign: int = 1) -> "Value":
        if not other.terms:
            return Value(self.number + sign * other.number, self.terms)
        terms = dict(self.terms)
        for unknown, factor in other.terms:
            terms[unknown] = terms.get(unknown, 0) + sign * factor
        kept = tuple((unknown, factor) for unknown, factor in terms.items() if factor)
        return Value(self.number + sign * other.number, kept)

    def times(self, factor: int) -> "Value":
        return Value(self.number * factor, tuple((u, f * factor) for u, f in self.terms))


class Limits(NamedTuple):
    """An unknown is between two numbers, both included."""

    low: int
    high: int


class _Comparison(NamedTuple):
    """What the flags say of a value and a signed number of some bits."""

    value: Value
    number: int
    bits: int
    swapped: bool
    """Whether the number is on the left."""
    half: str = ""
    """The relation that says the same of these low halves, if the flags are of the high ones."""


_NOT = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


_M, _R, _C = iced.Mnemonic, iced.Register, iced.ConditionCode
_ENTERS, _QUIET = _M.CALL, frozenset((_M.CDQE, _M.NOP, _M.ENDBR64, _M.ENDBR32, _M.JMP))
_REGISTER, _MEMORY = iced.OpKind.REGISTER, iced.OpKind.MEMORY
_RELATIONS = {
    _C.B: ("<", False), _C.BE: ("<=", False), _C.A: (">", False), _C.AE: (">=", False),
    _C.L: ("<", True), _C.LE: ("<=", True), _C.G: (">", True), _C.GE: (">=", True),
}  # fmt: skip
_STACK, _FRAME = _R.RSP, (_R.RSP, _R.RBP)
_LOST = (_R.RAX, _R.RCX, _R.RDX, _R.RSI, _R.RDI, _R.R8, _R.R9, _R.R10, _R.R11)
_INFO, _full = iced.InstructionInfoFactory(), iced.RegisterExt.full_register


@cache
def _alone(kind: type[Start] | type[Other], number: int) -> Value:
    return Value(0, ((kind(number), 1),))


class Path:
    """Executes instructions and keeps the values of registers and memory."""

    def __init__(
        self, bits: int, registers: dict[int, Value], thunks: Mapping[int, int],
        gates: Mapping[int, int],
    ) -> None:  # fmt: skip
        self.word = bits // 8
        self.registers = dict(registers)
        self.thunks = thunks
        """Address of a function that returns its return address → the register with the result."""
        self.gates = gates
        """Address of code that jumps to the address in a register → the register."""
        self.memory: dict[Value, Value] = {}
        self.limits: dict[Unknown, Limits] = {}
        """Limits of unknowns, by comparisons on the path."""
        self._compared: _Comparison | None = None
        self._other_count = 0

    def follow(self, instructions: Sequence[Any]) -> Value:
        """Execute a path that ends in an indirect jump, and return the target."""
        self.run(instructions)
        last = instructions[-1]
        if last.mnemonic == _M.RET:
            return self.memory.get(self._register(_STACK)) or self._other()
        gate = self.gates.get(last.near_branch_target)
        return self.operand(last, 0) if gate is None else self._register(gate)

    def run(self, instructions: Sequence[Any]) -> None:
        for instruction, following in pairwise(instructions):
            mnemonic = instruction.mnemonic
            action = _ACTIONS.get(mnemonic)
            if mnemonic == _ENTERS and following.ip == instruction.near_branch_target:
                self._put_on_stack(Value(instruction.next_ip))
            elif action is not None:
                action(self, instruction)
            elif instruction.is_jcc_short_or_near:
                taken = following.ip == instruction.near_branch_target
                self._branch(instruction.condition_code, taken)
            elif mnemonic not in _QUIET:
                self._forget(instruction)

    def argument(self, register: int) -> Value:
        """Return the first argument of a call: in 64-bit code of `register`, else on the stack."""
        if self.word == 8:
            return self._register(register)
        return self.memory.get(self._register(_STACK)) or self._other()

    def operand(self, instruction: Any, number: int) -> Value:
        kind = instruction.op_kind(number)
        if kind == _REGISTER:
            return self._register(instruction.op_register(number))
        if kind == _MEMORY:
            address = self._memory_address(instruction)
            size = iced.MemorySizeExt.size(instruction.memory_size)
            return self.memory.get(address) or Value(0, ((Load(address, size), 1),))
        if kind in (iced.OpKind.FAR_BRANCH16, iced.OpKind.FAR_BRANCH32):
            return self._other()
        value = instruction.immediate(number)
        # A number in a sum is signed; a number that is moved may be an address.
        short = kind == iced.OpKind.IMMEDIATE32 and instruction.mnemonic != _M.MOV
        bits = 32 if short else 64
        return Value(value - (1 << bits) if value >> (bits - 1) else value)

    def _register(self, register: Any) -> Value:
        full = _full(register)
        return self.registers.get(full) or _alone(Start, full)

    def _memory_address(self, instruction: Any) -> Value:
        if instruction.is_ip_rel_memory_operand:
            return Value(instruction.ip_rel_memory_address)
        number = instruction.memory_displacement
        if number >> (8 * self.word - 1):
            number -= 1 << (8 * self.word)
        address = Value(number)
        if base := instruction.memory_base:
            address = address.plus(self._register(base))
        if index := instruction.memory_index:
            index = self._register(index)
            address = address.plus(index.times(instruction.memory_index_scale))
        return address if len(address.terms) <= MOST_TERMS else self._other()

    def _other(self) -> Value:
        self._other_count += 1
        return _alone(Other, self._other_count)

    def _set(self, instruction: Any, value: Value) -> None:
        if len(value.terms) > MOST_TERMS:
            value = self._other()
        if instruction.op0_kind == _REGISTER:
            self.registers[_full(instruction.op0_register)] = value
        elif instruction.op0_kind == _MEMORY:
            self.memory[self._memory_address(instruction)] = value

    def _move(self, instruction: Any) -> None:
        value = self.operand(instruction, 1)
        bits = 8 * self._size(instruction, 1)
        if instruction.mnemonic == _M.MOVZX:
            limits = self.limits.get(value.terms[0][0]) if len(value.terms) == 1 else None
            if len(value.terms) != 1 or value.terms[0][1] != 1:
                value = self._other()
            elif limits is not None and limits.low + value.number < 0:
                low, high = limits.low + value.number, limits.high + value.number
                value = self._other()
                if high < 0:
                    self.limits[value.terms[0][0]] = Limits(low + (1 << bits), high + (1 << bits))
            if bits == 8:
                # A byte has at most 256 values, even if nothing else is known.
                self.limits.setdefault(value.terms[0][0], Limits(-value.number, 255 - value.number))
        self._set(instruction, value)

    def _size(self, instruction: Any, number: int) -> int:
        if instruction.op_kind(number) == _REGISTER:
            return int(iced.RegisterExt.size(instruction.op_register(number)))
        return int(iced.MemorySizeExt.size(instruction.memory_size))

    def _address(self, instruction: Any) -> None:
        self._set(instruction, self._memory_address(instruction))

    def _add(self, instruction: Any) -> None:
        self._compared = None
        self._set(instruction, self.operand(instruction, 0).plus(self.operand(instruction, 1)))

    def _subtract(self, instruction: Any) -> None:
        self._compare(instruction)
        self._set(instruction, self.operand(instruction, 0).plus(self.operand(instruction, 1), -1))

    def _compare(self, instruction: Any) -> None:
        left, right = self.operand(instruction, 0), self.operand(instruction, 1)
        self._compared = None
        if bool(left.terms) != bool(right.terms):
            swapped, bits = not left.terms, 8 * self._size(instruction, 0)
            number = (left if swapped else right).number % (1 << bits)
            number -= number >> (bits - 1) << bits
            self._compared = _Comparison(right if swapped else left, number, bits, swapped)

    def _and(self, instruction: Any) -> None:
        self._compared = None
        mask, value = self.operand(instruction, 1), self._other()
        if not mask.terms and 0 < mask.number < 1 << 16:
            self.limits[value.terms[0][0]] = Limits(0, mask.number)
        self._set(instruction, value)

    def _shift(self, instruction: Any) -> None:
        self._compared = None
        by, value = self.operand(instruction, 1), self.operand(instruction, 0)
        is_small = not by.terms and 0 <= by.number < 8
        self._set(instruction, value.times(1 << by.number) if is_small else self._other())

    def _xor(self, instruction: Any) -> None:
        self._compared = None
        left, right = self.operand(instruction, 0), self.operand(instruction, 1)
        self._set(instruction, Value(0) if left == right else self._other())

    def _push(self, instruction: Any) -> None:
        self._put_on_stack(self.operand(instruction, 0))

    def _put_on_stack(self, value: Value) -> None:
        self.registers[_STACK] = top = self._register(_STACK).plus(Value(-self.word))
        self.memory[top] = value

    def _pop(self, instruction: Any) -> None:
        top = self._register(_STACK)
        self._set(instruction, self.memory.get(top) or self._other())
        self.registers[_STACK] = top.plus(Value(self.word))

    def _call(self, instruction: Any) -> None:
        self._compared = None
        target, behind = instruction.near_branch_target, instruction.next_ip
        if target == behind:
            self._put_on_stack(Value(behind))
        elif target in self.thunks:
            self.registers[self.thunks[target]] = Value(behind)
        else:
            for register in _LOST[: 9 if self.word == 8 else 3]:
                self.registers[register] = self._other()
            self.memory = {at: value for at, value in self.memory.items() if self._is_local(at)}

    def _is_local(self, address: Value) -> bool:
        """Return whether an address is in the stack frame, which calls do not change."""
        return all(isinstance(u, Start) and u.register in _FRAME for u, _ in address.terms)

    def _forget(self, instruction: Any) -> None:
        if instruction.rflags_modified:
            self._compared = None
        for used in _INFO.info(instruction).used_registers():
            access, kinds = used.access, iced.OpAccess
            if access not in (kinds.READ, kinds.COND_READ, kinds.NONE, kinds.NO_MEM_ACCESS):
                self.registers[_full(used.register)] = self._other()
        if instruction.op_count and instruction.op0_kind == _MEMORY:
            self.memory.pop(self._memory_address(instruction), None)

    def _borrow(self, instruction: Any) -> None:
        """Compare the high halves of two numbers, after the low ones.

        Where no borrow tells that one is not less than the other, the low halves had none either:
        the left one is 0 or the right one -1. An index of a table has no other high half.
        """
        low, self._compared = self._compared, None
        left, right = self.operand(instruction, 0), self.operand(instruction, 1)
        self._set(instruction, self._other())
        if low is not None:
            less = right == Value(0) or left == Value(-1)
            self._compared = low._replace(half="<" if less else ">=")

    def _branch(self, condition: Any, taken: bool) -> None:
        if self._compared is None or condition not in _RELATIONS:
            return
        relation, signed = _RELATIONS[condition]
        relation = relation if taken else _NOT[relation]
        value, number, bits, swapped, half = self._compared
        if len(value.terms) != 1 or value.terms[0][1] != 1 or half not in ("", relation):
            return
        relation = _SWAPPED[relation] if swapped else relation
        unknown, moved = value.terms[0][0], -value.number
        # The last comparison counts: other paths may avoid the earlier ones.
        if relation.startswith("<"):
            high = (number if signed else number % (1 << bits)) - (relation == "<")
            if 0 <= high < LARGEST_INDEX:
                self.limits[unknown] = Limits(moved, moved + high)
        elif number < 0 and not signed:
            # Numbers above one that is near the largest are the negative ones above it.
            low = number + (relation == ">")
            self.limits[unknown] = Limits(moved + low, moved - 1)


_ACTIONS: dict[int, Callable[[Path, Any], None]] = {
    _M.MOV: Path._move, _M.MOVZX: Path._move, _M.MOVSX: Path._move, _M.MOVSXD: Path._move,
    _M.LEA: Path._address, _M.ADD: Path._add, _M.SUB: Path._subtract, _M.AND: Path._and,
    _M.CMP: Path._compare, _M.SHL: Path._shift, _M.XOR: Path._xor, _M.PUSH: Path._push,
    _M.POP: Path._pop, _M.CALL: Path._call, _M.SBB: Path._borrow,
}  # fmt: skip
