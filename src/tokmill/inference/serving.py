"""`tokmill serve`: vectors over TCP, for programs that ask for one sequence at a time.

A request is 4 bytes, the length of what follows as a big-endian number, and the bytes themselves. A
reply is a length in the same form and that many bytes of float32, little-endian. A request of the
length 0 closes the connection. A request that cannot be answered closes it too. Source of the
framing: SemanticBBV, `evaluation/asm_embedding_server.py`.

One thread listens to all clients, and another one runs the model, over all requests that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np

from tokmill.errors import TokmillError, UsageError
from tokmill.inference.embedder import Embedder
from tokmill.store.schema import Array

HOST, PORT = "127.0.0.1", 12345
HEAD = 4
GRACE = 5.0
"""Seconds that clients get to take their replies when the server stops."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may ask for."""

    bytes: int = 1 << 20
    """Largest request."""
    seconds: float = 30.0
    """For the rest of a request after its length, and for taking a reply."""
    idle: float = 300.0
    """Until the next request begins."""
    clients: int = 256
    """At once; more are turned away."""
    batch: int = 64
    """Requests that the model reads at a time."""


class Served(msgspec.Struct):
    """What a server has done."""

    clients: int = 0
    requests: int = 0
    batches: int = 0
    refused: int = 0
    """Connections that were closed because of what the client did, or failed to do."""


class Asked(NamedTuple):
    """A request that waits for its vector."""

    data: bytes
    reply: asyncio.Future[Array]


class Refusal(Exception):
    """Why a connection is closed."""


