"""What debug information says of compilers, in every form that compilers here can write."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.image.program import Producer, producer_of, read_producer
from x86_programs import C_SOURCE, CPP_SOURCE, compiles, run, stripped


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("-g -O2", "O2"),
        ("-g", "O0"),
        ("-g -O", "O1"),
        ("-g -Os -gdwarf-4", "Os"),
        ("-g -O3 -gdwarf-2", "O3"),
        ("-g -O1 -gdwarf64", "O1"),
        ("-g -O3 -gz", "O3"),
        ("-g -O1 -O2", "O2"),
    ],
)
def test_gcc_says_version_and_level(built: Path, flags: str, level: str) -> None:
    path = compiles(built, f"gcc{flags.replace(' ', '')}", C_SOURCE, *flags.split())
    version = run("gcc", "-dumpfullversion").strip()
    assert producer_of(path) == Producer(f"gcc-{version}", level)


def test_a_unit_has_the_producer_that_it_names_first(built: Path) -> None:
    """The place of the first text, 0, is also that of the lowest address of units with ranges."""
    parts = []
    for n, level in enumerate(("-O0", "-O2", "-O2", "-O2")):
        apart = f'__attribute__((section(".text.apart"))) int apart{n}(int a) {{ return a + {n}; }}'
        source = f"int f{n}(int a) {{ return a; }} {apart if n else ''}"
        parts.append(str(compiles(built, f"unit{n}.o", source, "-c", "-g", level)))
    run("ld", "-e", "f0", "-o", str(built / "units"), *parts)
    assert producer_of(built / "units").level == "O2"


def test_other_compilers(built: Path) -> None:
    path = compiles(built, "producer-cpp", CPP_SOURCE, "-g", "-Ofast", by="g++")
    assert producer_of(path).level == "Ofast"
    if shutil.which("clang"):
        for flags in (("-g",), ("-g", "-gdwarf-4")):
            path = compiles(built, "producer-clang" + "".join(flags), C_SOURCE, *flags, by="clang")
            assert producer_of(path).compiler.startswith("clang-") and not producer_of(path).level
        flags = ("-g", "-grecord-command-line", "-O2")
        assert (
            producer_of(compiles(built, "producer-clang-O2", C_SOURCE, *flags, by="clang")).level
            == "O2"
        )


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("GNU C++17 13.1.0 -m64 -mtune=generic -O2 -fPIC", Producer("gcc-13.1.0", "O2")),
        ("GNU GIMPLE 12.2.0 -Os -fltrans", Producer("gcc-12.2.0", "Os")),
        ("GNU AS 2.40", Producer()),
        ("Debian clang version 14.0.6", Producer("clang-14.0.6", "")),
        ("clang LLVM (rustc version 1.75.0 (82e1608df 2023-12-21))", Producer("rustc-1.75.0", "")),
        ("Go cmd/compile go1.21.5; regabi", Producer("go-1.21.5", "")),
        ("something else", Producer()),
    ],
)
def test_texts_of_producers(text: str, made: Producer) -> None:
    assert read_producer(text) == made


def test_nothing_is_known_without_debug_information(built: Path, tmp_path: Path) -> None:
    path = compiles(built, "producer", C_SOURCE, "-g", "-O2")
    (tmp_path / "text").write_text("no program")
    (tmp_path / "empty").write_bytes(b"")
    objects = compiles(built, "producer.o", C_SOURCE, "-g", "-c")
    for other in (stripped(path), objects, tmp_path / "text", tmp_path / "empty"):
        assert producer_of(other) == Producer()


def test_damaged_information_is_passed_over(built: Path, tmp_path: Path) -> None:
    data = np.fromfile(compiles(built, "producer", C_SOURCE, "-g", "-O2"), np.uint8)
    random = np.random.default_rng(0)
    path = tmp_path / "damaged"
    for _ in range(200):
        changed = data.copy()
        # The sections of debug information lie in the second half of the file.
        places = random.integers(len(data) // 2, len(data), 200)
        changed[places] = random.integers(0, 256, 200)
        path.write_bytes(changed[: int(random.integers(len(data) // 2, len(data)))].tobytes())
        assert len(producer_of(path)) == 2
        path.write_bytes(changed.tobytes())
        assert len(producer_of(path)) == 2
