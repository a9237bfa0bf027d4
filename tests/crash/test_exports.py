"""Exports that are killed or damaged: the same one again completes them, `store validate` tells."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from interval_stores import write_intervals
from making import quick_build, rec, write_store
from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import MachineError, TokmillError
from tokmill.formats import notes
from tokmill.formats.notes import check
from tokmill.store.schema import Column
from tokmill.store.store import Store

EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    # kind: (where to, options)
    "bin": ("out.bin", {}),
    "npz": ("out", {"max_length": 8, "stride": 8, "pad_id": 0, "windows_per_file": 12}),
    "npz per input": ("out", {"max_length": 8, "stride": 8, "pad_id": 0, "per_input": True}),
    "token-dicts": ("out", {"sequences_per_file": 3}),
    "corpus": ("out", {}),
    "triplets": ("out", {"cpi": True}),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    folder = tmp_path_factory.mktemp("exports")
    rows = [rec(range(i % 13), name=f"n{i}") for i in range(60)]
    schema = {"token": Column("u2"), "name": Column("utf8", per="record")}
    plain = write_store(folder / "s", schema, [rows[:40], rows[40:]])
    import pickle

    one = {
        "asm": ["MOV", "EAX", "IMM"], "mne": "MOV", "type": [("[PAD]", 1), ("R32_REG", 2)],
        "reg": ["[PAD]", "RAX", "[PAD]"], "rw": [("[PAD]", 1), ("WRITE", 2)], "eflag": "[PAD]",
    }  # fmt: skip
    (folder / "a.pkl").write_bytes(pickle.dumps([[one] * (1 + i) for i in range(10)], 4))
    code = quick_build("token-dicts", folder / "a.pkl", folder / "x")
    profiles = write_intervals(folder / "p", programs=1, intervals=30)
    mined = quick_build("mine", profiles.path, folder / "m", what="bbv", cpi=True)
    others = {"token-dicts": code, "corpus": code, "triplets": mined}
    return {kind: others.get(kind, plain) for kind in EXPORTS}


def write(kind: str, store: Store, folder: Path, **more: Any) -> None:
    out, options = EXPORTS[kind]
    export = plugins.load(plugins.EXPORTS, kind.split()[0])
    export(recipe.convert(export.Config, {**options, **more})).write(store, folder / out)


def place(kind: str, folder: Path) -> Path:
    """Where the files and the note of an export are."""
    return folder / "out" if (folder / "out").is_dir() else folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files but those that hold times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "tokenization_stats.json"
    }


def files(folder: Path) -> dict[str, bytes]:
    """The files of an export without its note, and without the lock that a kill leaves."""
    found = contents(folder)
    return {n: data for n, data in found.items() if notes.SUFFIX not in n and ".lock" not in n}


@pytest.mark.parametrize("kind", EXPORTS)
def test_an_export_that_is_killed_anywhere_is_completed(
    kind: str, stores: dict[str, Store], tmp_path: Path
) -> None:
    """Killed in the middle of its first, second, … file: the same export ends equal."""
    write(kind, stores[kind], tmp_path / "whole")
    wanted = files(tmp_path / "whole")
    assert len(wanted) > (0 if kind in ("bin", "triplets") else 1)
    for number in range(1, 2 * len(wanted) + 4):
        folder = tmp_path / f"killed-{number}"
        if killed_at(number, kind, stores[kind], folder):
            assert not check(place(kind, folder)).ok or not files(folder)
            write(kind, stores[kind], folder)
        assert files(folder) == wanted, number
        assert check(place(kind, folder)).ok
        assert not [path for path in folder.rglob("*") if path.name.startswith(".tmp-")]


def killed_at(number: int, kind: str, store: Store, folder: Path) -> bool:
    """Export in a process that kills itself inside its n-th file; say if it came to that."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    try:
        seen = 0
        write_file = notes.write_file

        def dying(path: Path, chunks: Any, **more: Any) -> Path:
            nonlocal seen
            seen += 1

            def parts(inside: Iterable[Any]) -> Iterator[Any]:
                yield from list(inside)[:1]
                os.kill(os.getpid(), signal.SIGKILL)

            if seen == number:
                return write_file(path, parts([chunks] if isinstance(chunks, bytes) else chunks))
            return write_file(path, chunks, **more)

        notes.write_file = dying  # type: ignore[assignment]
        write(kind, store, folder)
    finally:
        os._exit(0)


