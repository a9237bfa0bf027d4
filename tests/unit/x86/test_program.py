"""Program files: what is opened, what is refused and how, names."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.x86.image.elf import Elf
from tokmill.x86.image.image import Section, clipped
from tokmill.x86.image.program import demangle, open_program, parse_program
from x86_programs import C_SOURCE, assembled, compiles, pe_file, run, without_sections


def elf_header(machine: int, kind: int = 2, wide: int = 2, order: int = 1) -> bytes:
    """Return an ELF file that is nothing but a header."""
    form = "<" if order == 1 else ">"
    head = b"\x7fELF" + bytes((wide, order, 1)) + bytes(9) + struct.pack(form + "HH", kind, machine)
    return head.ljust(64, b"\0")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "an empty file"),
        (b"hello, world\n" * 9, "not a program"),
        (b"!<arch>\nx.o/   0", "a static library"),
        (b"\x64\x86\2\0" + bytes(40), "a COFF object file"),
        (b"\xcf\xfa\xed\xfe" + struct.pack("<I", 0x100000C), "not a program"),
        (elf_header(40, wide=1), "an ELF file for ARM"),
        (elf_header(183), "an ELF file for AArch64"),
        (elf_header(243), "an ELF file for RISC-V"),
        (elf_header(22, order=2), "an ELF file for S/390"),
        (elf_header(9999), "an ELF file for machine 9999"),
        (elf_header(62, kind=4), "a core dump"),
        (elf_header(62, kind=9), "an ELF file of an unknown type"),
        (elf_header(62, wide=7), "the ELF header is damaged"),
        (elf_header(62)[:40], "the ELF header is damaged"),
        (elf_header(62)[:12], "the ELF header is cut off"),
        (elf_header(62), "it holds no code"),
        (b"MZ" + bytes(10), "a DOS program"),
        (b"MZ" + bytes(62), "a DOS program"),
        (b"MZ" + bytes(58) + b"\x40\0\0\0NE\0\0", "a DOS program"),
        (pe_file(b"\xc3").replace(b"PE\0\0\x64\x86", b"PE\0\0\x64\xaa"), "a PE file for ARM64"),
        (pe_file(b"\xc3").replace(b"PE\0\0\x64\x86", b"PE\0\0\x34\x12"), "for machine 0x1234"),
        (pe_file(b"\xc3")[:0x60], "the PE header is damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_no_x86_program_is_refused_by_its_name(
    tmp_path: Path, data: bytes, what: str
) -> None:
    path = tmp_path / "input"
    path.write_bytes(data)
    with pytest.raises(TokmillError) as raised:
        open_program(path)
    assert what in raised.value.what
    assert raised.value.where == str(path)
    assert raised.value.hint


def test_a_path_without_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="there is no such file"):
        open_program(tmp_path / "nothing")
    with pytest.raises(TokmillError, match="a folder, not a program"):
        open_program(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TokmillError, match="not a file"):
        open_program(tmp_path / "pipe")


def test_a_program_cut_off_without_its_sections_is_refused(built: Path) -> None:
    whole = without_sections(assembled(built, "bare", ".globl _start\n_start: call f\nf: ret\n"))
    data = np.frombuffer(whole.read_bytes(), np.uint8)
    needed = Elf(data, "whole").needed()
    assert parse_program(data[:needed], "whole").entry
    with pytest.raises(TokmillError, match="the file is cut off") as raised:
        parse_program(data[: needed - 1], "cut")
    assert f"ends at {needed - 1:,} bytes, its headers speak of {needed:,}" in raised.value.hint


def test_debug_information_split_off_is_no_cut_program(built: Path) -> None:
    path = compiles(built, "debug", C_SOURCE, "-O1", "-g")
    split = built / "debug.split"
    run("objcopy", "--only-keep-debug", str(path), str(split))
    with pytest.raises(TokmillError, match="it holds no code"):
        open_program(split)


def test_a_cut_pe_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.exe"
    path.write_bytes(pe_file(b"\xc3")[:-1])
    with pytest.raises(TokmillError, match="the file is cut off") as raised:
        open_program(path)
    assert "8,703 bytes, its headers speak of 8,704" in raised.value.hint


def test_cxx_names_are_shown_as_they_were_written() -> None:
    names = ["main", "_ZN3foo3barEiPKc", "_ZSt9terminatev", "_Zbroken", "", "_start", "_Z1fDF16b"]
    names.append("_Z14run_Accumulatev")
    assert demangle(names) == [
        "main", "foo::bar(int, char const*)", "std::terminate()", "_Zbroken", "", "_start",
        "_Z1fDF16b", "run_Accumulate()",
    ]  # fmt: skip


def test_cxx_names_of_many_references() -> None:
    """Each parameter holds the one before twice: ten are 26 KB, 25 are a gigabyte."""

    def doubling(times: int) -> str:
        digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        parts = (f"S0_I{2 * f'S{digits[1 + i]}_'}E" for i in range(times))
        return "_Z1f1A1PIS_S_E" + "".join(parts)

    few, many, too_many = demangle([doubling(n) for n in (3, 10, 25)])
    types = ["P<A, A>"]
    for _ in range(10):
        types.append(f"P<{types[-1]}, {types[-1]} >")
    assert few == f"f(A, {', '.join(types[:4])})"
    assert many == f"f(A, {', '.join(types)})"
    assert too_many == doubling(25)


def test_sections_that_overlap_are_cut() -> None:
    def section(name: str, address: int, size: int) -> Section:
        data = np.arange(size, dtype=np.uint8)
        return Section(name, address, data, data, True)

    parts = clipped([section("b", 110, 20), section("a", 100, 20), section("c", 112, 4)], 1000)
    assert [(p.name, p.address, p.data.tolist()) for p in parts] == [
        ("a", 100, list(range(20))), ("b", 120, list(range(10, 20)))
    ]  # fmt: skip
    # Together they are no larger than the file, and none goes on past the last address.
    assert (
        sum(len(p.data) for p in clipped([section("a", 0, 90), section("b", 99, 90)], 100)) == 100
    )
    assert clipped([section("a", (1 << 64) - 5, 90)], 1000)[0].stop == (1 << 64) - 1
