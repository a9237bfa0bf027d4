"""PE file → `Program`, by lief: sections, COFF symbols, imports, exports, unwind ranges.

Microsoft, "PE Format" and "x64 exception handling". Addresses count from the preferred image base.
"""

import warnings
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, Section, Unwind, clipped, name_functions, refuse_cut

MAGIC = b"MZ"
MACHINES = {
    0x1C0: "ARM", 0x1C4: "ARM", 0xAA64: "ARM64", 0xA641: "ARM64EC", 0xA64E: "ARM64X",
    0x200: "IA-64", 0x5032: "RISC-V", 0x5064: "RISC-V", 0x6232: "LoongArch", 0x6264: "LoongArch",
    0xEBC: "EFI byte code", 0x166: "MIPS", 0x1F0: "PowerPC", 0x1A2: "SuperH",
}  # fmt: skip
BITS = {0x14C: 32, 0x8664: 64}
CODE, EXECUTE, WRITE, DLL = 0x20, 0x20000000, 0x80000000, 0x2000
FUNCTION, EXTERNAL, STATIC = 2, 2, 3
MASK = (1 << 64) - 1
CLI_HEADER, CLI_BYTES, IL_ONLY = 14, 72, 1
"""The directory of .NET, the size of its header, and a flag in it."""
NOTHING = np.zeros(0, np.uint8)
CHAINED = 4
"""Flag of unwind information that goes on with that of another range."""


def read_pe(data: Array, path: str) -> Program:
    """Return the program in a PE file (u1).

    Raises `TokmillError` for another machine, a damaged file, one that is cut off or without code.
    """
    with warnings.catch_warnings():
        # lief warns of numbers in a damaged file that it has no name for.
        warnings.simplefilter("ignore", RuntimeWarning)
        return _read(data, path)


def _read(data: Array, path: str) -> Program:
    head = data[:0x40].tobytes()
    place = int.from_bytes(head[0x3C:0x40], "little")
    if len(head) < 0x40 or data[place : place + 4].tobytes() != b"PE\0\0":
        raise TokmillError("a DOS program", where=path, hint="ELF and PE files are read")
    machine = int.from_bytes(data[place + 4 : place + 6].tobytes(), "little")
    if machine not in BITS:
        name = MACHINES.get(machine, f"machine {machine:#x}")
        raise TokmillError(
            f"a PE file for {name}", where=path, hint="x86-64 and 32-bit x86 are read"
        )
    lief = plugins.require("lief")
    lief.logging.disable()
    options = lief.PE.ParserConfig()
    options.parse_signature = options.parse_rsrc = options.parse_reloc = False
    options.parse_exceptions = False
    binary = lief.PE.parse(path, options)
    if binary is None:
        raise TokmillError("the PE header is damaged", where=path, hint="is the file complete?")
    base = int(binary.optional_header.imagebase)
    _refuse_managed(binary, data, path)
    sections = []
    for one in binary.sections:
        start, size = int(one.pointerto_raw_data), int(one.sizeof_raw_data)
        # The padding after what is loaded need not be there.
        size = min(size, int(one.virtual_size) or size)
        refuse_cut(path, len(data), start + size if start else 0)
        part = data[start : start + size if start else 0]
        flags = int(one.characteristics)
        address = base + int(one.virtual_address)
        execute = bool(flags & EXECUTE)
        sections.append(Section(_name(one), address, part, part, execute))
        sections[-1].constant = not flags & WRITE
    sections = clipped(sections, len(data))
    if not any(section.execute for section in sections):
        raise TokmillError("it holds no code", where=path, hint="does it hold resources only?")
    bits = BITS[machine]
    shared = int(binary.header.characteristics) & DLL
    program = Program(
        path, "PE", "shared" if shared else "executable", bits, bits // 8, sections, fixed=True
    )
    program.top = base + int(binary.optional_header.sizeof_image)
    entry = int(binary.optional_header.addressof_entrypoint)
    program.entry = base + entry if entry else 0
    _name_functions(program, binary, base)
    _name_slots(program, binary, base)
    _read_tables(program, binary, base)
    return program


def _directories(binary: Any) -> dict[int, Any]:
    return {int(one.type): one for one in binary.data_directories}


def _refuse_managed(binary: Any, data: Array, path: str) -> None:
    """Refuse a .NET assembly that holds IL alone. Source: ECMA-335, II.25.3.3, the CLI header."""
    directory = _directories(binary).get(CLI_HEADER)
    rva = int(directory.rva) if directory is not None else 0
    header = data[int(binary.rva_to_offset(rva)) :][:CLI_BYTES] if rva else data[:0]
    if len(header) == CLI_BYTES:
        flags = int(header[16:20].view("<u4")[0])
        native = int(header[68:72].view("<u4")[0])
        if flags & IL_ONLY and not native:
            raise TokmillError(
                "a .NET assembly: it holds IL, and no x86 code",
                where=path,
                hint="compiled to x86 (Native AOT, ReadyToRun, mixed C++/CLI) it can be read",
            )


