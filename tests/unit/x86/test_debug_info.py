"""DWARF of programs that are compiled here, against their symbols."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokmill.base.errors import TokmillError
from tokmill.x86.image.debug.debug_info import DebugInfo, read_debug_info
from x86_programs import C_SOURCE, CPP_SOURCE, compiler, compiles, run, stripped, symbols

CLONES = r"""
#include <stdio.h>
static __attribute__((noinline)) int scaled(int x, int by) { return printf("%d\n", x * by); }
__attribute__((noinline)) int rare(const char *x, int n) {
    int sum = 0;
    for (; *x; x++) {
        if (n == 7) { int *p = 0; sum += *p; __builtin_trap(); }
        sum += *x;
    }
    return sum;
}
int main(int argc, char **argv) {
    for (int i = 0; i < argc; i++) scaled(rare(argv[i], argc), 7);
    return scaled(argc + 1, 7);
}
"""
WAYS = [
    ("gcc", "-gdwarf-4", "-O0"), ("gcc", "-gdwarf-5", "-O0"), ("gcc", "-gdwarf-5", "-O1"),
    ("gcc", "-gdwarf-5", "-O2"), ("gcc", "-gdwarf-4", "-O3"), ("gcc", "-gdwarf-5", "-flto", "-O2"),
    ("gcc", "-gdwarf-5", "-O2", "-gz"), ("gcc", "-gdwarf-2", "-O2"), ("gcc", "-g", "-m32", "-O2"),
    ("clang", "-gdwarf-4", "-O0"), ("clang", "-gdwarf-5", "-O0"), ("clang", "-gdwarf-5", "-O2"),
    ("clang", "-gdwarf-4", "-O3"),
]  # fmt: skip


def named(info: DebugInfo) -> dict[str, int]:
    return dict(zip(info.name, info.entry.tolist(), strict=True))


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_functions_are_those_of_the_symbols(built: Path, way: tuple[str, ...]) -> None:
    by, *flags = way
    path = compiles(built, f"debug-{'-'.join(way)}", C_SOURCE, *flags, by=by)
    info, places = read_debug_info(path), symbols(path)
    assert {"main", "dispatch", "walk"} <= set(info.name)
    for name, entry in named(info).items():
        # Clones have the name of what they were made of.
        assert name in {known.partition(".")[0] for known, at in places.items() if at == entry}
    assert not info.left_out
    units = {info.files[unit] for unit in info.unit.tolist() if unit >= 0}
    assert {Path(file).suffix for file in units} <= {".c"}


def test_parts_belong_to_their_function_and_clones_have_its_name(built: Path) -> None:
    path = compiles(built, "debug-clones", CLONES, "-g", "-O3")
    info = read_debug_info(path)
    places = {name: address for name, address in symbols(path).items() if "." in name}
    cold = next(address for name, address in places.items() if name == "rare.cold")
    assert info.name[info.function_at(np.array([cold], np.uint64))[0]] == "rare"
    assert named(info)["rare"] == symbols(path)["rare"]
    clone = next(address for name, address in places.items() if name.startswith("scaled."))
    number = info.name.index("scaled")
    assert info.entry[number] == clone
    assert info.clone.tolist() == [name == "scaled" for name in info.name]


def test_names_of_cpp_are_those_of_the_linker(built: Path) -> None:
    for by in ("g++", "clang++"):
        path = compiles(built, f"debug-{by}", CPP_SOURCE, "-g", "-O1", by=by)
        info = read_debug_info(path)
        assert any(name.startswith("_Z7measureRKSt6vector") for name in info.name)
        # A destructor that is that of the whole and of the base at once is one function.
        assert len(set(info.entry.tolist())) == len(info.name)
        assert named(info)["_ZN5ThingD2Ev"] == symbols(path)["_ZN5ThingD2Ev"]


def test_a_file_of_debug_information_alone(built: Path) -> None:
    path = compiles(built, "debug-whole", C_SOURCE, "-g", "-O2")
    alone = path.with_name("debug-alone")
    run(compiler("objcopy"), "--only-keep-debug", str(path), str(alone))
    one, other = read_debug_info(path), read_debug_info(alone)
    assert named(one) == named(other)


def test_names_that_dwz_moved_are_those_of_the_symbols(built: Path) -> None:
    paths = [
        compiles(built, f"debug-dwz-{place}", f"{C_SOURCE}int n{place};\n", "-g", "-O1")
        for place in "ab"
    ]
    before = [named(read_debug_info(path)) for path in paths]
    run(compiler("dwz"), "-m", str(built / "debug-dwz-common"), *map(str, paths))
    assert [named(read_debug_info(path)) for path in paths] == before


def test_inlined_functions_are_described_without_code(built: Path) -> None:
    info = read_debug_info(compiles(built, "debug-inlined", C_SOURCE, "-g", "-O3"))
    assert {"give_up", "die"} <= set(info.name)
    source = (
        "static int twice(int x) { return 2 * x; }\nint main(int c, char **v) { return twice(c); }"
    )
    info = read_debug_info(compiles(built, "debug-inlined-2", source, "-g", "-O2"))
    assert info.name == ["main"]
    assert {name for name, _ in info.described} == {"twice"}


def test_what_is_refused(built: Path, tmp_path: Path) -> None:
    whole = compiles(built, "debug-whole", C_SOURCE, "-g", "-O2")
    with pytest.raises(TokmillError, match="it has no debug information") as caught:
        read_debug_info(stripped(whole))
    assert "-g" in caught.value.hint
    with pytest.raises(TokmillError, match="no ELF file"):
        read_debug_info(Path(__file__))
    with pytest.raises(TokmillError, match="an object file"):
        read_debug_info(compiles(built, "debug-object", C_SOURCE, "-g", "-c"))
    with pytest.raises(TokmillError, match=r"\.dwo files"):
        read_debug_info(compiles(built, "debug-split", C_SOURCE, "-g", "-gsplit-dwarf"))
    with pytest.raises(TokmillError, match="no such file"):
        read_debug_info(tmp_path / "none")


@pytest.mark.parametrize("section", [".debug_info", ".debug_abbrev"])
def test_damage_is_told(built: Path, tmp_path: Path, section: str) -> None:
    whole = compiles(built, "debug-whole", C_SOURCE, "-g", "-O2")
    filled = tmp_path / "filled"
    filled.write_bytes(b"\xff" * 64)
    damaged = tmp_path / "damaged"
    run(compiler("objcopy"), "--update-section", f"{section}={filled}", str(whole), str(damaged))
    with pytest.raises(TokmillError, match="cannot be read") as caught:
        read_debug_info(damaged)
    assert caught.value.where == str(damaged)
