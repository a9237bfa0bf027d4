"""Servers of objects on loopback, and a proxy that does to their answers what networks do."""

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tokmill.base import remote

Fault = str | int | float | None
"""A status to answer, seconds to wait, "cut" (half of a body), "drop" (no answer at all); of a
cable that is cut: "swallow" (a request is not even read), "stall" (half a body, then silence)."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def juicefs() -> str:
    """Return the binary of JuiceFS, or "": the package of that name brings it."""
    beside = [Path(sys.executable).parent, *(Path(entry, "bin") for entry in sys.path)]
    return shutil.which("juicefs", path=os.pathsep.join(map(str, beside))) or ""


@contextlib.contextmanager
def served(command: list[str], port: int, env: dict[str, str], log: Path) -> Iterator[None]:
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, env={**os.environ, **env}, stdout=file, stderr=file, cwd=log.parent
        ) as server,
    ):
        try:
            until = time.monotonic() + 30
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert time.monotonic() < until and server.poll() is None, log.read_text()
                    time.sleep(0.05)
            yield
        finally:
            server.kill()


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[tuple[int, str]]:
    """Run moto's S3, which obeys conditions; yield its port and a bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with served(command, port, {}, folder / "moto.log"):
        new = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        urllib.request.urlopen(new, timeout=20).close()
        yield port, "bucket"


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[tuple[int, str]]:
    """Run JuiceFS's gateway, which ignores conditions; yield its port and its bucket."""
    port, meta = free_port(), f"sqlite3://{folder}/meta.db"
    data = ["--storage", "file", "--bucket", f"{folder}/data/", "--no-update", meta, "tok"]
    subprocess.run([juicefs(), "format", *data], check=True, capture_output=True, timeout=60)
    user = {"MINIO_ROOT_USER": "user", "MINIO_ROOT_PASSWORD": "password"}
    command = [juicefs(), "gateway", meta, f"127.0.0.1:{port}"]
    with served(command, port, user, folder / "juicefs.log"):
        yield port, "tok"


class Proxy:
    """Passes requests on to a server; `fault` says what happens to the answer of each."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.fault: Callable[[str, str], Fault] = lambda method, path: None
        self.requests: list[tuple[str, str, int]] = []
        """Method, path and bytes of the body of each answer."""
        self.headers: dict[str, str] = {}
        """Headers that are added to each request."""
        self.refuses: Callable[[str], str] = lambda authorization: ""
        """The code of S3 with which a request is refused; "": it is passed on."""
        self.answer: Callable[[str, str], bytes | None] = lambda method, path: None
        """A body to answer with status 200 in place of passing a request on."""
        self.ended = threading.Event()
        self.rate = 0.0
        """Bytes a second of all answers together; 0: no limit."""
        self._free, self._lock = 0.0, threading.Lock()
        self.status = 403
        """Of a refusal; S3 has 400 for credentials that have ended."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16
            disable_nagle_algorithm = True

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    super().handle_one_request()

            def pass_on(self) -> None:
                proxy.pass_on(self)

        for method in ("GET", "PUT", "HEAD", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.pass_on)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port: int = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def pass_on(self, to: BaseHTTPRequestHandler) -> None:
        fault = self.fault(to.command, to.path)
        if fault == "swallow":
            self.ended.wait(300)
            return
        body = to.rfile.read(int(to.headers.get("Content-Length") or 0))
        if code := self.refuses(to.headers.get("Authorization") or ""):
            data = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            to.send_response(self.status)
            to.send_header("Content-Length", str(len(data)))
            to.end_headers()
            to.wfile.write(data if to.command != "HEAD" else b"")
            return
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "drop" or isinstance(fault, int):
            if fault != "drop":
                to.send_response(int(fault))
                to.send_header("Content-Length", "0")
                to.end_headers()
            to.close_connection = True
            return
        if (instead := self.answer(to.command, to.path)) is not None:
            to.send_response(200)
            to.send_header("Content-Length", str(len(instead)))
            to.end_headers()
            to.wfile.write(instead)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        with contextlib.closing(upstream):
            upstream.request(to.command, to.path, body, {**to.headers, **self.headers})
            answer = upstream.getresponse()
            data = answer.read()
        self.requests.append((to.command, to.path, len(data)))
        if self.rate:
            with self._lock:
                self._free = max(self._free, time.monotonic()) + len(data) / self.rate
                until = self._free
            time.sleep(max(0.0, until - time.monotonic()))
        to.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                to.send_header(name, value)
        length = answer.getheader("Content-Length") if to.command == "HEAD" else len(data)
        to.send_header("Content-Length", str(length or 0))
        to.end_headers()
        if fault in ("cut", "stall"):
            to.wfile.write(data[: len(data) // 2])
            to.wfile.flush()
            to.close_connection = True
            self.ended.wait(300 if fault == "stall" else 0)
        else:
            to.wfile.write(data)

    def close(self) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()


class Credentials:
    """Hands out credentials that end after some seconds, to who has the token of a container.

    They are handed out until their very end, so some requests come too late. `refuses` is for a
    proxy.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.seconds, self.begun, self.handed = seconds, time.time(), 0
        self.late = 0
        token = folder / "container-token"
        token.write_text("a container")
        credentials = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
                pass

            def do_GET(self) -> None:
                assert self.headers["Authorization"] == "a container"
                credentials.handed += 1
                number = credentials.number
                end = datetime.fromtimestamp(credentials.begun + (number + 1) * seconds, UTC)
                data = {"AccessKeyId": f"key{number}", "SecretAccessKey": "s", "Token": "t"}
                body = json.dumps(data | {"Expiration": end.isoformat()}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        where = f"http://127.0.0.1:{self.server.server_address[1]}/credentials"
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", where)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
        remote._new_client.cache_clear()

    @property
    def number(self) -> int:
        """The number of the credentials that are valid now."""
        return int((time.time() - self.begun) / self.seconds)

    def refuses(self, authorization: str) -> str:
        late = f"Credential=key{self.number}/" not in authorization
        self.late += late
        return "ExpiredToken" if late else ""


def set_up(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    proxy = Proxy(port)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "password",
        "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
        "TOKMILL_CACHE": str(tmp_path / "cache"), "TOKMILL_PATIENCE": "10",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    remote._new_client.cache_clear()
    return proxy
