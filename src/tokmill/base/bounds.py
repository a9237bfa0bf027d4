"""What a damaged or hostile file may do to its reader: memory has a limit, a crash a name.

A few bytes can stand for gigabytes: of repeated texts, of nested arrays, of what a header promises.
The kernel refuses such allocations (`RLIMIT_DATA`); the reader's error names the file.

A mapped file that is cut, or whose disk fails, ends the process with a line that names it: the
kernel sends SIGBUS where a page of a map cannot be read. Python's own handlers only note a signal
and go back to the instruction that faulted, for ever. So the handler is a function of `ctypes`,
called at once, in the thread that faulted: it finds the file by the address and ends the process.
A part of a page behind the new end reads as zeros without a signal: `Shard.check_size`.

A decoder of another library may crash on a damaged file. That ends the process with the file's name
too, if the file is read inside of `bounded`. No program or module is taken from the working
directory, which may hold the input.
"""

import contextlib
import ctypes
import functools
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from tokmill.base.errors import MachineError, TokmillError

A = TypeVar("A", bound=Path | str)
P = ParamSpec("P")
R = TypeVar("R")
BASE = 300 << 20
"""Bytes that reading any file may take, beyond what the process has when it begins."""
TIMES = 64
"""More bytes for each byte of the file: a graph is larger in memory than in Parquet."""
own_process = False
"""Whether this process does nothing but the work of tokmill, so that it may limit itself. A limit
is for all threads of a process, so those of programs that import tokmill have none."""
reading: list[str] = []
"""Files that are read now inside of `bounded`."""
SAFE_PATH = "tokmill"
"""Value of PYTHONSAFEPATH that this program has set; the variable counts if it has any."""


@contextlib.contextmanager
def bounded(path: Path | str, size: int = 0, *, limit: bool = True) -> Iterator[None]:
    """Bound the memory that is taken inside of the `with` block, by the size of a file.

    Args:
        path: the file, which errors name.
        size: bytes that are read, if they are not those of the file.
        limit: False where the memory is known not to grow; then errors are only named.

    Raises `TokmillError` for more memory than that, and for endless nesting.
    """
    most = BASE + TIMES * (size or _size(path))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit and own_process
    if limit:
        soft = _data() + most
        if before[0] != resource.RLIM_INFINITY:
            soft = min(soft, before[0])
        resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    reading.append(str(path))
    try:
        yield
    except MemoryError:
        raise (TokmillError if limit else MachineError)(
            f"reading it takes more than {most >> 20:,} MiB" if limit else "memory ran out",
            where=str(path),
            hint="a few of its bytes may stand for very many; of Parquet and Arrow, groups of "
            "fewer rows take less",
        ) from None
    except RecursionError:
        raise TokmillError(
            "it is nested too deeply",
            where=str(path),
            hint="is it what it should be? look for a long run of [ or { in it",
        ) from None
    finally:
        reading.remove(str(path))
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def bounded_reader(read: Callable[Concatenate[A, P], R]) -> Callable[Concatenate[A, P], R]:
    """Let a function, whose first argument is a file, read it inside of `bounded`."""

    @functools.wraps(read)
    def reader(path: A, /, *arguments: P.args, **named: P.kwargs) -> R:
        with bounded(path):
            return read(path, *arguments, **named)

    return reader


def _size(path: Path | str) -> int:
    """Return the bytes that a file takes on its disk, at most its size: it may have holes."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return 0
    return min(status.st_size, status.st_blocks * 512)


def _data() -> int:
    with open("/proc/self/statm", "rb") as file:
        # Data and stack; the stack is small.
        return int(file.read().split()[5]) * resource.getpagesize()


def resident_bytes(process: int | str = "self") -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{process}/statm", "rb", 0) as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def machine_memory(machine: Path = Path("/")) -> tuple[int, int]:
    """Return (total, free) bytes that this process may use: the machine's or its cgroups'."""
    total = free = 0
    try:
        lines = (machine / "proc/meminfo").read_text().splitlines()
        table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        total, free = table["MemTotal"], table["MemAvailable"]
        for line in (machine / "proc/self/cgroup").read_text().splitlines():
            _, kinds, inner = line.split(":", 2)
            # Version 1 may mount several controllers together, each under its name too.
            for kind in CGROUP_FILES.keys() & kinds.split(","):
                root = machine / "sys/fs/cgroup" / kind
                group = root / inner.lstrip("/")
                # In a container the path may be one outside of it; the root is its own group.
                for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
                    total, free = _in_group(folder, CGROUP_FILES[kind], total, free)
    except (OSError, KeyError, ValueError, IndexError):
        pass
    return total, free


CGROUP_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Controller in /proc/self/cgroup (of version 2, of 1) → files of the limit and of what is used."""


