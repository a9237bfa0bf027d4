"""Everything that writes files: atomic files, private temporary files, locks; and digests.

Every write of tokmill goes through here, so the crash tests can kill a build at each write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
import urllib.parse
from collections.abc import Iterable, Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import BinaryIO, cast

from tokmill.base.errors import MachineError, TokmillError, UsageError

TEMPORARY = ".tmp-"
"""Prefix of the name of a private file."""
PRIVATE = re.compile(rf"{re.escape(TEMPORARY)}.+-[0-9]+-[0-9a-f]{{8}}", re.DOTALL)
"""Name of a private file: prefix, final name, process id, a random number."""
ADDRESS = re.compile(r"(s3|gs|az|https?):/{1,2}(?!/)(.+)", re.DOTALL)
"""Matches an address (`base/remote.py`), also one that went through `Path`: with one slash."""
LONGEST_NAME = 255
"""Bytes that a file's name may have on Linux (NAME_MAX)."""

HINTS = {
    errno.ENOSPC: "free some space, then run the same command again: it continues",
    errno.EDQUOT: "free some of the quota, then run the same command again: it continues",
    errno.EACCES: "choose a place that you may read or write",
    errno.EPERM: "choose a place that you may read or write",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EIO: "the disk reports an error: check it before you go on",
    errno.EMFILE: "too many files are open: raise the limit with `ulimit -n`",
    errno.ENFILE: "too many files are open on this machine",
    errno.ENOMEM: "memory ran out: give it less to hold, as with --preset memory",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EFBIG: "a file may not be so large here: raise the limit with `ulimit -f unlimited`, or "
    "choose another file system",
}
"""Error number → what the user can do, whatever the operation was."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of a file system without locks."""


def address_of(path: Path | str) -> str:
    """Return a path as an address without a slash at its end, "" if it is none."""
    match = ADDRESS.fullmatch(str(path))
    return f"{match[1]}://{match[2].rstrip('/')}" if match else ""


def place_of(path: Path | str) -> str:
    """Return an address as it is, a path absolute."""
    return address_of(path) or str(Path(path).absolute())


def _on_disk(path: Path) -> None:
    if address := address_of(path):
        raise UsageError(
            "this is written to a disk, not to an address",
            where=address,
            hint="name a folder or file; `tokmill store push STORE ADDRESS` publishes a store",
        )


def machine_error(doing: str, path: Path | str, error: OSError) -> MachineError:
    hints = HINTS | {
        errno.ENOENT: "it is not there: was it moved or removed?",
        errno.ENOTDIR: "a part of the path is a file, not a folder",
        errno.EEXIST: "a file stands where a folder is needed, or a link to nothing",
        errno.EISDIR: "a folder stands where a file is needed",
    }
    number = error.errno or 0
    if doing == "make folder":
        # Parents are made too, so a missing parent is not the reason.
        hints |= {errno.ENOENT: "nothing can be made there: choose another place"}
    if doing == "lock":
        # Without a lock, two writers would not notice each other.
        hints |= dict.fromkeys(
            NO_LOCKS,
            "the file system has no locks: write to another one, such as a local disk, or mount it "
            "with locks (Lustre: -o flock; NFS: with lockd). To read from it needs none",
        )
    if address_of(path):
        hints |= {errno.ENOENT: "copy it to a disk first: here no address is read"}
    what = f"{doing} failed: {os.strerror(number) if number else error}"
    return MachineError(what, where=str(path), hint=hints.get(number, "see the system's message"))


