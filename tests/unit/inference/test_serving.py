"""`tokmill serve`: real processes, real sockets, clients that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tokmill
from embedded import vectors_of
from making import quick_build
from tokmill.inference import serving
from tokmill.x86.graphs.graph_files import write_graph
from x86_graphs import Block, graph_of

NOP, RET = b"\x90", b"\xc3"
CODES = [
    b"\x55\x48\x89\xe5" + bytes([0x83, 0xC0, i]) + NOP * (i % 7) + RET for i in range(40)
]  # fmt: skip
JSON, BYTES = "application/json", "application/octet-stream"
HEAD = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"


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
        found = re.search(r"listening on http://(\S+):(\d+)", line)
        assert found, line + (self.process.stderr.read() if self.process.stderr else "")
        self.host, self.port = found[1], int(found[2])

    def client(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def get(self, path: str) -> tuple[int, Any]:
        """Return (status, value)."""
        with contextlib.closing(self.client()) as client:
            client.request("GET", path)
            reply = client.getresponse()
            return reply.status, json.loads(reply.read())

    def raw(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), 60)

    def ask(
        self, body: Any, kind: str = JSON, accept: str = "*/*", path: str = "/embed"
    ) -> tuple[int, Any]:
        """Return (status, value) of one request."""
        client = self.client()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        client.request("POST", path, data, {"Content-Type": kind, "Accept": accept})
        reply = client.getresponse()
        raw = reply.read()
        client.close()
        if "npy" in reply.headers["content-type"]:
            return reply.status, np.load(io.BytesIO(raw))
        return reply.status, json.loads(raw)

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
    found = Server(
        *(run, "--seconds", 1, "--max-bytes", 4096, "--max-inputs", 50, "--max-waiting", 40_000),
    )
    yield found
    found.stop()


@pytest.fixture(scope="module")
def wanted(run: Path, code_store: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return vectors_of(run, code_store)


def close_to(found: object, wanted: object) -> bool:
    return bool(np.abs(np.asarray(found) - np.asarray(wanted)).max() < 1e-6)


def answers(server: Server, wanted: object) -> bool:
    """Say whether a new client gets what it should."""
    status, found = server.ask({"inputs": [code.hex() for code in CODES[:3]]})
    return status == 200 and close_to(found["vectors"], np.asarray(wanted)[:3])


def closes(connection: socket.socket) -> bool:
    """Say whether the server ends a connection without a reply."""
    connection.settimeout(30)
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_vectors_are_those_of_embed(server: Server, wanted: np.ndarray, run: Path) -> None:
    inputs = {"inputs": [code.hex() for code in CODES]}
    status, found = server.ask(inputs)
    assert status == 200 and close_to(found["vectors"], wanted)
    status, found = server.ask(inputs, accept="application/x-npy")
    assert (status, found.dtype, found.shape) == (200, np.float32, wanted.shape)
    assert close_to(found, wanted)
    status, found = server.ask(CODES[7], BYTES)
    assert status == 200 and close_to(found["vectors"], wanted[7:8])
    about = {"run": str(run), "step": 1, "width": 64, "pool": "mean"}
    assert server.get("/") == (200, about)


@pytest.mark.parametrize(
    ("body", "kind", "status", "why"),
    [
        ({"inputs": ["90", "zz"]}, JSON, 400, "input 1: this is not machine code"),
        ({"inputs": ["90", "06"]}, JSON, 400, "input 1, 0x0: no instruction"),
        ({"inputs": [""]}, JSON, 400, "input 0: it has no tokens"),
        ({"inputs": []}, JSON, 400, "no inputs"),
        ({"inputs": "90"}, JSON, 400, "Expected `array`, got `str`"),
        ({"inputs": [5]}, JSON, 400, "Expected `str`, got `int`"),
        ({"input": ["90"]}, JSON, 400, "unknown field `input`"),
        (b'{"inputs": ["90"', JSON, 400, "truncated"),
        (b'{"inputs": ["\xff"]}', JSON, 400, "the request is not what is read"),
        (b"[" * 4000, JSON, 400, "the request is not what is read"),
        (b"", BYTES, 400, "input 0: it has no tokens"),
        (b"\x0f\x0b\x06", BYTES, 400, "input 0, 0x2: no instruction"),
        (NOP * 4097, BYTES, 413, "more than 4,096 bytes"),
        ({"inputs": ["90"] * 51}, JSON, 413, "more than 50 inputs"),
        (NOP, "application/x-www-form-urlencoded", 415, "x-www-form-urlencoded is not read"),
        (NOP, "", 415, "no type is not read"),
    ],
)
def test_what_is_wrong_is_said(
    server: Server, wanted: object, body: Any, kind: str, status: int, why: str
) -> None:
    found, said = server.ask(body, kind)
    assert found == status
    assert why in (f"{said['where']}: " if "where" in said else "") + said["error"]
    assert said["hint"]
    assert answers(server, wanted)


def test_other_pages_and_methods_are_errors_in_json(server: Server) -> None:
    assert server.ask(b"", path="/")[0] == 405
    status, said = server.ask(b"", path="/embeddings")
    assert (status, said["error"]) == (404, "Not Found") and "POST /embed" in said["hint"]
    assert server.get("/embed")[0] == 405


def test_many_clients_at_once(server: Server, wanted: np.ndarray) -> None:
    """Each gets its own vectors, in order, whatever is read together."""
    failed: list[int] = []

    def ask(number: int) -> None:
        order = np.random.default_rng(number).permutation(len(CODES))
        client = server.client()
        for some in (order[:1], order[1:3], order[3:]):
            body = json.dumps({"inputs": [CODES[i].hex() for i in some]})
            client.request("POST", "/embed", body, {"Content-Type": JSON})
            if not close_to(json.loads(client.getresponse().read())["vectors"], wanted[some]):
                failed.append(number)
        client.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed


def test_silent_and_slow_clients_shut_nobody_out(server: Server, wanted: object) -> None:
    """300 that say nothing, and some that stop or drip in a head or a body; all are closed."""
    held = [server.raw() for _ in range(300)]
    held[1].sendall(b"POST")
    held[2].sendall(HEAD + b"Content-Length: 9\r\n\r\n" + NOP)
    for connection in held[10:200]:
        connection.sendall(HEAD + b"Content-Length: 4000\r\n\r\n")

    def drip() -> None:
        with contextlib.suppress(OSError):
            held[3].sendall(HEAD)
            for _ in range(100):
                held[3].sendall(b"A: b\r\n")
                time.sleep(0.1)

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert answers(server, wanted)
    assert b" 408 " in held[2].recv(64)
    held[2].recv(4096)
    assert all(closes(one) for one in (*held[:2], held[3], held[5], held[299]))
    dripping.join()
    for connection in held:
        connection.close()
    assert answers(server, wanted)


def test_bytes_that_wait_are_bounded(server: Server, wanted: object) -> None:
    held = [server.raw() for _ in range(10)]
    for connection in held:
        connection.sendall(HEAD + b"Content-Length: 4096\r\n\r\n" + NOP * 3990)
    status = 0
    for _ in range(20):
        # They may have come in part only.
        status, said = server.ask(NOP * 400, BYTES)
        if status == 503:
            assert said["hint"] == "ask again later"
            break
        time.sleep(0.02)
    assert status == 503
    for connection in held:
        connection.close()
    time.sleep(0.1)
    assert answers(server, wanted)


def test_clients_that_leave_in_the_middle(server: Server, wanted: object) -> None:
    whole = HEAD + b"Content-Length: 9\r\n\r\n" + NOP * 9
    for sent in (whole[:3], whole[:-4], whole, whole * 30):
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
        with contextlib.suppress(OSError):
            for _ in range(20_000):
                connection.sendall(HEAD + b"Content-Length: 1\r\n\r\n" + RET)
        assert answers(server, wanted)


class Passes:
    """In place of an `Embedder`: a pass for each `batch_tokens`, told in order."""

    def __init__(self, most: int = 10) -> None:
        self.vectors = SimpleNamespace(batch_tokens=most)
        self.read: list[str] = []
        self.on_pass: Callable[[], object] = lambda: None

    def embed(self, sequences: list[Any], before: Callable[[], None]) -> np.ndarray:
        sizes = [len(ids["token"]) for ids in sequences]
        for _ in range(0, sum(sizes), self.vectors.batch_tokens):
            before()
            self.read.append(" ".join(map(str, sizes)))
            if max(sizes) > self.vectors.batch_tokens:
                self.on_pass()
        return np.array([[size] for size in sizes], np.float32)


def ids(size: int) -> list[Any]:
    return [{"token": np.zeros(size, np.int64)}]


def test_small_requests_are_answered_between_the_passes_of_a_large_one() -> None:
    embedder = Passes()
    model = serving.Model(embedder)  # type: ignore[arg-type]
    small: list[Any] = []

    def ask_once() -> None:
        if not small:
            small.extend(model.ask(ids(n)) for n in (4, 5, 6))

    embedder.on_pass = ask_once
    large = model.ask(ids(45))
    model.start()
    assert large.result(20).tolist() == [[45]]
    # A pass has at most ten tokens, so the third one waits for the next.
    assert embedder.read == ["45", "4 5", "45", "6", "45", "45", "45"]
    assert [one.result(1).tolist() for one in small] == [[[4]], [[5]], [[6]]]
    # What its client no longer waits for is not read to the end.
    embedder.read.clear()
    gone: list[Any] = []
    embedder.on_pass = lambda: [one.cancel() for one in gone]
    gone.append(model.ask(ids(1000)))
    assert model.ask(ids(3)).result(20).tolist() == [[3]]
    model.ask(ids(20)).result(20)
    assert embedder.read.count("1000") == 1
    embedder.on_pass = lambda: setattr(model, "stopped", True)
    model.ask(ids(1000))
    while not model.stopped:
        time.sleep(0.001)
    model.stop()
    assert not model.is_alive() and embedder.read.count("1000") == 2


def test_a_fault_is_an_error_in_json() -> None:
    reply = asyncio.run(serving.refused(None, ZeroDivisionError("a\nb")))  # type: ignore[arg-type]
    assert (reply.status_code, json.loads(reply.body)["error"]) == (500, "ZeroDivisionError: a b")


def test_a_request_of_a_mebibyte_holds_nobody_up(run: Path, wanted: object) -> None:
    server = Server(run, "--batch-tokens", 64)
    large = server.raw()
    body = NOP * (1 << 20)
    large.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert all(answers(server, wanted) for _ in range(5))
    large.settimeout(0.01)
    with pytest.raises(TimeoutError):
        large.recv(1)
    large.settimeout(30)
    code, said = server.stop()
    assert code == 0 and "stopped after 6 requests" in said and "Traceback" not in said, said
    assert b" 503 " in large.recv(64)
    large.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_clean_stop(run: Path, wanted: object, number: int) -> None:
    """What was asked is answered; connections that are idle end; the exit code is 0."""
    server = Server(run)
    assert answers(server, wanted)
    idle = server.raw()
    found: list[bool] = []
    busy = threading.Thread(target=lambda: found.append(answers(server, wanted)))
    busy.start()
    while not found and busy.is_alive():
        time.sleep(0.001)
    code, said = server.stop(number)
    busy.join()
    assert (code, found) == (0, [True]), said
    assert "stopped after 2 requests" in said and "Traceback" not in said
    assert closes(idle)
    idle.close()
    with pytest.raises(ConnectionRefusedError):
        server.raw()


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
    assert "--seconds" in said(run, "--port", 0, "--seconds", 0)


def test_text(tmp_path: Path) -> None:
    """A run on text reads strings, and UTF-8."""
    from source_cases import small_run

    [_, place] = small_run(tmp_path)
    server = Server(Path(str(place)))
    _, found = server.ask({"inputs": ["a text", "日本", "a text"]})
    first, other, again = found["vectors"]
    assert close_to(first, again) and not close_to(first, other)
    assert close_to(server.ask("日本".encode(), BYTES)[1]["vectors"], [other])
    status, said = server.ask(b"\xff\xfe", BYTES)
    assert (status, said["where"]) == (400, "input 0") and "no UTF-8" in said["error"]
    assert server.ask(b'{"inputs": ["\\ud800"]}')[0] == 400
    assert server.stop()[0] == 0
