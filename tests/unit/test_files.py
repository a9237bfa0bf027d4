"""Folders that go again, locks, what several writers of one place do, and what is not a file."""

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.base.files import (
    append_line,
    is_private,
    new_folder,
    open_file,
    private_path,
    read_file,
    remove_leftovers,
    write_file,
)
from tokmill.base.locks import locked, writing


def test_a_new_folder_that_stays_empty_goes_again(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with new_folder(tmp_path / "there/a/b") as made:
        assert made.is_dir()
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    with pytest.raises(KeyError), new_folder(tmp_path / "there"):
        raise KeyError
    assert (tmp_path / "there").is_dir()


def test_a_new_folder_with_something_in_it_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_folder(tmp_path / "a/b/c") as folder:
        (folder.parent / "file").touch()
        raise KeyError
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "file"]


def test_a_place_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="make folder"), new_folder(tmp_path / "file/a"):
        pass


def test_who_waited_for_a_lock_makes_its_file_anew(tmp_path: Path) -> None:
    """The file that it waited for is gone, and its folder, so others would not see its lock."""
    path = tmp_path / "store/.lock"
    path.parent.mkdir()
    waits, got, leave = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        waits.set()
        with locked(path, "taken", "", wait=30):
            got.set()
            leave.wait(30)

    waiting = threading.Thread(target=second)
    with locked(path, "taken", ""):
        waiting.start()
        assert waits.wait(30)
        with pytest.raises(MachineError, match="taken"), locked(path, "taken", "", wait=0.1):
            pass
        path.unlink()
        path.parent.rmdir()
    assert got.wait(30)
    with pytest.raises(MachineError, match="taken"), locked(path, "taken", ""):
        pass
    leave.set()
    waiting.join()
    with locked(path, "taken", ""):
        pass


def test_a_path_without_a_name_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("", ".", "/"):
        with pytest.raises(UsageError, match="no name to write to"):
            write_file(path, b"data")
    assert not list(tmp_path.iterdir())


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name, target in (("link", "mine"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(target)
        write_file(tmp_path / name, b"written")
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_bytes() == b"written"
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_a_line_is_not_appended_behind_a_link(tmp_path: Path) -> None:
    """A store of somebody else may hold one that leads to a file of the user."""
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    (tmp_path / "events.jsonl").symlink_to(mine)
    with pytest.raises(TokmillError, match="is a link"):
        append_line(tmp_path / "events.jsonl", b"{}")
    assert mine.read_text() == "mine\n"


def test_a_line_is_not_appended_to_a_copy_of_hard_links(tmp_path: Path) -> None:
    mine, log = tmp_path / "mine", tmp_path / "events.jsonl"
    mine.write_text("one\ntorn")
    os.link(mine, log)
    append_line(log, b"two")
    append_line(log, b"three")
    assert mine.read_text() == "one\ntorn"
    assert log.read_text() == "one\ntwo\nthree\n"


def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    """As root, a rename to /dev/null would take it from the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(UsageError, match="a pipe or a device"):
            write_file(tmp_path / name, b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()


NONE = [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL]


@pytest.mark.parametrize("number", [*NONE, errno.EIO])
def test_a_lock_that_cannot_be_had_leaves_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS without its lock server, Lustre without -o flock; and a disk that fails."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with (
            pytest.raises(MachineError) as caught,
            new_folder(tmp_path / "a/store"),
            locked(tmp_path / "a/store/.lock", "taken", ""),
        ):
            pass
        assert caught.value.where.endswith("store/.lock") and os.strerror(number) in str(
            caught.value
        )
        assert ("has no locks" in caught.value.hint) == (number in NONE)
        # What needs no lock works, and nobody takes a file for a leftover that may be written.
        assert write_file(tmp_path / "file", b"data").read_bytes() == b"data"
        left = private_path(tmp_path / "file")
        left.touch()
        assert remove_leftovers(tmp_path) == 0 and left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "file"]
    assert remove_leftovers(tmp_path) == 1
    with new_folder(tmp_path / "a/store"), locked(tmp_path / "a/store/.lock", "taken", ""):
        pass


def test_a_lock_that_another_process_has_marked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(tmp_path / ".lock", "taken", ""):
        pass

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "x")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(MachineError, match="lock failed"), locked(tmp_path / ".lock", "taken", ""):
        pass
    assert (tmp_path / ".lock").exists()


def test_what_a_process_is_writing_is_no_leftover(tmp_path: Path) -> None:
    """Two commands that write into one folder must not remove each other's private files."""
    half, go_on = threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        yield b"one "
        half.set()
        assert go_on.wait(30)
        yield b"two"

    writer = threading.Thread(target=write_file, args=(tmp_path / "file", chunks()))
    writer.start()
    assert half.wait(30)
    dead = private_path(tmp_path / "file")
    dead.write_bytes(b"of a killed writer")
    assert remove_leftovers(tmp_path) == 1 and not dead.exists()
    (private,) = tmp_path.iterdir()
    assert is_private(private.name)
    go_on.set()
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"one two"


def test_one_writer_of_a_name_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "new/tokenizer.json"
    with writing(out), writing(out.with_name("other.json")):
        what = "another process is writing tokenizer.json"
        with pytest.raises(MachineError, match=what), writing(out):
            pass
        write_file(out, b"{}")
    assert [path.name for path in out.parent.iterdir()] == ["tokenizer.json"]
    with pytest.raises(KeyError), writing(tmp_path / "away" / ("x" * 255)):
        raise KeyError
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize("name", ["pipe", "link", "/dev/zero", "/dev/null", "/dev/tty"])
def test_what_may_never_end_is_not_read(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    signal.alarm(10)
    try:
        for read in (open_file, read_file):
            with pytest.raises((TokmillError, OSError)) as caught:
                read(tmp_path / name)
            assert "neither a file" in str(caught.value) or name == "/dev/tty"
        with pytest.raises(TokmillError, match="a pipe or a device"):
            append_line(tmp_path / "pipe", b"line")
    finally:
        signal.alarm(0)