@contextlib.contextmanager
def machine_errors(doing: str, path: Path | str) -> Iterator[None]:
    """Turn an `OSError` into a `MachineError` with the file's name and a hint."""
    try:
        yield
    except OSError as error:
        raise machine_error(doing, path, error) from error


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    with machine_errors("sync", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> Path:
    """Make a folder and its parents; an existing folder is fine."""
    _on_disk(folder)
    with machine_errors("make folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Make a folder and its parents; at the end, remove those made here that are empty."""
    with machine_errors("make folder", folder):
        new = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        yield folder
    finally:
        # Stops at the first that is not empty: all above it are not empty either.
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()


def private_path(path: Path) -> Path:
    """Return a name beside `path` that no other process uses.

    Raises `UsageError` for a path without a name, such as that of an empty string.
    """
    _on_disk(path)
    if not path.name:
        raise UsageError(
            "there is no name to write to",
            where=str(path),
            hint="name a file: is a variable empty?",
        )
    end = f"-{os.getpid()}-{secrets.token_hex(4)}"
    name = os.fsencode(path.name)[: LONGEST_NAME - len(TEMPORARY) - len(end)]
    return path.with_name(f"{TEMPORARY}{os.fsdecode(name)}{end}")


def is_private(name: str) -> bool:
    return PRIVATE.fullmatch(name) is not None


def inside(folder: Path | str, name: str, *, deep: bool = False) -> Path:
    """Return the path of a name in a folder; for names that come from a file.

    Such a name is not trusted: it might lead out of the folder. So it must be one plain name. With
    `deep` it may be a path with `/`, and no link on it may lead out of the folder.

    Raises:
        TokmillError: the name is absolute, has `..`, is empty, holds a zero byte, or is longer
            than a file's name can be.
    """
    folder = Path(folder)
    parts = name.split("/") if deep else [name]
    if max(len(part.encode("utf-8", "surrogatepass")) for part in parts) > LONGEST_NAME:
        raise TokmillError(
            f"the name {name[:40]!r}… is longer than any file's",
            where=str(folder),
            hint="shorten the name; if it stands in a file, that one is damaged",
        )
    if any(part in ("", ".", "..") or "/" in part or "\0" in part for part in parts):
        raise TokmillError(
            f"the name {name!r} leads out of the folder",
            where=str(folder),
            hint="the file that names it is damaged, or not to be trusted",
        )
    path = folder.joinpath(*parts)
    if deep and len(parts) > 1:
        with machine_errors("read", path):
            beyond = not path.parent.resolve().is_relative_to(folder.resolve())
        if beyond:
            raise TokmillError(
                f"the name {name!r} leads out of the folder through a link",
                where=str(folder),
                hint="choose another folder, or remove the link",
            )
    return path


def write_file(
    path: Path | str, chunks: bytes | str | Iterable[bytes | memoryview], *, sync: bool = True
) -> Path:
    """Write a file atomically: private file, fsync, rename, fsync of the folder.

    Without `sync` the folder is not synced. This is for a file that has no meaning until another
    one is written after it (a shard before its receipt).

    A link is never written through: the file takes its place, and what it led to stays as it was.
    Raises `UsageError` for a pipe or a device, which the rename would replace.
    """
    path = Path(path)
    _check_regular(path)
    if isinstance(chunks, str):
        chunks = chunks.encode()
    if isinstance(chunks, bytes):
        chunks = [chunks]
    with machine_errors("write", path), _private_file(path) as (private, handle):
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            while view:
                view = view[handle.write(view) :]
        os.fsync(handle.fileno())
        os.rename(private, path)
    if sync:
        sync_folder(path.parent)
    return path


@contextlib.contextmanager
def _private_file(path: Path) -> Iterator[tuple[Path, FileIO]]:
    """Make the private file of a path, and remove it after an error.

    It is locked while it is open: one without a lock is what a killed writer left.
    """
    while True:
        private = private_path(path)
        with open(private, "xb", buffering=0) as handle:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            # Another process may have taken it for a leftover before it was locked.
            if not is_file_at(handle, private):
                continue
            try:
                yield private, handle
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(private)
                raise
            return


def publish(private: Path, path: Path) -> None:
    """Put a file that another program wrote as `private_path(path)` in its place, atomically."""
    _check_regular(path)
    with machine_errors("write", path):
        with open(private, "rb") as handle:
            os.fsync(handle.fileno())
        os.rename(private, path)
    sync_folder(path.parent)


def open_file(path: Path | str) -> BufferedReader:
    """Open a file for reading; raises `TokmillError` for a pipe or a device, which may never end.

    All files of stores and runs are opened by this function, or by those below.
    """
    handle = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise TokmillError(
            "is neither a file nor a folder (a pipe or a device?)",
            where=str(path),
            hint="write its content to a file first: files are read more than once",
        )
    return handle


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[BufferedReader]:
    """Open a file as `open_file`; an `OSError` here or in the `with` block is a `MachineError`."""
    with machine_errors("read", path), open_file(path) as handle:
        yield handle


def read_file(path: Path | str, most: int = -1) -> bytes:
    """Return a file, or its first `most` bytes; raises `MachineError`, also for a folder."""
    with reading(path) as handle:
        return handle.read(most)


def _check_regular(path: Path) -> None:
    # As root, a rename to /dev/null takes it from the whole machine. A folder is refused by rename.
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UsageError(
            "a pipe or a device cannot be replaced by a file", where=str(path), hint="name a file"
        )


def nameless_file(folder: Path) -> BinaryIO:
    """Open a temporary file without a name on the disk of a folder; it ends with the process."""
    with machine_errors("write", folder):
        return cast(BinaryIO, tempfile.TemporaryFile(dir=folder, prefix=TEMPORARY))


def append_line(path: Path, line: bytes) -> None:
    """Append one line to a log, in one write. A last line that a crash cut short is removed.

    Only this path is changed: a symbolic link is an error, and a file with several hard links
    (`cp -al`) is copied first.
    """
    line = line.rstrip(b"\n") + b"\n"
    if path.is_symlink():
        raise TokmillError(
            "is a link; the log must be a file in this folder",
            where=str(path),
            hint="remove the link",
        )
    _check_regular(path)
    with machine_errors("append", path):
        if path.exists() and path.stat().st_nlink > 1:
            write_file(path, path.read_bytes())
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o644)
        try:
            _drop_torn_line(descriptor)
            if os.write(descriptor, line) < len(line):
                _drop_torn_line(descriptor)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def _drop_torn_line(descriptor: int, block: int = 1 << 16) -> None:
    end = size = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)


