"""Instructions as hashes to compare them by, without the numbers in them.

Every different encoding (`tokmill.x86.tokens.canonical`: numbers by class) is decoded once.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.store.checks.hashes import mix
from tokmill.store.schema import Array
from tokmill.x86.graph import Graph
from tokmill.x86.image.image import numbered
from tokmill.x86.tokens.canonical import LONGEST, canonical_words

AT_ONCE = 1 << 20
"""Instructions at a time."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class Instructions:
    """The I instructions of a graph."""

    code: Array
    """(I,) u8, a hash of the canonical bytes: instructions with equal hashes differ only in
    numbers. If an instruction has an address relative to itself, or on the stack, the size of the
    number is left out too."""
    form: Array
    """(I,) u8, a hash of the mnemonic, the kinds of operands and the sizes of memory operands,
    without registers and numbers. 0 for bytes that are not an instruction."""
    mnemonic: Array
    """(I,) u2, number of the mnemonic (iced-x86); 0 for bytes that are not an instruction."""
    width: Array
    """(I,) i8, bytes that the memory operand reads or writes; 0 where there is none."""


def instructions_of(graph: Graph) -> Instructions:
    """Return the hashes of the instructions of a graph."""
    if len(graph.lengths) and not 1 <= graph.lengths.min() <= graph.lengths.max() <= LONGEST:
        raise TokmillError(
            f"the graph has instructions without bytes, or with more than {LONGEST}",
            where=graph.program,
            hint="it is damaged: make it again",
        )
    codes, keys = [], []
    ends = np.concatenate([[0], np.cumsum(graph.lengths, dtype=np.int64)])
    for first in range(0, len(graph.lengths), AT_ONCE):
        last = min(first + AT_ONCE, len(graph.lengths))
        code = graph.code[ends[first] : ends[last]]
        low, high = canonical_words(code, graph.lengths[first:last], graph.bits)
        codes.append(mix(mix(low) + high))
        _, rows = np.unique(codes[-1], return_index=True)
        keys.append(np.stack([low[rows], high[rows]], axis=1))
    if not codes:
        none = np.zeros(0, np.uint64)
        return Instructions(none, none, none.astype(np.uint16), none.astype(np.int64))
    hashes = np.concatenate(codes)
    different, number = numbered(hashes)
    all_keys = np.concatenate(keys)
    rows = np.unique(mix(mix(all_keys[:, 0]) + all_keys[:, 1]), return_index=True)[1]
    decoded = _decoded(different, all_keys[rows], graph.bits)
    return Instructions(*(column[number] for column in decoded))


def _decoded(hashes: Array, keys: Array, bits: int) -> tuple[Array, Array, Array, Array]:
    """Return the columns of `Instructions` of canonical encodings, (n, 2) u8, and their hashes."""
    raw = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, LONGEST + 1)
    text = raw[np.arange(LONGEST + 1) < raw[:, LONGEST:]].tobytes()
    iced = plugins.require("iced_x86")
    form, mnemonic = np.zeros(len(raw), np.uint64), np.zeros(len(raw), np.uint16)
    kinds = np.zeros((len(raw), 8), np.uint64)
    relative = np.zeros(len(raw), bool)
    parts = np.zeros((len(raw), 6), np.uint64)
    stack = {iced.Register.RSP, iced.Register.ESP, iced.Register.RBP, iced.Register.EBP}
    branches = {iced.OpKind.NEAR_BRANCH16, iced.OpKind.NEAR_BRANCH32, iced.OpKind.NEAR_BRANCH64}
    place, decoder, one = 0, iced.Decoder(bits, text), iced.Instruction()
    for row, size in enumerate(raw[:, LONGEST].tolist()):
        decoder.position = place
        decoder.decode_out(one)
        place += size
        if not one or len(one) != size:
            continue
        mnemonic[row] = one.mnemonic
        for number in range(min(one.op_count, 5)):
            kind = one.op_kind(number)
            kinds[row, number] = 1 + kind
            relative[row] |= kind in branches
            if kind == iced.OpKind.REGISTER:
                parts[row, number] = one.op_register(number)
        base, counted = one.memory_base, one.is_ip_rel_memory_operand
        if counted or base in stack:
            relative[row] = True
            parts[row, 5] = (
                (0 if counted else base) | one.memory_index << 8 | one.memory_index_scale << 16
                | one.segment_prefix << 20 | one.op_mask << 28 | one.zeroing_masking << 36
                | one.has_lock_prefix << 37 | one.has_rep_prefix << 38
                | one.has_repne_prefix << 39
            )  # fmt: skip
        kinds[row, 5] = one.memory_size
    for column in range(kinds.shape[1]):
        form = mix(form * _GOLDEN + kinds[:, column])
    form = mix(form + mnemonic)
    form[mnemonic == 0] = 0
    code = form.copy()
    for column in range(parts.shape[1]):
        code = mix(code * _GOLDEN + parts[:, column])
    sizes = np.asarray([_size(number) for number in range(int(kinds[:, 5].max(initial=0)) + 1)])
    return np.where(relative, code, hashes), form, mnemonic, sizes[kinds[:, 5].astype(np.int64)]


@cache
def _size(memory_size: int) -> int:
    return plugins.require("iced_x86").MemorySizeExt.size(memory_size)
