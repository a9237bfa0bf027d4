"""Serving vectors: requests a second and latency of `tokmill serve`, with 1, 16 and 64 clients.

A small model with random weights answers functions of 16 to 200 bytes over the loopback address.
Each client waits for a reply before it asks again. Counts and time are bounded.

    python benchmarks/serving.py CACHE
"""

from __future__ import annotations

import http.client
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

import tokmill

REQUESTS = 1000
"""Of all clients together."""
SECONDS = 10.0
CLIENTS = (1, 16, 64)


def codes(count: int = 200) -> list[bytes]:
    """Return machine code of several lengths: pushes, additions, returns."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(count):
        body = b"".join(bytes([0x83, 0xC0, int(i)]) for i in draw.integers(0, 100, 5))
        found.append(b"\x55" + body * int(draw.integers(1, 14)) + b"\xc3")
    return found


def ask(port: int, clients: int, batch: list[bytes]) -> tuple[float, np.ndarray]:
    """Return the seconds of all requests and the latency of each."""
    latencies: list[float] = []
    until = time.perf_counter() + SECONDS

    def one(number: int) -> None:
        client = http.client.HTTPConnection("127.0.0.1", port)
        headers = {"Content-Type": "application/octet-stream", "Accept": "application/x-npy"}
        for i in range(REQUESTS // clients):
            before = time.perf_counter()
            if before > until:
                break
            client.request("POST", "/embed", batch[(number + i * 7) % len(batch)], headers)
            client.getresponse().read()
            latencies.append(time.perf_counter() - before)
        client.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin, np.asarray(latencies)


def main(cache: Path) -> list[str]:
    """Return the lines of the table."""
    folder = cache / "serving"
    folder.mkdir(parents=True, exist_ok=True)
    store = tokmill.build("x86", shutil.which("ls") or sys.executable, folder / "functions")
    recipe = {
        "data": {"train": str(store.path), "batch": 2},
        "model": {"kind": "rwkv7", "dim": 128, "layers": 2},
        "task": {"length": 512},
        "run": {"steps": 1, "device": "cpu", "peak_flops": 1e12},
    }
    run = folder / "run"
    if not run.exists():
        tokmill.train(recipe, run, quiet=True)
    command = [sys.executable, "-m", "tokmill", "serve", str(run), "--port", "0", "--quiet"]
    lines = ["| clients | requests/s | median ms | 95th percentile ms |", "|---|---|---|---|"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])
        try:
            ask(port, 1, codes(20))
            for clients in CLIENTS:
                seconds, latency = ask(port, clients, codes())
                low, high = np.percentile(latency * 1000, [50, 95])
                rate = len(latency) / seconds
                lines.append(f"| {clients} | {rate:,.0f} | {low:.1f} | {high:.1f} |")
        finally:
            server.terminate()
    return lines


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]))))