def remove(path: Path) -> None:
    """Remove a file; one that is not there is fine."""
    with machine_errors("remove", path):
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, of: str = "") -> int:
    """Remove the private files that killed writers left in a folder, and return their number.

    `of`: only those of the file with this name. Folders and links with such a name stay, and files
    that a process is writing.
    """
    if not folder.is_dir():
        return 0
    with machine_errors("list", folder), os.scandir(folder) as entries:
        leftovers = [
            folder / entry.name
            for entry in entries
            if is_private(entry.name)
            # Behind the name stand a process and a number.
            and of in ("", entry.name.removeprefix(TEMPORARY).rsplit("-", 2)[0])
            and entry.is_file(follow_symlinks=False)
        ]
    return sum(map(_remove_leftover, leftovers))


def _remove_leftover(path: Path) -> bool:
    """Remove a private file unless its writer still holds its lock; say whether it was removed."""
    try:
        with open(path, "r+b") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    except OSError:
        # It is written, it has just got its name, or nobody can say.
        return False
    return True


def is_file_at(handle: BinaryIO | FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def sha256_file(path: Path) -> str:
    with reading(path) as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def path_to_text(path: str) -> str:
    """Return a path as text for JSON: unchanged, or as `file:///…%E9` if it is not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return Path(os.path.abspath(path)).as_uri()
    return path


def path_from_text(text: str) -> str:
    if not text.startswith("file:///"):
        return text
    return os.fsdecode(urllib.parse.unquote_to_bytes(text.removeprefix("file://")))


def stamp(facts: os.stat_result) -> tuple[int, ...]:
    """Return size, times (ns) and inode, one of which changes when a file is written or replaced.

    mtime can be set back by a user; ctime cannot.
    """
    return facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns


def sampled(path: Path) -> tuple[int, str, bytes]:
    """Return a file's size, a digest of its head, middle and tail, and its first bytes.

    The digest is cheap, and changed by most edits. It only decides whether work can be re-used;
    content that is read is hashed in full.
    """
    with reading(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        return size, *sampled_of(handle, size)


def sampled_of(handle: BinaryIO, size: int, block: int = 4096) -> tuple[str, bytes]:
    digest = hashlib.sha256(str(size).encode())
    head = b""
    for start in sorted({0, max(0, (size - block) // 2), max(0, size - block)}):
        handle.seek(start)
        data = handle.read(block)
        head = head or data
        digest.update(data)
    return digest.hexdigest()[:32], head
