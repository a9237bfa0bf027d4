"""Import stubs of ELF files: jumps through the global offset table, and the names of imports."""

from __future__ import annotations

import re

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, Section
from tokmill.x86.image.ranges import member

LANDING = np.frombuffer(b"\xf3\x0f\x1e\xfa\xf3\x0f\x1e\xfb", np.uint8).reshape(2, 4)
"""ENDBR64 and ENDBR32."""
GAP = 32
"""Largest distance of successive stubs in a section of stubs."""
LONG_ENTRY, SHORT = 16, 8
"""Bytes of an entry of a linkage table, and of one that is never resolved lazily."""
LAZY_ENTRY = re.compile(
    rb"\xff[\x25\xa3].{4}\x68.{4}\xe9"  # jmp [slot]; push number; jmp first
    rb"|\xf3\x0f\x1e[\xfa\xfb]\x68.{4}\xf2?\xe9",  # endbr; push number; jmp first
    re.DOTALL,
)
ENTRY = re.compile(
    rb"\xf3\x0f\x1e[\xfa\xfb]\xf2?\xff[\x25\xa3].{4}(\x66?\x0f\x1f\x44\0\0|\xcc+|\x90+)",
    re.DOTALL,
)
SHORT_ENTRY = re.compile(rb"\xff[\x25\xa3].{4}\x66\x90", re.DOTALL)
RET = b"\xc3"
FIRST_ENTRY = (b"\xff\x35", b"\xff\xb3")
"""What jumps to the loader: push [table + word]; jmp [table + 2 * word]."""


def find_stubs(program: Program) -> None:
    """Name the import stubs of a linked program.

    A stub is `jmp [slot]` (FF 25; in 32-bit position-independent code FF A3, relative to EBX),
    with or without ENDBR and a BND prefix. If the file has no section table, the stubs are cut out
    of the code as separate sections.
    """
    addresses, names, targets = [], [], []
    sections = []
    named = any(section.stubs for section in program.sections)
    for section in program.sections:
        if not section.execute or (named and not section.stubs):
            sections.append(section)
            continue
        place, slot = _jumps(program, section)
        is_slot = member(slot, program.slot_address)
        if not section.name:
            is_slot[is_slot] = _are_entries(section, place[is_slot])
        place = place[is_slot]
        row = np.searchsorted(program.slot_address, slot[is_slot])
        addresses.append(place.astype(np.uint64) + np.uint64(section.address))
        targets.append(program.slot_target[row])
        names += [program.slot_name[i] for i in row.tolist()]
        sections += [section] if section.name else _cut_out(section, place)
    program.sections = sections
    if addresses:
        address = np.concatenate(addresses)
        order = np.argsort(address, kind="stable")
        program.import_address = address[order]
        program.import_target = np.concatenate(targets)[order]
        program.import_name = [names[i] for i in order.tolist()]


def _jumps(program: Program, section: Section) -> tuple[Array, Array]:
    """Return the places of possible stubs in a section (i8) and the slots they jump through."""
    data = section.linked
    if len(data) < 6:
        return np.zeros(0, np.int64), np.zeros(0, np.uint64)
    forms = (0x25,) if program.bits == 64 else (0x25, 0xA3)
    place = np.flatnonzero((data[:-5] == 0xFF) & np.isin(data[1:-4], forms))
    slot = data[place[:, None] + np.arange(2, 6)].view("<i4")[:, 0].astype(np.uint64)
    if program.bits == 64:
        slot += place.astype(np.uint64) + np.uint64(section.address + 6)
    else:
        slot[data[place + 1] == 0xA3] += np.uint64(program.global_offset_table)
    if program.word == 4:
        slot &= np.uint64(0xFFFFFFFF)
    bound = (place > 0) & (data[place - 1] == 0xF2)
    place = place - bound
    before = np.maximum(place - 4, 0)[:, None] + np.arange(4)
    landing = (data[before][:, None, :] == LANDING).all(axis=2).any(axis=1) & (place >= 4)
    return place - 4 * landing, slot


def _are_entries(section: Section, place: Array) -> Array:
    """Return which jumps through slots are entries of a linkage table, not ends of functions: bool.

    Entries are aligned and go on as GNU ld, gold and lld write them. A function may look like one
    that is not resolved lazily: these follow another entry, or a section of other code.
    """
    result = np.zeros(len(place), bool)
    stop = 0
    for i, at in enumerate(place.tolist()):
        head = section.linked[at : at + LONG_ENTRY].tobytes()
        before = section.linked[max(0, at - LONG_ENTRY) : at].tobytes()
        aligned = (section.address + at) % LONG_ENTRY == 0
        follows = at == stop or before.startswith(FIRST_ENTRY) or LAZY_ENTRY.match(before)
        follows = follows or (
            aligned and before.endswith(b"\0") and before.rstrip(b"\0")[-1:] == RET
        )
        if aligned and (LAZY_ENTRY.match(head) or (follows and ENTRY.fullmatch(head))):
            result[i], stop = True, at + LONG_ENTRY
        elif follows and SHORT_ENTRY.match(head) and (section.address + at) % SHORT == 0:
            result[i], stop = True, at + SHORT
    return result


def _cut_out(section: Section, place: Array) -> list[Section]:
    """Return the parts of a section; parts with stubs are marked."""
    found, done = [], 0
    for run in np.split(place, np.flatnonzero(np.diff(place) > GAP) + 1) if len(place) else []:
        start, stop = int(run[0]), min(int(run[-1]) + LONG_ENTRY, len(section.data))
        before = section.linked[max(0, start - LONG_ENTRY) : start].tobytes()
        start -= LONG_ENTRY * before.startswith(FIRST_ENTRY)
        found.append(section.cut(done, start))
        found.append(section.cut(start, stop))
        found[-1].stubs = True
        done = stop
    found.append(section.cut(done, len(section.data)))
    return [part for part in found if len(part.data)]
