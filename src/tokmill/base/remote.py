"""Everything that reaches out: objects at addresses such as s3://bucket/key, by `obstore`.

Each call has a limit of time and is repeated after failures that may pass. An error names the
address and says what can be done. Credentials and endpoints come from the usual environment
variables, which obstore reads.
"""

from __future__ import annotations

import hashlib
import io
import os
import queue
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from tokmill import plugins
from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.base.files import address_of, open_file, sampled, sampled_of, stamp
from tokmill.base.prefetch import prefetch

T = TypeVar("T")
U = TypeVar("U")
LOCAL = re.compile(r"http://(localhost|127\.0\.0\.1|\[::1\])[:/]")
VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, and "
    "AWS_ENDPOINT_URL for a server that is not Amazon's",
    "gs": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Scheme → the environment variables of its credentials."""
ENDED = "ExpiredToken"
"""The code of S3 for credentials that were valid once."""
REQUEST, CONNECT = 20, 5
"""Seconds of one request, and of the connection to its server."""
PATIENCE = "TOKMILL_PATIENCE"
"""Environment variable: the seconds after which a call ends, with all its repetitions."""
WHOLE = 8 << 20
"""Bytes up to which an object is sent in one request, which can be conditional; and of a part."""
RANGE, FIRST = 4 << 20, 1 << 16
"""Largest and first range that is read of an object."""
AT_ONCE, MANY = 4, 16
"""Large and small requests that are made at a time."""


class Absent(TokmillError):
    """There is no object at an address."""


class Changed(TokmillError):
    """An object is another one than before."""


def _changed(address: str) -> Changed:
    what = "the object has changed while it was read"
    return Changed(what, where=address, hint="run the same command again")


class Facts(NamedTuple):
    """An object: `mark` is its ETag, or the time of its last change where it has none."""

    address: str
    size: int
    mark: str = ""
    sha256: str = ""
    """Digest of its content that was stored with it; "" if the server keeps none."""


def patience() -> float:
    """Return the seconds after which a call ends."""
    try:
        return max(1.0, float(os.environ.get(PATIENCE) or 60))
    except ValueError:
        raise UsageError(f"{PATIENCE} is not a number of seconds", hint="such as 60") from None


_process: list[int] = []
"""The process that began to use obstore: its threads do not survive a fork."""


def _client(address: str) -> tuple[Any, Any, str]:
    """Return obstore, its client of a bucket or host, and the key of an address in it."""
    scheme, rest = address.split("://", 1)
    if scheme == "http" and not LOCAL.match(f"{address}/"):
        what = "http:// is not read: anybody could change it on its way"
        raise UsageError(what, where=address, hint="https://")
    if scheme in ("http", "https") and set("?#") & set(rest):
        hint = "download the file first: curl -o FILE ADDRESS"
        raise UsageError("addresses with ? or # are not read", where=address, hint=hint)
    if _process and _process[0] != os.getpid():
        what = "a forked process cannot read addresses after its parent has"
        hint = 'start processes by "spawn": DataLoader(…, multiprocessing_context="spawn")'
        raise MachineError(what, where=address, hint=hint)
    bucket, _, key = rest.partition("/")
    client = _new_client(f"{scheme}://{bucket}", patience())
    _process[:] = [os.getpid()]
    return plugins.require("obstore"), client, key


@cache
def _new_client(root: str, limit: float) -> Any:
    store = plugins.require("obstore.store")
    second = timedelta(seconds=1)
    named = [url for name, url in os.environ.items() if re.search("ENDPOINT|BASE_URL", name)]
    try:
        return store.from_url(
            root,
            client_options={
                "timeout": min(REQUEST, limit / 2) * second,
                "connect_timeout": min(CONNECT, limit / 4) * second,
                "allow_http": any(url.startswith("http:") for url in (root, *named)),
            },
            retry_config={
                "max_retries": 2,
                "retry_timeout": min(REQUEST, limit / 4) * second,
                "backoff": {"init_backoff": second / 10, "max_backoff": 2 * second, "base": 2},
            },
        )
    except Exception as error:
        what = f"the address cannot be opened: {str(error).splitlines()[0]}"
        hint = VARIABLES.get(root.partition(":")[0], "check the address")
        raise UsageError(what, where=root, hint=hint) from None


def _error(doing: str, address: str, error: Exception) -> TokmillError:
    if isinstance(error, TokmillError):
        return error
    text, name = str(error), type(error).__name__
    status = int(match[1]) if (match := re.search(r"status code: (\d{3})", text)) else 0
    variables = VARIABLES.get(address.partition(":")[0], "")
    if isinstance(error, FileNotFoundError) or status == 404:
        what = f"there is no such {'bucket' if 'NoSuchBucket' in text else 'object'}"
        hint = "check the address" + (f"; {variables} say where it is" if variables else "")
        return Absent(what, where=address, hint=hint)
    if ENDED in text:
        what = f"{doing} was refused: the credentials have ended ({ENDED})"
        hint = "set new ones, and run the same command again; those of a role renew themselves"
        return MachineError(what, where=address, hint=hint)
    if status in (401, 403) or name in ("PermissionDeniedError", "UnauthenticatedError"):
        hint = f"are the credentials of this bucket, and not expired? {variables}"
        hint = hint if variables else "tokmill sends no password to https://"
        what = f"{doing} was refused ({status or 'no permission'})"
        return MachineError(what, where=address, hint=hint)
    if name == "PreconditionError" or status in (412, 416):
        return _changed(address)
    if isinstance(error, ValueError):
        what = f"the address names no object: {text.splitlines()[0]}"
        return UsageError(what, where=address, hint="a key has no empty part, and no . or ..")
    why = f"the server answered {status}" if status else text.splitlines()[0] if text else name
    if status in (0, 408, 429) or status >= 500:
        why += f"; it was tried again for {patience() / 2:g} s"
    right = f", and are these set right: {variables}" if variables else ""
    hint = f"is the server reachable{right}?"
    return MachineError(f"{doing} failed: {why}", where=address, hint=hint)


def _may_pass(error: Exception) -> bool:
    if isinstance(error, TokmillError | FileNotFoundError | ValueError):
        return False
    if ENDED in str(error):
        # Whoever signed a request just before the end signs the next one anew.
        return not os.environ.get("AWS_ACCESS_KEY_ID")
    match = re.search(r"status code: (\d{3})", str(error))
    if match:
        return int(match[1]) in (408, 429) or int(match[1]) >= 500
    return isinstance(error, TimeoutError | EOFError) or type(error).__name__ == "GenericError"


def _limited(call: Callable[[], T], seconds: float) -> T:
    """Return what a call returns; `TimeoutError` after some seconds, with the call left behind.

    Some of obstore's waits (credentials of a machine in a cloud) have no limit of their own, and
    no signal ends them.
    """
    answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answer.put((True, call()))
        except BaseException as error:
            answer.put((False, error))

    threading.Thread(target=work, name="tokmill-remote", daemon=True).start()
    try:
        done, result = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer in {seconds:g} s") from None
    if done:
        return cast(T, result)
    # A panic of obstore is no `Exception`.
    raise result if isinstance(result, Exception) else RuntimeError(str(result))


def _tried(doing: str, address: str, call: Callable[[], T], size: int = 0) -> T:
    """Return what a call returns; it is repeated after failures that may pass.

    `size`: bytes that it sends or receives beyond one range; they add to its limit.
    """
    begun, pause = time.monotonic(), 0.1
    limit = patience() + size / 1e6
    while True:
        try:
            return _limited(call, max(1.0, begun + limit - time.monotonic()))
        except Exception as error:
            # A call may take half of the time, so the last one begins before.
            if not _may_pass(error) or time.monotonic() - begun + pause > limit / 2:
                raise _error(doing, address, error) from None
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311
        pause = min(2 * pause, 4)


def _facts(address: str, meta: Any, attributes: Any = None) -> Facts:
    mark = meta["e_tag"] or meta["last_modified"].isoformat()
    return Facts(address, meta["size"], mark, str((attributes or {}).get("sha256", "")))


def head(address: str) -> Facts:
    """Return the facts of an object; raises `Absent` if there is none."""
    obstore, client, key = _client(address)

    def call() -> Facts:
        try:
            result = obstore.get(client, key, options={"head": True})
        except Exception as error:
            if not re.search(r"status code: 40[013]", str(error)):
                raise
            # The answer to HEAD has no body, which would say why.
            result = obstore.get(client, key, options={"range": (0, 1)})
        return _facts(address, result.meta, result.attributes)

    return _tried("read", address, call)


def listed(address: str) -> list[Facts]:
    """Return the objects below an address, ordered by address; none is no error.

    Their marks are not those of `head`: servers give times of other precision here. Empty objects
    that others lie below are left out: consoles make them for folders, and they cannot be read.
    """
    obstore, client, key = _client(address)
    root = address.removesuffix(key) if key else f"{address}/"

    def call() -> list[Facts]:
        pages = obstore.list(client, key or None, chunk_size=1000)
        return [Facts(root + meta["path"], meta["size"]) for page in pages for meta in page]

    found = sorted(_tried("list", address, call))
    if all(one.size for one in found):
        return found
    folders = {one.address[: end.start()] for one in found for end in re.finditer("/", one.address)}
    folders.add(address.rstrip("/"))
    return [one for one in found if one.size or one.address not in folders]


def read(facts: Facts, start: int = 0, stop: int | None = None) -> bytes:
    """Return the bytes start … stop - 1 of an object, stop at most its size.

    Raises `Changed` if the object is not the one of the facts.
    """
    stop = facts.size if stop is None else min(stop, facts.size)
    if start >= stop:
        return b""
    obstore, client, key = _client(facts.address)
    options: dict[str, Any] = {"range": (start, stop)}
    if facts.mark.startswith(('"', "W/")):
        options["if_match"] = facts.mark

    def call() -> bytes:
        result = obstore.get(client, key, options=options)
        data = bytes(result.bytes())
        now = _facts(facts.address, result.meta)
        if (now.size, now.mark) != (facts.size, facts.mark):
            raise _changed(facts.address)
        if len(data) != stop - start:
            raise EOFError(f"{len(data)} bytes came instead of {stop - start}")
        return data

    return _tried("read", facts.address, call)


def stream(address: str) -> Iterator[bytes]:
    """Yield the content of an object; a small one takes one request."""
    obstore, client, key = _client(address)

    def call() -> tuple[Facts, bytes]:
        result = obstore.get(client, key)
        facts = _facts(address, result.meta)
        data = bytes(result.bytes()) if facts.size <= RANGE else b""
        if facts.size <= RANGE and len(data) != facts.size:
            raise EOFError(f"{len(data)} bytes came instead of {facts.size}")
        return facts, data

    facts, data = _tried("read", address, call)
    yield from chunks(facts) if facts.size > RANGE else [data]


def read_whole(address: str) -> bytes:
    """Return an object that is small enough for the memory."""
    return b"".join(stream(address))


def chunks(facts: Facts) -> Iterator[bytes]:
    """Yield the content of an object, several ranges ahead."""
    if facts.size <= RANGE:
        yield read(facts)
        return
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(AT_ONCE, "tokmill-remote") as pool:
        try:
            for start in range(0, facts.size, RANGE):
                waiting.append(pool.submit(read, facts, start, start + RANGE))
                if len(waiting) > AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def at_once(function: Callable[[T], U], arguments: Iterable[T], many: int = MANY) -> Iterator[U]:
    """Yield the results of a function that waits for a server, in order, many at a time."""
    with ThreadPoolExecutor(many, "tokmill-remote") as pool:
        try:
            yield from pool.map(function, arguments)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def target_of(address: str) -> str:
    """Return an address as one below which objects can be written; else raise `UsageError`."""
    where = address_of(address)
    if not where or where.startswith("http") or "/" not in where.partition("://")[2]:
        hint = "s3://BUCKET/NAME, gs://BUCKET/NAME or az://CONTAINER/NAME"
        raise UsageError("it is pushed to a name in a bucket", where=address, hint=hint)
    return where


def put(address: str, data: bytes | Path, sha256: str) -> bool:
    """Write an object where there is none, with its digest; say whether it was written.

    Only objects up to 8 MiB are refused by the server if there is one already (`If-None-Match`);
    of larger ones the caller knows that there is none.
    """
    obstore, client, key = _client(address)
    size = data.stat().st_size if isinstance(data, Path) else len(data)
    whole = size <= WHOLE
    content = data.read_bytes() if whole and isinstance(data, Path) else data
    how: dict[str, Any] = {"mode": "create", "use_multipart": False}
    if not whole:
        how = {"use_multipart": True, "chunk_size": WHOLE, "max_concurrency": AT_ONCE}

    def call() -> bool:
        try:
            obstore.put(client, key, content, attributes={"sha256": sha256}, **how)
        except Exception as error:
            if type(error).__name__ == "AlreadyExistsError":
                return False
            raise
        return True

    return _tried("write", address, call, 0 if whole else size)


def digest(facts: Facts) -> str:
    """Return the sha256 of an object: the stored one, or else that of what is read."""
    if facts.sha256:
        return facts.sha256
    result = hashlib.sha256()
    for chunk in chunks(facts):
        result.update(chunk)
    return result.hexdigest()


class _Ranges(io.RawIOBase):
    """An object as a file: longer ranges as it is read on, the next one ahead in a thread."""

    def __init__(self, address: str, ahead: bool) -> None:
        self.facts, self._at, self._ahead = head(address), 0, ahead
        self._begin, self._data = 0, b""
        self._next: Generator[bytes, None, None] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = 0) -> int:
        self._at = max(0, place + (0, self._at, self.facts.size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if not self._begin <= self._at < self._begin + len(self._data):
            self._load(min(len(view), RANGE))
        piece = memoryview(self._data)[self._at - self._begin :][: len(view)]
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _load(self, wanted: int) -> None:
        on = self._at == self._begin + len(self._data)
        if not on or self._next is None:
            self._stop()
            data = read(self.facts, self._at, self._at + max(FIRST * self._ahead, wanted))
            self._next = prefetch(self._rest(self._at + len(data))) if self._ahead else None
        else:
            data = next(self._next, b"")
        self._begin, self._data = self._at, data

    def _rest(self, at: int) -> Iterator[bytes]:
        length = FIRST
        while at < self.facts.size:
            length = min(4 * length, RANGE)
            yield read(self.facts, at, at + length)
            at += length

    def _stop(self) -> None:
        if self._next is not None:
            self._next.close()
            self._next = None

    def close(self) -> None:
        self._stop()
        super().close()


def open_input(path: Path | str, *, ahead: bool = True) -> BinaryIO:
    """Open a file or an object for reading, at any byte; `ahead`: it is read on from there."""
    if address := address_of(path):
        return io.BufferedReader(_Ranges(address, ahead), FIRST)
    return open_file(path)


def stamp_of(path: Path | str) -> tuple[int, ...]:
    """Return what changes when a file or an object is replaced; see `files.stamp`.

    Raises `Absent` if there is none, `OSError` if a file cannot be looked at.
    """
    if address := address_of(path):
        facts = head(address)
        return facts.size, int(hashlib.sha256(facts.mark.encode()).hexdigest()[:15], 16)
    try:
        return stamp(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        raise Absent("there is no such file", where=str(path), hint="was it moved?") from None


def sampled_input(path: Path | str) -> tuple[int, str, bytes]:
    """Return a file's or an object's size, sampled digest and first bytes; see `files.sampled`."""
    if not (address := address_of(path)):
        return sampled(Path(path))
    file = cast(BinaryIO, _Ranges(address, ahead=False))
    size = file.seek(0, 2)
    return size, *sampled_of(file, size)


def size_of(path: Path | str) -> int:
    address = address_of(path)
    return head(address).size if address else os.stat(path).st_size
