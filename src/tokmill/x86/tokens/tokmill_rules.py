"""The `tokmill` rules: all operands, numbers by class, and a closed set of tokens.

The tokens of an instruction are, in this order: prefixes, the mnemonic, the operands in the order
of iced-x86, AVX-512 decorators, and implicit registers. The table in docs/x86-tokens.md shows each
part. All names are those of iced-x86's enumerations.
"""

from typing import ClassVar

import iced_x86 as iced

from tokmill.x86.tokens.canonical import flags, full_registers, names, operand_kinds
from tokmill.x86.tokens.rules import Runs, Tokens

NOTHING = "-"
"""The token for no register, no access, no operand or no flag."""
IMPLICIT, DECORATOR = "IMPLICIT", "DECORATOR"
"""Entries of `type` beside the names of `OpCodeOperandKind`."""
BROADCAST, ZEROING, SAE = "BROADCAST", "ZEROING", "SAE"
PREFIXES = ("LOCK", "REP", "REPNE", "NOTRACK")
SCALES = {2: "*2", 4: "*4", 8: "*8"}
SIZE_WORDS = {
    1: "BYTE", 2: "WORD", 4: "DWORD", 6: "FWORD", 8: "QWORD", 10: "TBYTE", 16: "XMMWORD",
    32: "YMMWORD", 64: "ZMMWORD",
}  # fmt: skip
"""Bytes of a memory operand → its token; for other sizes it is `ANY_SIZE`."""
ANY_SIZE = "MEM"
NUMBERS = tuple(f"{kind}{bits}" for kind in ("IMM", "DISP") for bits in (8, 16, 32, 64))
"""Tokens for numbers other than 0, 1 and -1, by their bits in the code."""

ACCESS = {
    "NONE": (0, 0), "READ": (2, 0), "COND_READ": (1, 0), "WRITE": (0, 2), "COND_WRITE": (0, 1),
    "READ_WRITE": (2, 2), "READ_COND_WRITE": (2, 1), "NO_MEM_ACCESS": (0, 0),
}  # fmt: skip
"""`OpAccess` → (read, write): 0 never, 1 conditionally, 2 always."""
JOINED = {parts: name for name, parts in ACCESS.items() if any(parts)} | {
    (1, 1): "READ_COND_WRITE",
    (1, 2): "READ_WRITE",
}

IMMEDIATES = {
    "IMMEDIATE8": 8, "IMMEDIATE8_2ND": 8, "IMMEDIATE16": 16, "IMMEDIATE32": 32, "IMMEDIATE64": 64,
    "IMMEDIATE8TO16": 8, "IMMEDIATE8TO32": 8, "IMMEDIATE8TO64": 8, "IMMEDIATE32TO64": 32,
}  # fmt: skip
"""`OpKind` of an immediate → bits in the code."""
STRINGS = {
    "MEMORY_SEG_SI": "SI", "MEMORY_SEG_ESI": "ESI", "MEMORY_SEG_RSI": "RSI", "MEMORY_SEG_DI": "DI",
    "MEMORY_SEG_EDI": "EDI", "MEMORY_SEG_RDI": "RDI", "MEMORY_ESDI": "DI", "MEMORY_ESEDI": "EDI",
    "MEMORY_ESRDI": "RDI",
}  # fmt: skip
"""`OpKind` of the memory operand of a string instruction → its pointer register."""
SEGMENTS = ("ES", "CS", "SS", "DS", "FS", "GS")


def number(value: int, bits: int, word: str) -> str:
    """Return the class of a number: `0`, `1`, `-1`, else `word`, with `-` if it is negative.

    `value` modulo 2^bits is a number in two's complement.
    """
    value &= (1 << bits) - 1
    if value <= 1:
        return str(value)
    if value == (1 << bits) - 1:
        return "-1"
    return f"-{word}" if value >> (bits - 1) else word


Used = dict[int, tuple[int, int, int]]
"""Full register → (widest used part, read, write), as in `ACCESS`."""


