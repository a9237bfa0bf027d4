"""A client of `tokmill serve`, and of any server with the same framing."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from tokmill.errors import MachineError, TokmillError, UsageError

HEAD = 4
AHEAD = 32
"""Requests that are sent before the first of them is answered."""
Array = np.ndarray[Any, np.dtype[np.float32]]


class EmbeddingClient:
    """Asks an embedding server for vectors, over one connection.

    Args:
        host, port: where the server listens.
        seconds: for each step of the connection.
        most: bytes of a reply at most.

    Raises `MachineError` if there is no server.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 12345, *, seconds: float = 60.0,
        most: int = 1 << 24,
    ) -> None:  # fmt: skip
        self.where, self.most = f"{host}:{port}", most
        try:
            self.socket = socket.create_connection((host, port), seconds)
        except OSError as error:
            raise MachineError(
                f"no embedding server answers: {error}",
                where=self.where,
                hint="`tokmill serve RUN` starts one",
            ) from None
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def embed(self, data: bytes) -> Array:
        """Return the vector of some bytes, float32 (width,).

        Raises `UsageError` for no bytes, `TokmillError` if the server closes the connection (its
        log says why) or does not answer in time.
        """
        [found] = self.embed_many([data])
        return found

    def embed_many(self, sequences: Sequence[bytes]) -> list[Array]:
        """Return the vectors of several sequences, in order; some are sent ahead."""
        if any(not data for data in sequences):
            raise UsageError("there are no bytes to embed", hint="a length of 0 ends a connection")
        found: list[Array] = []
        for start in range(0, len(sequences), AHEAD):
            some = sequences[start : start + AHEAD]
            try:
                self.socket.sendall(b"".join(_framed(some)))
                found += [self._reply() for _ in some]
            except TimeoutError:
                raise self._failed("does not answer in time", "is it busy?") from None
            except OSError as error:
                raise self._failed(f"has closed the connection ({error})") from None
        return found

    def close(self) -> None:
        """Tell the server that this is the end, and close the connection."""
        try:
            self.socket.sendall(bytes(HEAD))
        except OSError:
            pass
        finally:
            self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _reply(self) -> Array:
        size = int.from_bytes(self._read(HEAD), "big")
        if not 0 < size <= self.most or size % 4:
            raise self._failed(f"sends a reply of {size:,} bytes, which is no vector")
        return np.frombuffer(self._read(size), "<f4").astype(np.float32)

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.socket.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise self._failed("has closed the connection")
            parts += part
        return bytes(parts)

    def _failed(self, what: str, hint: str = "its log says why") -> TokmillError:
        return TokmillError(f"the server {what}", where=self.where, hint=hint)


def _framed(sequences: Iterable[bytes]) -> Iterator[bytes]:
    for data in sequences:
        yield len(data).to_bytes(HEAD, "big")
        yield data
