"""`tokmill serve` and its client: real processes, real sockets, clients that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tokmill
from making import quick_build
from tokmill import EmbeddingClient
from tokmill.errors import MachineError, TokmillError, UsageError
from tokmill.inference import serving
from tokmill.inference.embed import embed
from tokmill.x86.graphs.files import write_graph
from x86_graphs import Block, graph_of

NOP, RET = b"\x90", b"\xc3"
CODES = [
    b"\x55\x48\x89\xe5" + bytes([0x83, 0xC0, i]) + NOP * (i % 7) + RET for i in range(40)
]  # fmt: skip
HUGE = 0xFFFFFFFF


class Server:
    """A server in a process of its own."""

    def __init__(self, run: Path, *options: object) -> None:
        command = [sys.executable, "-m", "tokmill", "serve", str(run), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"listening on (\S+):(\d+)", line)
        assert found, line + (self.process.stderr.read() if self.process.stderr else "")
        self.host, self.port = found[1], int(found[2])

    def client(self, **options: float) -> EmbeddingClient:
        return EmbeddingClient(self.host, self.port, **options)  # type: ignore[arg-type]

    def raw(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), 60)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Stop it; return the exit code and the log."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            _, said = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            # Its last words are where each thread stands.
            self.process.send_signal(signal.SIGABRT)
            _, said = self.process.communicate(timeout=60)
            raise AssertionError(f"the server does not stop\n{said}") from None
        finally:
            self.process.kill()
            self.process.wait()
        return self.process.returncode, said


@pytest.fixture(scope="module")
def code_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Functions whose bytes are `CODES`, as a build makes them."""
    folder = tmp_path_factory.mktemp("served")
    functions = {}
    for number, code in enumerate(CODES):
        at = 0x1000 + 0x100 * number
        pieces = [code[:1], code[1:4], code[4:7], *(bytes([one]) for one in code[7:])]
        functions[at] = [Block(at, pieces)]
    write_graph(graph_of(functions, [f"f{i}" for i in range(len(CODES))]), folder / "a.cfg.parquet")
    return quick_build("x86", folder / "a.cfg.parquet", folder / "store").path