class _Line:
    """Collects the tokens of one instruction, operand by operand."""

    def __init__(self) -> None:
        self.asm: list[str] = []
        self.type: Runs = []
        self.reg: list[str] = []
        self.rw: Runs = []
        self.shown: dict[int, tuple[int, int]] = {}
        """Full register → (read, write) in the tokens so far, as in `ACCESS`."""
        self.begin(NOTHING)

    def begin(self, kind: str) -> None:
        """Begin an operand; if no token follows, it makes no run."""
        self.kind, self.fresh = kind, True

    def add(self, asm: str, reg: str = NOTHING, access: str = "NONE") -> None:
        rw = NOTHING if access == "NONE" else access
        self.asm.append(asm)
        self.reg.append(reg)
        if self.fresh:
            self.type.append((self.kind, 1))
        else:
            self.type[-1] = (self.kind, self.type[-1][1] + 1)
        if not self.fresh and self.rw[-1][0] == rw:
            self.rw[-1] = (rw, self.rw[-1][1] + 1)
        else:
            self.rw.append((rw, 1))
        self.fresh = False

    def add_register(self, register: int, access: str) -> None:
        full = full_registers()[register]
        self.shown[full] = _larger(self.shown.get(full, (0, 0)), ACCESS[access])
        self.add(names("Register")[register], names("Register")[full], access)


class TokmillRules:
    """The default rules."""

    name: ClassVar[str] = "tokmill"
    version: ClassVar[int] = 1

    def __init__(self, bits: int = 64) -> None:
        self.bits = bits
        # In 64-bit code the other segments begin at 0, and their prefixes have no effect.
        self.segments = SEGMENTS if bits == 32 else ("FS", "GS")
        self.info = iced.InstructionInfoFactory().info
        self.evex = iced.EncodingKind.EVEX
        self.memory_size = iced.MemorySizeExt.size
        self.register_number = {name: value for value, name in enumerate(names("Register"))}

    def tokens(self, instruction: iced.Instruction) -> Tokens:
        info: iced.InstructionInfo = self.info(instruction)
        used = _used(info)
        line = _Line()
        for prefix in self._prefixes(instruction):
            line.add(prefix)
        mnemonic = names("Mnemonic")[instruction.mnemonic]
        line.add(mnemonic)
        for place, operand in enumerate(operand_kinds(instruction.code)[: instruction.op_count]):
            line.begin(operand)
            access = names("OpAccess")[info.op_access(place)]
            kind = names("OpKind")[instruction.op_kind(place)]
            if kind == "REGISTER":
                line.add_register(instruction.op_register(place), access)
            elif kind.startswith("MEMORY"):
                self._memory(line, instruction, used, kind, access)
            else:
                for token in _numbers(instruction, place, kind, operand):
                    line.add(token, access=access)
        if instruction.encoding == self.evex:
            self._decorators(line, instruction)
        _implicit(line, used)
        return {
            "asm": line.asm,
            "mne": mnemonic,
            "type": line.type,
            "reg": line.reg,
            "rw": line.rw,
            "eflag": flags(instruction) or NOTHING,
        }

    def _prefixes(self, instruction: iced.Instruction) -> list[str]:
        has_prefix = [
            instruction.has_lock_prefix,
            instruction.has_rep_prefix,
            instruction.has_repne_prefix,
            names("Register")[instruction.segment_prefix] == "DS"
            and (instruction.is_jmp_near_indirect or instruction.is_call_near_indirect),
        ]
        return [prefix for prefix, there in zip(PREFIXES, has_prefix, strict=True) if there]

    def _memory(
        self, line: _Line, instruction: iced.Instruction, used: Used, kind: str, access: str
    ) -> None:
        line.add(SIZE_WORDS.get(self.memory_size(instruction.memory_size), ANY_SIZE), access=access)
        if instruction.is_broadcast:
            line.add(BROADCAST)
        read = "NONE" if access == "NONE" else "READ"
        segment = instruction.segment_prefix
        # The destination of a string instruction is always in ES.
        if names("Register")[segment] in self.segments and not kind.startswith("MEMORY_ES"):
            line.add_register(segment, read)
        if kind in STRINGS:
            pointer = self.register_number[STRINGS[kind]]
            _, reads, writes = used.get(full_registers()[pointer], (pointer, 2, 0))
            line.add_register(pointer, JOINED[reads, writes])
            return
        base, index = instruction.memory_base, instruction.memory_index
        if base:
            line.add_register(base, read)
        if index:
            line.add_register(index, read)
            if instruction.memory_index_scale > 1:
                line.add(SCALES[instruction.memory_index_scale])
        self._displacement(line, instruction, alone=not (base or index))

    def _displacement(self, line: _Line, instruction: iced.Instruction, alone: bool) -> None:
        """Add the displacement, unless it is a 0 that only the encoding requires."""
        size, value = instruction.memory_displ_size, instruction.memory_displacement
        if not size:
            return
        if instruction.is_ip_rel_memory_operand:
            value -= instruction.next_ip
        # iced gives 8 for all displacements that are extended to 64 bits; only `mov al,[offset]`
        # really has 8 bytes.
        if size == 8 and "MEM_OFFS" not in operand_kinds(instruction.code):
            size = 4
        # EVEX multiplies an 8-bit displacement by up to 64, so the value may need 14 bits.
        token = number(value, max(8 * size, 16), f"DISP{8 * size}")
        if alone or token != "0":
            line.add(token)

    def _decorators(self, line: _Line, instruction: iced.Instruction) -> None:
        line.begin(DECORATOR)
        if instruction.has_op_mask:
            line.add_register(instruction.op_mask, "READ")
        if instruction.zeroing_masking:
            line.add(ZEROING)
        if instruction.rounding_control:
            line.add(names("RoundingControl")[instruction.rounding_control])
        if instruction.suppress_all_exceptions:
            line.add(SAE)