class Server:
    """Answers requests until it is stopped.

    Args:
        embedder: what makes the vectors.
        limits: what clients may ask for.
        log: takes a line for each event.
    """

    def __init__(self, embedder: Embedder, limits: Limits, log: Callable[[str], None]) -> None:
        for name in Limits.__struct_fields__:
            if not getattr(limits, name) > 0:
                raise UsageError(f"{name} = {getattr(limits, name)}", hint="above 0")
        self.embedder, self.limits, self.log = embedder, limits, log
        self.served = Served()
        self._clients: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        """Clients that wait for a reply."""

    async def run(self, host: str = HOST, port: int = PORT) -> Served:
        """Listen until SIGINT or SIGTERM; port 0 takes a free one, which the log names.

        Requests that were received are answered before it ends. Raises `TokmillError` if the
        address cannot be taken.
        """
        self._stop, self._waiting = asyncio.Event(), asyncio.Queue[Asked](self.limits.clients)
        loop = asyncio.get_running_loop()
        try:
            server = await asyncio.start_server(self._client, host, port)
        except OSError as error:
            raise TokmillError(
                f"the address cannot be taken: {error.strerror or error}",
                where=f"{host}:{port}",
                hint="choose another --port; 0 takes a free one",
            ) from None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        model = asyncio.create_task(self._model())
        try:
            for socket in server.sockets:
                address, taken = socket.getsockname()[:2]
                self.log(f"listening on {address}:{taken}")
            await self._stop.wait()
            self.log(f"stopping, {len(self._busy)} requests wait for a reply")
            server.close()
            for task in self._clients - self._busy:
                task.cancel()
            if self._busy:
                await asyncio.wait(self._busy, timeout=GRACE)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            for task in (*self._clients, model):
                task.cancel()
            await asyncio.gather(*self._clients, model, return_exceptions=True)
        done = self.served
        self.log(
            f"stopped after {done.requests:,} requests of {done.clients:,} clients in "
            f"{done.batches:,} batches; {done.refused:,} connections refused"
        )
        return done

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client until it ends, breaks a rule or is silent for too long."""
        name = "{}:{}".format(*(writer.get_extra_info("peername") or ("?", "?"))[:2])
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._clients) >= self.limits.clients:
                raise Refusal(f"{self.limits.clients} clients are connected already")
            self._clients.add(task)
            self.served.clients += 1
            while not self._stop.is_set():
                data = await self._request(reader)
                if not data:
                    break
                self._busy.add(task)
                try:
                    await self._answer(data, writer)
                finally:
                    self._busy.discard(task)
        except Refusal as why:
            self.served.refused += 1
            self.log(f"{name}: closed: {why}")
        except (ConnectionError, TimeoutError) as error:
            self.served.refused += 1
            self.log(f"{name}: lost: {error or type(error).__name__}")
        except asyncio.CancelledError:
            pass
        finally:
            self._clients.discard(task)
            writer.close()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), 1)
            # A client that takes nothing would keep its replies in memory.
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader) -> bytes:
        """Return the bytes of the next request; b"" at the end."""
        head = await self._read(reader, HEAD, self.limits.idle)
        if len(head) < HEAD:
            if head:
                raise Refusal(f"the client left after {len(head)} of the {HEAD} bytes of a length")
            return b""
        size = int.from_bytes(head, "big")
        if size > self.limits.bytes:
            raise Refusal(f"the length {size:,} is above {self.limits.bytes:,}")
        data = await self._read(reader, size, self.limits.seconds)
        if len(data) < size:
            raise Refusal(f"the client left after {len(data):,} of {size:,} bytes")
        return data

    async def _read(self, reader: asyncio.StreamReader, size: int, seconds: float) -> bytes:
        """Return `size` bytes, or fewer if the client left; `Refusal` if it takes too long."""
        try:
            # `asyncio.wait_for` of Python 3.11 drops a cancellation that comes together with the
            # data, and a client that should end would wait for a model that has ended.
            async with asyncio.timeout(seconds):
                return await reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            return error.partial
        except TimeoutError:
            raise Refusal(f"{size:,} bytes did not come within {seconds:g} s") from None

    async def _answer(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        """Wait for the vector of a request, and send it."""
        reply: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        await self._waiting.put(Asked(data, reply))
        try:
            vector = await reply
        except TokmillError as error:
            raise Refusal(f"{len(data):,} bytes: {error.what}") from None
        values = np.ascontiguousarray(vector, "<f4").tobytes()
        writer.write(len(values).to_bytes(HEAD, "big") + values)
        try:
            async with asyncio.timeout(self.limits.seconds):
                await writer.drain()
        except TimeoutError:
            raise Refusal(f"the reply was not taken within {self.limits.seconds:g} s") from None
        self.served.requests += 1

    async def _model(self) -> None:
        """Take all requests that wait, a batch after the other, to the thread of the model."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "model") as thread:
            while True:
                batch = [await self._waiting.get()]
                while len(batch) < self.limits.batch and not self._waiting.empty():
                    batch.append(self._waiting.get_nowait())
                found = await loop.run_in_executor(
                    thread, self._vectors, [asked.data for asked in batch]
                )
                self.served.batches += 1
                for asked, result in zip(batch, found, strict=True):
                    if asked.reply.done():
                        continue
                    if isinstance(result, TokmillError):
                        asked.reply.set_exception(result)
                    else:
                        asked.reply.set_result(result)

    def _vectors(self, batch: list[bytes]) -> list[Array | TokmillError]:
        """Return a vector for each request, or why there is none; nothing else is raised."""
        found: list[Array | TokmillError] = [TokmillError("no vector", hint="")] * len(batch)
        sequences, places = [], []
        for place, data in enumerate(batch):
            try:
                sequences.append(self.embedder.encode(data))
                places.append(place)
            except TokmillError as error:
                found[place] = error
            except Exception as error:
                # A fault of a coder costs its request, not the server.
                found[place] = failed(error)
        try:
            if sequences:
                for place, vector in zip(places, self.embedder.embed(sequences), strict=True):
                    found[place] = vector
        except Exception as error:
            for place in places:
                found[place] = failed(error)
        return found


def failed(error: Exception) -> TokmillError:
    """Return the error of a request whose vector could not be made."""
    said = " ".join(str(error).split())[:200]
    return TokmillError(f"no vector: {type(error).__name__}: {said}", hint="")


def serve(
    embedder: Embedder,
    host: str = HOST,
    port: int = PORT,
    *,
    limits: Limits | None = None,
    log: Callable[[str], None] = print,
) -> Served:
    """Answer requests until SIGINT or SIGTERM; see `Server`."""
    return asyncio.run(Server(embedder, limits or Limits(), log).run(host, port))
