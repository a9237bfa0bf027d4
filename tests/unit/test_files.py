"""Folders that go again, and locks whose file was removed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tokmill.errors import MachineError, TokmillError, UsageError
from tokmill.files import append_line, locked, new_folder, write_file


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
