"""`tokmill serve`: vectors over HTTP, for programs that ask for a few sequences at a time.

uvicorn speaks HTTP, Starlette finds the page and hands errors on, one thread runs the model.
"""

from __future__ import annotations

import asyncio
import io
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokmill.base.errors import TokmillError
from tokmill.base.headers import loads_json
from tokmill.inference.embedder import Embedder, Ids
from tokmill.store.schema import Array

JSON, NPY, BYTES = "application/json", "application/x-npy", "application/octet-stream"
SHAPE = '{"inputs": ["…", "…"]}'
GRACE = 5
"""Seconds in which requests are still answered when the server stops."""
LARGE = 1 << 16
"""Bytes from which on a request is encoded in a thread of its own, where it holds up no other."""


class Limits(NamedTuple):
    """What clients may ask for."""

    max_bytes: int = 1 << 20
    """Largest request."""
    max_inputs: int = 2048
    """Most sequences of a request."""
    max_waiting: int = 256 << 20
    """Bytes of all requests that are being read or wait for their vectors."""
    seconds: float = 30.0
    """For the head of a request, for the rest of it, and for taking a reply."""


class Inputs(msgspec.Struct, forbid_unknown_fields=True):
    """A request in JSON: texts, or machine code in hexadecimal."""

    inputs: list[str]


class Refusal(TokmillError):
    """Why a request is not answered, with the status of HTTP."""

    def __init__(self, status: int, what: str, hint: str, where: str = "") -> None:
        super().__init__(what, hint=hint, where=where)
        self.status = status


class Asked(NamedTuple):
    """A request that waits for its vectors, (sequences, width)."""

    sequences: Sequence[Ids]
    tokens: int
    vectors: Future[Array]


class Model(threading.Thread):
    """Runs the model over the requests that wait.

    Small requests are read together, in passes of at most `batch_tokens` positions. A request of
    more tokens is read alone, and small ones are answered between its passes.
    """

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(name="model")
        self.embedder, self.most = embedder, embedder.vectors.batch_tokens
        self.small, self.large = deque[Asked](), deque[Asked]()
        self.waiting, self.stopped = threading.Semaphore(0), False

    def ask(self, sequences: Sequence[Ids]) -> Future[Array]:
        """Return the future vectors; to cancel it ends the work."""
        asked = Asked(sequences, sum(len(next(iter(one.values()))) for one in sequences), Future())
        (self.small if asked.tokens <= self.most else self.large).append(asked)
        self.waiting.release()
        return asked.vectors

    def stop(self) -> None:
        """End after the pass that runs."""
        self.stopped = True
        self.waiting.release()
        self.join()

    def run(self) -> None:
        """Answer requests until `stop`."""
        while self.waiting.acquire() and not self.stopped:
            self._answer_small()
            if self.large:
                self._answer([self.large.popleft()], self._answer_small)

    def _answer_small(self) -> None:
        """Answer those small requests, the first ones, that fit into a pass."""
        batch: list[Asked] = []
        tokens = 0
        while self.small and tokens + self.small[0].tokens <= self.most:
            batch.append(self.small.popleft())
            tokens += batch[-1].tokens
        self._answer(batch)

    def _answer(self, batch: list[Asked], between: Callable[[], None] = lambda: None) -> None:
        batch = [asked for asked in batch if not asked.vectors.cancelled()]
        if not batch:
            return

        def before_pass() -> None:
            if self.stopped or all(asked.vectors.cancelled() for asked in batch):
                raise CancelledError
            between()

        sequences = [one for asked in batch for one in asked.sequences]
        ends = np.cumsum([len(asked.sequences) for asked in batch])
        try:
            vectors = np.split(self.embedder.embed(sequences, before_pass), ends[:-1])
        except Exception as error:
            for asked in batch:
                with suppress(InvalidStateError):
                    asked.vectors.set_exception(error)
            return
        for asked, its in zip(batch, vectors, strict=True):
            with suppress(InvalidStateError):
                asked.vectors.set_result(its)