def _numbers(instruction: iced.Instruction, place: int, kind: str, operand: str) -> list[str]:
    if kind in IMMEDIATES:
        bits = IMMEDIATES[kind]
        return [number(instruction.immediate(place), bits, f"IMM{bits}")]
    if kind.startswith("NEAR_BRANCH"):
        # The name of the operand kind ends in the bytes of the displacement: BR64_4.
        bits = 8 * int(operand.rpartition("_")[2])
        offset = instruction.near_branch_target - instruction.next_ip
        return [number(offset, bits, f"DISP{bits}")]
    bits = int(kind.removeprefix("FAR_BRANCH"))
    offset = instruction.far_branch32 if bits == 32 else instruction.far_branch16
    selector = number(instruction.far_branch_selector, 16, "IMM16")
    return [selector, number(offset, bits, f"IMM{bits}")]


def _implicit(line: _Line, used: Used) -> None:
    """Add the registers that are read or written, but not shown by the tokens so far."""
    for full in sorted(used):
        register, reads, writes = used[full]
        shown_reads, shown_writes = line.shown.get(full, (0, 0))
        # Every address reads a segment register, so only writes to one are shown.
        if shown_reads or names("Register")[full] in SEGMENTS:
            reads = 0
        if shown_writes:
            writes = 0
        if reads or writes:
            line.begin(IMPLICIT)
            line.add_register(register, JOINED[reads, writes])


def _larger(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])


def _used(info: iced.InstructionInfo) -> Used:
    used: Used = {}
    full_register, access = full_registers(), names("OpAccess")
    for entry in info.used_registers():
        register, parts = entry.register, ACCESS[access[entry.access]]
        full = full_register[register]
        if full in used:
            widest, *before = used[full]
            # Wider parts of a register have larger numbers.
            used[full] = (max(widest, register), *_larger((before[0], before[1]), parts))
        else:
            used[full] = (register, *parts)
    return used