def _name(thing: Any) -> str:
    """Return the name of lief's object; "" for one that is not UTF-8, on which it gives up."""
    try:
        name = thing.name
    except (SystemError, UnicodeDecodeError):
        return ""
    return name if isinstance(name, str) else name.decode("utf-8", "replace")


def _name_functions(program: Program, binary: Any, base: int) -> None:
    start = [base + int(one.virtual_address) for one in binary.sections]
    names, address, rank = [], [], []
    data: list[tuple[int, str]] = []
    for symbol in binary.symbols:
        number = int(symbol.section_idx)
        if not 0 < number <= len(start):
            continue
        name, at = _name(symbol), start[number - 1] + int(symbol.value)
        kept = int(symbol.storage_class)
        if int(symbol.complex_type) == FUNCTION:
            names.append(name)
            address.append(at)
            rank.append(0 if kept == EXTERNAL else 3)
        elif kept in (EXTERNAL, STATIC) and not name.startswith("."):
            data.append((at & MASK, name))
    exports = binary.get_export()
    starts = []
    for one in exports.entries if exports is not None else ():
        if not one.is_forwarded:
            starts.append(base + int(one.address))
            names.append(_name(one))
            address.append(starts[-1])
            rank.append(1)
    places = np.asarray([one & MASK for one in address], np.uint64)
    name_functions(program, places, np.zeros(len(places), np.uint64), np.asarray(rank), names)
    more = np.asarray([at for at, _ in data], np.uint64)
    program.symbol_address = np.concatenate([places, more])
    program.symbol_size = np.zeros_like(program.symbol_address)
    program.symbol_name = [*names, *(name for _, name in data)]
    entries = exports.entries if exports is not None else ()
    program.exports = sorted({_name(one) or f"#{int(one.ordinal)}" for one in entries})
    callbacks = binary.tls.callbacks if binary.has_tls else ()
    program.starts = np.asarray([int(one) & MASK for one in (*starts, *callbacks)], np.uint64)


def _name_slots(program: Program, binary: Any, base: int) -> None:
    slots = {}
    for library in (*binary.imports, *binary.delay_imports):
        place = int(getattr(library, "iat", 0))
        for number, one in enumerate(library.entries):
            # The entries of a delay import know their place in its table alone.
            at = int(getattr(one, "iat_address", 0)) or place + number * program.word
            name = f"ordinal {one.ordinal}" if one.is_ordinal else _name(one)
            full = f"{_name(library)}!{f'#{one.ordinal}' if one.is_ordinal else name}"
            slots[(base + at) & MASK] = (name, full)
    program.slot_address = np.asarray(sorted(slots), np.uint64)
    program.slot_name = [slots[place][0] for place in sorted(slots)]
    program.slot_full_name = [slots[place][1] for place in sorted(slots)]
    program.slot_target = np.zeros(len(slots), np.uint64)


def _read_tables(program: Program, binary: Any, base: int) -> None:
    directories = _directories(binary)
    table = directories.get(3)
    if program.bits == 64 and table is not None and table.rva:
        # Begin, end, unwind information; the low bit of the last points to another row.
        raw = program.read(base + table.rva, table.size)
        rows = raw[: len(raw) // 12 * 12].view("<u4").reshape(-1, 3).astype(np.uint64)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        rows = rows[rows[:, 1] > rows[:, 0]]
        start = rows[:, 0] + np.uint64(base)
        flags = program.load(rows[:, 2] + np.uint64(base), size=1) >> 3
        chained = ((flags & CHAINED) > 0) | (rows[:, 2] & 1 > 0)
        program.unwind = Unwind(start, rows[:, 1] + np.uint64(base), chained)
    table = directories.get(5)
    raw = program.read(base + table.rva, table.size) if table and table.rva else NOTHING
    place, slots = 0, [program.pointer_address]
    while place + 8 <= len(raw):
        page, size = (int(x) for x in raw[place : place + 8].view("<u4"))
        if size < 8:
            break
        entries = raw[place + 8 : place + 8 + (size - 8) // 2 * 2]
        words = entries[: len(entries) // 2 * 2].view("<u2").astype(np.uint64)
        # Kind 3 is a pointer of 4 bytes, 10 of 8.
        kept = words[np.isin(words >> 12, (3, 10))]
        slots.append((kept & np.uint64(0xFFF)) + np.uint64(base + page))
        place += size
    program.pointer_address = np.concatenate(slots)
    program.pointers = program.load(program.pointer_address)