@pytest.fixture(scope="module")
def run(code_store: Path) -> Path:
    recipe = {
        "data": {"train": str(code_store), "batch": 2},
        "model": {"kind": "rwkv7", "dim": 64, "layers": 1},
        "task": {"length": 16},
        "run": {"steps": 1, "device": "cpu", "peak_flops": 1e12},
    }
    place = code_store.parent / "run"
    tokmill.train(recipe, place, quiet=True)
    return place


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    # Limits that the tests below reach in a short time.
    found = Server(run, "--seconds", 1, "--idle", 2, "--max-bytes", 4096, "--max-clients", 80)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def wanted(run: Path, code_store: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    file = code_store.parent / "vectors.npy"
    embed(run, code_store, npy=file)
    found: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = np.load(file)
    return found


def close_to(found: object, wanted: object) -> bool:
    return bool(np.abs(np.asarray(found) - np.asarray(wanted)).max() < 1e-6)


def answers(server: Server, wanted: object) -> bool:
    """Say whether a new client gets what it should."""
    with server.client() as client:
        return close_to(client.embed_many(CODES[:3]), np.asarray(wanted)[:3])


def closes(connection: socket.socket) -> bool:
    """Say whether the server ends a connection without a reply."""
    connection.settimeout(30)
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_vectors_are_those_of_embed(server: Server, wanted: object) -> None:
    with server.client() as client:
        assert close_to(client.embed_many(CODES), wanted)
        assert close_to(client.embed(CODES[7]), np.asarray(wanted)[7])
        with pytest.raises(UsageError, match="no bytes to embed"):
            client.embed(b"")


def test_the_framing_byte_by_byte(server: Server, wanted: object) -> None:
    """As the clients of the original: a length, the bytes, one at a time; 0 ends it."""
    with server.raw() as connection:
        for byte in len(CODES[0]).to_bytes(4, "big") + CODES[0]:
            connection.sendall(bytes([byte]))
        size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
        data = connection.recv(size, socket.MSG_WAITALL)
        assert size == 4 * 64 and close_to(np.frombuffer(data, "<f4"), np.asarray(wanted)[0])
        connection.sendall(bytes(4))
        assert closes(connection)


def test_many_clients_at_once(server: Server, wanted: object) -> None:
    """Each gets its own vectors, in order, whatever is read together."""
    failed: list[int] = []

    def ask(number: int) -> None:
        order = np.random.default_rng(number).permutation(len(CODES))
        with server.client() as client:
            found = client.embed_many([CODES[i] for i in order])
        if not close_to(found, np.asarray(wanted)[order]):
            failed.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed


@pytest.mark.parametrize(
    "sent",
    [
        HUGE.to_bytes(4, "big"),
        (4097).to_bytes(4, "big") + bytes(4097),
        (8).to_bytes(4, "big") + b"\xff" * 8,
        b"GET / HTTP/1.1\r\n\r\n",
        (3).to_bytes(4, "big") + b"\x0f\x0b\x06",
    ],
    ids=["huge", "above", "no code", "http", "invalid"],
)
def test_what_cannot_be_answered_closes_the_connection(
    server: Server, wanted: object, sent: bytes
) -> None:
    with server.raw() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        assert closes(connection)
    assert answers(server, wanted)


def test_slow_and_silent_clients_are_closed(server: Server, wanted: object) -> None:
    """One never speaks, one stops in a length, one in a request, one drips, one is half open."""
    held = [server.raw() for _ in range(5)]
    held[1].sendall(b"\0\0")
    held[2].sendall((9).to_bytes(4, "big") + NOP)
    held[3].sendall((200).to_bytes(4, "big"))
    held[4].sendall((1).to_bytes(4, "big") + RET)
    assert len(held[4].recv(260, socket.MSG_WAITALL)) == 260

    def drip() -> None:
        with contextlib.suppress(OSError):
            for _ in range(100):
                held[3].sendall(NOP)
                time.sleep(0.1)

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert answers(server, wanted)
    assert all(closes(connection) for connection in held)
    dripping.join()
    for connection in held:
        connection.close()


def test_clients_that_leave_in_the_middle(server: Server, wanted: object) -> None:
    for sent in (b"\0", b"\0\0\0\x09\x90", (7).to_bytes(4, "big") + CODES[0][:7]):
        for reset in (False, True):
            connection = server.raw()
            connection.sendall(sent)
            if reset:
                linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()
    assert answers(server, wanted)


def test_a_client_that_takes_no_replies_is_closed(server: Server, wanted: object) -> None:
    """It asks for ever, and reads nothing: the server does not keep its replies."""
    with server.raw() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(5)
        request = (1).to_bytes(4, "big") + RET
        with contextlib.suppress(OSError):
            for _ in range(200):
                connection.sendall(request * 2000)
        assert answers(server, wanted)


def test_more_clients_than_allowed_are_turned_away(server: Server, wanted: object) -> None:
    held = [server.raw() for _ in range(81)]
    try:
        assert closes(held[80])
    finally:
        for connection in held:
            connection.close()
    for _ in range(50):
        with contextlib.suppress(TokmillError):
            if answers(server, wanted):
                return
        time.sleep(0.1)
    raise AssertionError("the server is still full")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_clean_stop(run: Path, number: int) -> None:
    """What was asked is answered; connections that are idle end; the exit code is 0."""
    server = Server(run)
    busy, idle = server.raw(), server.raw()
    many = b"".join(len(code).to_bytes(4, "big") + code for code in CODES)
    busy.sendall(many)
    assert len(busy.recv(260, socket.MSG_WAITALL)) == 260
    code, said = server.stop(number)
    assert code == 0, said
    assert "stopping" in said and re.search(r"stopped after \d+ requests of 2 clients", said), said
    assert "Traceback" not in said
    assert closes(idle)
    busy.close()
    idle.close()
    with pytest.raises(MachineError, match="no embedding server answers"):
        server.client()


class Counting:
    """In place of an `Embedder`, where only the order of events matters."""

    def encode(self, data: bytes) -> bytes:
        return data

    def embed(self, sequences: list[bytes]) -> np.ndarray:
        return np.array([[len(one)] for one in sequences], np.float32)


def test_a_stop_at_any_moment_ends_every_client() -> None:
    """Also one whose request comes in the same turn of the loop as the stop."""

    async def stop_after(turns: int) -> None:
        said: list[str] = []
        server = serving.Server(Counting(), serving.Limits(seconds=60), said.append)  # type: ignore[arg-type]
        running = asyncio.create_task(server.run(port=0))
        while not said:
            await asyncio.sleep(0)
        _, writer = await asyncio.open_connection("127.0.0.1", int(said[0].rsplit(":", 1)[1]))
        for _ in range(turns):
            writer.write((1).to_bytes(4, "big") + RET)
            await asyncio.sleep(0)
        server._stop.set()
        for _ in range(4):
            writer.write((1).to_bytes(4, "big") + RET)
            await asyncio.sleep(0)
        await asyncio.wait_for(running, 20)
        writer.close()

    for turns in range(60):
        asyncio.run(stop_after(turns))


def test_refusals_are_said_a_line_each(run: Path) -> None:
    server = Server(run, "--max-bytes", 100)
    for sent in (HUGE.to_bytes(4, "big"), (1).to_bytes(4, "big") + b"\x06", b"\0\0"):
        with server.raw() as connection:
            connection.sendall(sent)
            if len(sent) > 2:
                assert closes(connection)
    with server.client() as client, pytest.raises(TokmillError, match="closed the connection"):
        client.embed(b"\x06")
    with server.client() as client:
        client.embed(RET)
    code, said = server.stop()
    assert code == 0
    assert "closed: the length 4,294,967,295 is above 100" in said
    assert said.count("closed: 1 bytes: ") == 2
    assert "closed: the client left after 2 of the 4 bytes of a length" in said
    assert "stopped after 1 requests of 5 clients" in said


@pytest.mark.long
def test_starts_that_cannot_be(run: Path, server: Server, tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        command = [sys.executable, "-m", "tokmill", "serve", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode in (1, 2, 3), done
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "the address cannot be taken" in said(run, "--port", server.port)
    assert "there is no such folder" in said(tmp_path / "none")
    assert "seconds = 0" in said(run, "--port", 0, "--seconds", 0)


def test_a_client_of_a_strange_server() -> None:
    """Replies of impossible lengths, and an end in the middle, are errors."""
    for reply, why in (
        (HUGE.to_bytes(4, "big"), "4,294,967,295 bytes, which is no vector"),
        ((6).to_bytes(4, "big") + bytes(6), "6 bytes, which is no vector"),
        (bytes(4), "0 bytes, which is no vector"),
        ((8).to_bytes(4, "big") + bytes(3), "closed the connection"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def answer(listening: socket.socket = listening, reply: bytes = reply) -> None:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(5)
                    connection.sendall(reply)

            thread = threading.Thread(target=answer)
            thread.start()
            with (
                EmbeddingClient(*listening.getsockname()) as client,
                pytest.raises(TokmillError, match=why),
            ):
                client.embed(RET)
            thread.join()


def test_text(tmp_path: Path) -> None:
    """A run on text reads UTF-8."""
    from source_cases import small_run

    [_, place] = small_run(tmp_path)
    server = Server(Path(str(place)))
    with server.client() as client:
        found = client.embed_many([b"a text", "日本".encode(), b"a text"])
        assert close_to(found[0], found[2]) and not close_to(found[0], found[1])
        with pytest.raises(TokmillError, match="closed the connection"):
            client.embed(b"\xff\xfe")
    code, said = server.stop()
    assert code == 0 and "no UTF-8" in said