def _in_group(folder: Path, names: tuple[str, str], total: int, free: int) -> tuple[int, int]:
    with contextlib.suppress(FileNotFoundError):
        limit, used = ((folder / name).read_text().strip() for name in names)
        if limit.isdigit():
            return min(total, int(limit)), min(free, max(0, int(limit) - int(used)))
    return total, free


SA_SIGINFO = 4
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL)
"""Signals of a library that has crashed."""
SECONDS = 5
"""After them a handler that waits is killed."""
ADDRESS = 16
"""Offset of `si_addr` in Linux's `siginfo_t` on 64-bit machines."""
HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc and musl on 64-bit machines."""

    _fields_ = (
        ("handler", HANDLER),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def explain_crashes() -> None:
    """Let a page that cannot be read, and a decoder that crashes, end this process with an error.

    For processes of tokmill's own: where it is a library, signals belong to the program.
    """
    if sys.platform == "linux" and sys.maxsize > 2**32:
        action = _Action(_handler, flags=SA_SIGINFO)
        libc = ctypes.CDLL(None)
        libc.sigaction(signal.SIGBUS, ctypes.byref(action), None)
        action.handler = _crash_handler
        for number in CRASHES:
            libc.sigaction(number, ctypes.byref(action), None)


def cut_short(path: Path | str, size: int) -> MachineError:
    """Return the error for a file that has `size` bytes now, and had more when it was mapped."""
    return MachineError(
        f"the file was cut while it was read: it has {size:,} bytes now",
        where=str(path),
        hint="restore it; a shard of a store is made again by the same `tokmill build`",
    )


def _end(number: int, info: int, context: int) -> None:
    try:
        address = ctypes.c_void_p.from_address(info + ADDRESS).value or 0
        path, offset = mapped_at(address)
        size = os.stat(path).st_size if os.path.exists(path) else offset + 1
        error = cut_short(path, size)
        if offset < size:
            error.what = "a page of a mapped file cannot be read"
            error.hint = "check the disk and the memory, then run the same command again"
        os.write(2, f"error: {error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(MachineError.exit_code)


def _end_of_crash(number: int, info: int, context: int) -> None:
    if not reading:
        # As without this handler.
        ctypes.CDLL(None).signal(number, 0)
        os.kill(os.getpid(), number)
        return
    try:
        # A lock that the crashed library holds must not make this wait for ever.
        ctypes.CDLL(None).alarm(SECONDS)
        name = signal.Signals(number).name
        error = TokmillError(
            f"the library that reads it has crashed ({name})",
            where=reading[-1],
            hint="the file may be damaged: write it anew, or leave it out",
        )
        os.write(2, f"error: {error}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(TokmillError.exit_code)


_handler, _crash_handler = HANDLER(_end), HANDLER(_end_of_crash)


def mapped_at(address: int) -> tuple[str, int]:
    """Return the file that is mapped at an address of this process ("": none), and the offset."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        span, _, offset, _, _, *name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            # The kernel writes the end of a line in a name so.
            path = "".join(name).replace("\\012", "\n")
            return path, int(offset, 16) + address - first
    return "", 0


def keep_out_of_working_directory() -> None:
    """Let no child of this process find programs or Python modules in its working directory.

    It may hold the input. Python would look there for the modules of `python -m`, of torchrun's
    processes and of workers; a relative entry of PATH would find programs there.
    """
    os.environ.setdefault("PYTHONSAFEPATH", SAFE_PATH)
    os.environ["PATH"] = os.pathsep.join(filter(os.path.isabs, os.get_exec_path()))


def environment_of_users() -> dict[str, str]:
    added = {"PYTHONSAFEPATH": SAFE_PATH}.items()
    return {name: value for name, value in os.environ.items() if (name, value) not in added}