@pytest.mark.parametrize("kind", EXPORTS)
def test_two_exports_at_the_same_time(
    kind: str, stores: dict[str, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into one place the second is refused; in one folder neither removes what the other writes."""
    write(kind, stores[kind], tmp_path / "whole")
    whole, tried = notes.write_file, 0

    def meanwhile(path: Path, chunks: Any, **more: Any) -> Path:
        def parts(inside: Any) -> Iterator[Any]:
            nonlocal tried
            tried += 1
            for number, part in enumerate([inside] if isinstance(inside, bytes) else inside):
                if not number and tried == 2:
                    with pytest.raises(MachineError, match="another process is writing"):
                        write(kind, stores[kind], tmp_path / "both")
                    notes.write_noted(path.parent, "another", "figure", {"another.csv": "1"})
                yield part

        return whole(path, parts(chunks), **more)

    monkeypatch.setattr(notes, "write_file", meanwhile)
    write(kind, stores[kind], tmp_path / "both")
    assert tried > 1
    found = files(tmp_path / "both")
    assert {name for name in found if "another.csv" in name}
    found = {name: data for name, data in found.items() if "another.csv" not in name}
    assert found == files(tmp_path / "whole")
    assert check(place(kind, tmp_path / "both")).ok


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
@pytest.mark.parametrize("kind", EXPORTS)
def test_a_damaged_file_is_told_and_written_again(
    kind: str, damage: str, stores: dict[str, Store], tmp_path: Path
) -> None:
    write(kind, stores[kind], tmp_path)
    wanted = files(tmp_path)
    where = place(kind, tmp_path)
    assert check(where).ok and check(where).files >= len(wanted)
    for name in wanted:
        path = tmp_path / name
        if damage == "missing":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(wanted[name][: len(wanted[name]) // 2])
        else:
            path.write_bytes(bytes([wanted[name][0] ^ 1]) + wanted[name][1:])
        assert str(path) in [problem.where for problem in check(where).problems]
        write(kind, stores[kind], tmp_path)
        assert files(tmp_path) == wanted and check(where).ok


def test_the_files_of_another_export_are_refused(stores: dict[str, Store], tmp_path: Path) -> None:
    """A reader takes all that it finds; a damaged note makes no stranger of its files."""
    write("npz", stores["npz"], tmp_path)
    with pytest.raises(TokmillError, match="other options"):
        write("npz", stores["npz"], tmp_path, max_length=9)
    (tmp_path / "out" / "other.npz").write_bytes(b"")
    with pytest.raises(TokmillError, match=r"other\.npz"):
        write("npz", stores["npz"], tmp_path)


def test_the_command_checks_an_export(
    stores: dict[str, Store], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokmill.cli import main

    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return int(str(ended.value.code)), said.out + said.err

    write("bin", stores["bin"], tmp_path)
    export = plugins.load(plugins.EXPORTS, "bin")
    export(export.Config()).write(stores["bin"], tmp_path / "two.bin")
    assert run("store", "validate", tmp_path)[0] == 0
    assert "2 files" in run("store", "validate", tmp_path)[1]
    assert "1 file" in run("store", "validate", tmp_path / "out.bin")[1]
    (tmp_path / "out.bin").write_bytes(b"")
    code, said = run("store", "validate", tmp_path)
    assert code == 1 and "out.bin: 0 bytes instead of" in said and "store export" in said
    assert run("store", "validate", tmp_path / "two.bin")[0] == 0


def test_readers_of_the_formats_do_not_see_the_note(
    stores: dict[str, Store], tmp_path: Path
) -> None:
    write("npz", stores["npz"], tmp_path)
    built = quick_build("npz", tmp_path / "out", tmp_path / "built")
    assert built.records > 0


FOREIGN = {
    # kind: (where to, a file that may be anybody's)
    "bin": ("f", "f/tokens.bin"),
    "token-dicts": ("f", "f/tokens.pkl"),
    "triplets": ("f", "f/triplets.pkl"),
    "npz": ("f", "f/tokenization_stats.json"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_files_whose_names_tokmill_chose_replace_none_of_others(
    kind: str, stores: dict[str, Store], tmp_path: Path
) -> None:
    out, name = FOREIGN[kind]
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(b"mine")
    export = plugins.load(plugins.EXPORTS, kind)
    options = {"pad_id": 0, "max_length": 8, "stride": 8} if kind == "npz" else {}
    exporter = export(recipe.convert(export.Config, options))
    with pytest.raises(TokmillError, match="not written by an export") as caught:
        exporter.write(stores[kind], tmp_path / out)
    assert str(path) in str(caught.value)
    assert contents(tmp_path) == {name: b"mine"} or kind == "npz"
    assert path.read_bytes() == b"mine"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.unlink()
    # Its own it replaces, after a kill and with another store's content too.
    exporter.write(stores[kind], tmp_path / out)
    exporter.write(stores[kind], tmp_path / out)
    if kind == "bin":
        rows = [rec(range(3), name="n")]
        schema = {"token": Column("u2"), "name": Column("utf8", per="record")}
        other = write_store(tmp_path / "other", schema, [rows])
        before = path.read_bytes()
        exporter.write(other, tmp_path / out)
        assert path.read_bytes() != before and check(path).ok


def test_a_file_that_the_user_named_is_replaced(stores: dict[str, Store], tmp_path: Path) -> None:
    (tmp_path / "out.bin").write_bytes(b"old")
    write("bin", stores["bin"], tmp_path)
    assert check(tmp_path / "out.bin").ok


def test_what_was_ours_stays_ours_when_the_next_export_is_killed(
    stores: dict[str, Store], tmp_path: Path
) -> None:
    """Of another store, so that nothing is left alone."""
    export = plugins.load(plugins.EXPORTS, "bin")
    exporter = export(export.Config())
    exporter.write(stores["bin"], tmp_path / "f")
    old = (tmp_path / "f/tokens.bin").read_bytes()
    schema = {"token": Column("u2")}
    other = write_store(tmp_path / "s", schema, [[rec([1, 2])]])
    for number in (1, 2, 3):
        child = os.fork()
        if not child:
            killed_before(number, lambda: exporter.write(other, tmp_path / "f"))
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert killed == -signal.SIGKILL
        exporter.write(stores["bin"], tmp_path / "f")
        assert (tmp_path / "f/tokens.bin").read_bytes() == old


def killed_before(number: int, run: Callable[[], object]) -> None:
    """End this process before the n-th file that an export writes, notes included."""
    seen = 0
    write_file = notes.write_file

    def dying(path: Path, chunks: Any, **more: Any) -> Path:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return write_file(path, chunks, **more)

    try:
        notes.write_file = dying  # type: ignore[assignment]
        run()
    finally:
        os._exit(0)


def test_an_export_that_fails_leaves_the_note_of_the_one_before(
    stores: dict[str, Store], tmp_path: Path
) -> None:
    export = plugins.load(plugins.EXPORTS, "bin")
    export(export.Config()).write(stores["bin"], tmp_path / "f")
    wide = write_store(tmp_path / "s", {"token": Column("u4")}, [[rec([1, 1 << 20])]])
    with pytest.raises(TokmillError, match="does not fit"):
        export(recipe.convert(export.Config, {"dtype": "u2"})).write(wide, tmp_path / "f")
    assert check(tmp_path / "f/tokens.bin").ok
    export(export.Config()).write(wide, tmp_path / "f")


def test_files_beside_plots_and_lists(tmp_path: Path) -> None:
    """A file of the user's own is refused; ours is replaced, with other content too."""
    path = tmp_path / "a_tokens.txt"
    path.write_text("mine")
    with pytest.raises(TokmillError, match="would be replaced"):
        notes.write_noted(tmp_path, "lists", "vocabulary", {"b.txt": "b", path.name: "ours"})
    assert contents(tmp_path) == {path.name: b"mine"}
    path.unlink()
    for text in ("ours", "ours", "other"):
        notes.write_noted(tmp_path, "lists", "vocabulary", {"b.txt": "b", path.name: text})
        assert path.read_text() == text and check(tmp_path).ok
    path.write_text("damaged")
    notes.write_noted(tmp_path, "lists", "vocabulary", {"b.txt": "b", path.name: "other"})
    assert path.read_text() == "other"
