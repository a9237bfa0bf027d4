"""Damaged files of every kind, read by every reader: a clean error, or right, and nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutations import mutate
from readers import READERS
from running import Server

from tokmill import plugins

SHORT, LONG = 800, 100_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def check(server: Server, name: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage, read, print a line of the table; fail with what can be replayed by its seed."""
    found = server(name, max(1, round(count * READERS[name].share)))
    assert "broken" not in found, found["broken"]
    with capsys.disabled():
        print(
            f"\n{name:<22} {found['mutations']:>7,} mutations {found['clean']:>7,} clean "
            f"{found['right']:>7,} right {found['other']:>3} other {found['seconds']:>6.1f} s"
            f"{'' if READERS[name].share == 1 else f'  {READERS[name].share:g} of them'}",
            end="",
        )
    assert not found["failures"], "\n".join([f"reader {name!r}:", *found["failures"]])


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_told_or_right(
    name: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    check(server, name, SHORT, capsys)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_damage_in_great_number(
    name: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    check(server, name, LONG, capsys)


def test_every_source_and_export_has_its_reader() -> None:
    """A new line in `plugins` needs one in `readers.READERS`."""
    assert set(plugins.SOURCES) - {reader.source for reader in READERS.values()} == set()
    assert set(plugins.EXPORTS) - {reader.export for reader in READERS.values()} == set()


def test_every_reader_has_its_line_in_the_page_on_security(repository: Path) -> None:
    table = re.search(r"^\| input .*?\n\n", (repository / "SECURITY.md").read_text(), re.M | re.S)
    assert table
    named = [name for line in table[0].strip().splitlines()[2:] for name in
             re.findall(r"`([^`]+)`", line.rsplit("|", 2)[1])]  # fmt: skip
    assert sorted(named) == sorted(READERS)


def test_mutations_are_replayed_by_their_seed() -> None:
    data = b'{"a": [1, 2.5, "text"], "b": {"c": null}}' * 3
    assert [mutate(data, seed) for seed in range(200)] == [mutate(data, s) for s in range(200)]
    assert len({mutate(data, seed)[0] for seed in range(400)}) == 14
    assert all(mutate(data, seed)[1] != data for seed in range(2000))


def test_the_harness_sees_what_it_is_for() -> None:
    """A reader that crashes, hangs on memory, or lies is a failure; one that dies too."""
    import running
    from readers import Reader, Refused

    def make(folder: Path) -> list[Path]:
        (folder / "a").write_bytes(bytes(range(100)))
        return [folder / "a"]

    def reading(act: object) -> object:
        def read(folder: Path) -> object:
            if (folder / "a").read_bytes() == bytes(range(100)):
                return "whole"
            return act()  # type: ignore[operator]

        return read

    def refuse() -> None:
        raise Refused("damaged", hint="mend it")

    def die() -> None:
        import os

        os._exit(3)

    acts = {
        "clean": refuse,
        "ValueError": lambda: int("x"),
        "wrong without a word": lambda: "another",
        "memory ran out": lambda: bytearray(1 << 40),
        "died": die,
    }
    before = dict(READERS)
    try:
        for name, act in acts.items():
            READERS["probe"] = Reader(make, reading(act), digests=True)  # type: ignore[arg-type]
            found = running.run("probe", 3, 0)
            assert found["mutations"] == 3
            # What takes too much memory is a clean error too: the limit of `bounds` is held.
            if name in ("clean", "memory ran out"):
                assert (found["clean"], found["other"]) == (3, 0)
            else:
                assert all(name in failure for failure in found["failures"]), found
                assert found["other"] == 3
    finally:
        READERS.clear()
        READERS.update(before)
