"""Damaged programs and random bytes: refused with a reason or lifted, in little time and room."""

import functools
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokmill.base.errors import TokmillError
from tokmill.x86.image.program import parse_program
from tokmill.x86.lift.cfg import lift
from tokmill.x86.tokens.rules import DecodeError, decode
from tokmill.x86.tokens.templates import Templates
from x86_programs import (
    C_SOURCE,
    CPP_SOURCE,
    check_graph,
    compiles,
    flat,
    pe_file,
    stripped,
    without_sections,
)

SECONDS, MEMORY = 10, 1 << 30
STRINGS = 20
NUMBERS = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFF0, 1 << 62, 1 << 63, (1 << 64) - 1)
PIECES = (
    "e8", "e9", "eb", "74", "0f84", "ff24c5", "c3", "f3c3", "488d05", "48630488", "ffe0", "83f8",
    "77", "66", "67", "62f1", "c5f8", "9c", "0f0b", "cc", "ff2485", "9a", "ea",
)  # fmt: skip
"""Beginnings of jumps, calls, tables, ends."""


@contextmanager
def in_little_room() -> Iterator[None]:
    """Fail if the process grows by more than `MEMORY` within, whatever other tests took."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    yield
    assert status("VmHWM") - before < MEMORY


@contextmanager
def in_time() -> Iterator[None]:
    """Fail after `SECONDS` of processor time, even in an endless loop."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError(f"it took more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@functools.cache
def originals(folder: Path) -> list[bytes]:
    """Return programs of all forms, small enough that ten thousand of them take minutes."""
    plain = compiles(folder, "plain", C_SOURCE, "-O2")
    paths = [
        plain,
        stripped(plain),
        stripped(plain, ".eh_frame", ".eh_frame_hdr"),
        without_sections(stripped(plain)),
        compiles(folder, "fixed", C_SOURCE, "-O1", "-no-pie"),
        compiles(folder, "object.o", C_SOURCE, "-O2", "-c"),
        compiles(folder, "shared.so", C_SOURCE, "-O2", "-shared", "-fPIC"),
        compiles(folder, "cxx", CPP_SOURCE, "-O1", by="g++"),
        compiles(folder, "narrow", C_SOURCE, "-O2", "-m32"),
    ]
    try:
        by = "x86_64-w64-mingw32-gcc"
        paths.append(compiles(folder, "small.exe", C_SOURCE, "-O2", "-s", by=by))
    except pytest.skip.Exception:
        pass
    code = bytes.fromhex("ff15fa0f0000 e802000000 c3 90 55 4889e5 5d c3") * 9
    by_hand = pe_file(code, ("ExitProcess",), ((0x1000, 0x1010), (0x1010, 0x1020)))
    return [*(path.read_bytes() for path in paths), by_hand]


def mutated(data: bytes, generator: random.Random) -> bytes:
    """Return a program with some damage: cut off, or numbers and bytes in it changed."""
    found, size = bytearray(data), len(data)
    if generator.random() < 0.08:
        return data[: generator.randrange(size)]
    for _ in range(generator.choice((1, 2, 5, 20, 100))):
        # Headers at the beginning, tables at the end, or anywhere.
        low, high = generator.choice(((0, 0x400), (size - 0x1000, size), (0, size), (0, size)))
        place = generator.randrange(max(0, low), min(high, size))
        kind = generator.random()
        if kind < 0.5:
            found[place] = generator.choice((0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)))
        elif kind < 0.9:
            width = generator.choice((2, 4, 8))
            value = generator.choice(
                (*NUMBERS, generator.getrandbits(64), generator.getrandbits(16))
            )
            found[place : place + width] = value.to_bytes(8, "little")[: min(width, size - place)]
        else:
            # Both ends have to lie in the file, or it would shrink.
            length = min(generator.randrange(1, 400), size - place)
            other = generator.randrange(size - length + 1)
            found[place : place + length] = found[other : other + length]
    return bytes(found[:size])


@in_little_room()
def check_damaged(folder: Path, seed: int, count: int) -> None:
    generator = random.Random(seed)
    refused: dict[str, int] = {}
    path = folder / f"damaged-{seed}"
    for number in range(count):
        data = mutated(generator.choice(originals(folder)), generator)
        path.write_bytes(data)
        try:
            with in_time():
                graph = lift(parse_program(np.frombuffer(data, np.uint8), str(path)))
            assert graph.program == path.name
        except TokmillError as error:
            assert error.what and error.hint
            refused[error.what] = refused.get(error.what, 0) + 1
        except BaseException:
            print(f"input {number} of seed {seed} is in {path}", file=sys.stderr)
            raise
    # Refusing everything is no way to pass, nor is taking everything.
    assert 0 < sum(refused.values()) < count / 2


def random_code(generator: random.Random) -> bytes:
    """Return bytes at random, or pieces that look like code with jumps between them."""
    if generator.random() < 0.5:
        return generator.randbytes(generator.randrange(200))
    pieces = [bytes.fromhex(piece) for piece in PIECES]
    return b"".join(
        generator.choice(pieces) + generator.randbytes(generator.randrange(5)) for _ in range(30)
    )


@in_little_room()
def check_random(seed: int, count: int) -> None:
    """Lift strings, some to a program as its sections, and decode each alone."""
    generator = random.Random(seed)
    templates = {bits: Templates("tokmill", bits) for bits in (64, 32)}
    for _ in range(count // STRINGS):
        codes = [random_code(generator) for _ in range(STRINGS)]
        bits, base = generator.choice((64, 32)), generator.choice((0x1000, 0x401000, 0xFFFF0000))
        with in_time():
            graph = lift(flat(*filter(None, codes), bits=bits, base=base))
            if len(graph.lengths):
                numbers = templates[bits].numbers(graph.code, graph.lengths)
                assert len(numbers) == len(graph.lengths)
            for code in codes:
                try:
                    decode(code, 0x401000, bits)
                except DecodeError as error:
                    assert error.what and error.hint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))]


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_programs_are_refused_or_lifted(folder: Path, seed: int) -> None:
    check_damaged(folder, seed, count=150 if seed == 1 else 1000)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_bytes_are_lifted(seed: int) -> None:
    check_random(seed, count=2000 if seed == 1 else 10_000)


@given(st.binary(min_size=1, max_size=120), st.sampled_from((64, 32)))
def test_a_graph_of_any_bytes_keeps_what_it_promises(code: bytes, bits: int) -> None:
    check_graph(lift(flat(code, bits=bits)), None)


@pytest.mark.parametrize(
    "path", ["/bin/ls", "/bin/bash", "/usr/bin/gzip", "/lib/x86_64-linux-gnu/libz.so.1"]
)
def test_graphs_of_system_programs_keep_what_they_promise(path: str) -> None:
    graph = lift(path)
    check_graph(graph, Path(path))
    assert len(graph.function_address) > 20