class Service:
    """Answers requests for vectors; `app` is the application of ASGI."""

    def __init__(self, embedder: Embedder, limits: Limits) -> None:
        self.embedder, self.limits, self.model = embedder, limits, Model(embedder)
        self.encoders = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
        self.held = 0
        """Bytes of the requests that are being read or wait for their vectors."""
        self.app = Starlette(
            routes=[Route("/", self.about), Route("/embed", self.embed, methods=["POST"])],
            exception_handlers=dict.fromkeys(
                (Refusal, HTTPException, ClientDisconnect, Exception), refused
            ),
        )

    async def about(self, _: Request) -> Response:
        known = self.embedder
        found = {"run": str(known.run), "step": known.step, "width": known.width}
        return json_of(found | {"pool": known.pool})

    async def embed(self, request: Request) -> Response:
        """Answer a request with a vector for each input, in order."""
        data = bytearray()
        try:
            await self._read(request, data)
            inputs = self._inputs(bytes(data), request.headers.get("content-type", ""))
            encoder = self.encoders[len(data) >= LARGE]
            loop = asyncio.get_running_loop()
            sequences = await loop.run_in_executor(encoder, self._encode, inputs)
            vectors = await self._vectors(request, sequences)
        finally:
            self.held -= len(data)
        if NPY not in request.headers.get("accept", ""):
            return json_of({"vectors": vectors.tolist()})
        file = io.BytesIO()
        np.save(file, vectors)
        return Response(file.getvalue(), media_type=NPY)

    async def _read(self, request: Request, data: bytearray) -> None:
        """Append the body to `data`."""
        most, seconds = self.limits.max_bytes, self.limits.seconds
        large = Refusal(413, f"the request has more than {most:,} bytes", "send several requests")
        if int(request.headers.get("content-length", 0)) > most:
            raise large
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    data += part
                    self.held += len(part)
                    if len(data) > most:
                        raise large
                    if self.held > self.limits.max_waiting:
                        raise Refusal(503, "too many requests wait", "ask again later")
        except TimeoutError:
            what = f"the request did not come whole within {seconds:g} s"
            raise Refusal(408, what, "send several requests") from None

    def _inputs(self, data: bytes, kind: str) -> Sequence[str | bytes]:
        kind = kind.partition(";")[0].strip().lower()
        if kind == BYTES:
            return [data]
        if kind != JSON:
            hint = f"Content-Type: {JSON} for {SHAPE}, {BYTES} for the bytes of one sequence"
            raise Refusal(415, f"a body of {kind or 'no type'} is not read", hint)
        try:
            inputs: list[str] = loads_json(data, Inputs).inputs
        except ValueError as error:
            raise Refusal(400, f"the request is not what is read: {error}", SHAPE) from None
        if len(inputs) > self.limits.max_inputs:
            what = f"the request has more than {self.limits.max_inputs:,} inputs"
            raise Refusal(413, what, "send several requests")
        if not inputs:
            raise Refusal(400, "the request has no inputs", SHAPE)
        return inputs

    def _encode(self, inputs: Sequence[str | bytes]) -> list[Ids]:
        sequences = []
        for number, one in enumerate(inputs):
            try:
                sequences.append(self.embedder.encode(one))
            except TokmillError as error:
                where = f"input {number}" + (f", {error.where}" if error.where else "")
                raise Refusal(400, error.what, error.hint, where) from None
        return sequences

    async def _vectors(self, request: Request, sequences: Sequence[Ids]) -> Array:
        """Wait for the model, unless the client leaves."""
        vectors: asyncio.Future[Any] = asyncio.wrap_future(self.model.ask(sequences))
        # The request has been read, so the next message is that its client has left.
        left: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait([vectors, left], return_when=asyncio.FIRST_COMPLETED)
            if not vectors.done():
                raise ClientDisconnect
            result: Array = vectors.result()
            return result
        except asyncio.CancelledError:
            raise Refusal(503, "the server stops", "ask again when it runs") from None
        finally:
            vectors.cancel()
            left.cancel()


def json_of(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


async def refused(_: Request, error: Exception) -> Response:
    """Return the reply that says why a request is not answered."""
    if isinstance(error, Refusal):
        said = {"error": error.what, "where": error.where, "hint": error.hint}
        return json_of({key: text for key, text in said.items() if text}, error.status)
    if isinstance(error, HTTPException):
        hint = "POST /embed makes vectors, GET / says of which run"
        return json_of({"error": error.detail, "hint": hint}, error.status_code)
    what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return json_of({"error": what, "hint": "the server's log says more"}, 500)


class Connection(H11Protocol):
    """uvicorn's, which waits for the first byte of a request for ever, and for its last one too.

    Here the time for which a connection is kept after a reply is also that for the head of each
    request, and for taking the reply.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        handler = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def data_received(self, data: bytes) -> None:
        """Take data; the end of a head ends the wait, and not its first byte."""
        self.conn.receive_data(data)
        self.handle_events()

    def timeout_keep_alive_handler(self) -> None:
        """End the connection, even if a reply has not been taken."""
        self.transport.abort()


def serve(
    embedder: Embedder, host: str, port: int, *, limits: Limits, log: Callable[[str], None] = print
) -> int:
    """Answer requests until SIGINT or SIGTERM; return how many.

    Port 0 takes a free one, which the log names. Requests that were received are answered before
    it ends, for `GRACE` seconds. Raises `TokmillError` if the address cannot be taken.
    """
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise TokmillError(
            f"the address cannot be taken: {error.strerror or error}",
            where=f"{host}:{port}",
            hint="choose another --port; 0 takes a free one",
        ) from None
    service = Service(embedder, limits)
    config = uvicorn.Config(
        service.app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=limits.seconds,  # type: ignore[arg-type]
        timeout_graceful_shutdown=GRACE,
    )
    server = uvicorn.Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn stops at a signal and then raises it again, which would end the process.
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    address, port = listening.getsockname()[:2]
    log(f"listening on http://{f'[{address}]' if ':' in address else address}:{port}")
    service.model.start()
    try:
        server.run([listening])
    finally:
        service.model.stop()
        for encoder in service.encoders:
            encoder.shutdown(cancel_futures=True)
    return server.server_state.total_requests
