"""One machine at a time continues the run at an address, which has no locks: who does signs there.

The signature is renewed while the run goes on, and removed at its end. Whoever finds one waits:
where it is renewed the run is refused, and where it is not renewed for `LEASE` seconds of the own
clock that machine is lost. One that was only cut off notices later that it was replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tokmill.base import remote
from tokmill.base.errors import Interrupted, MachineError, TokmillError
from tokmill.base.files import read_file
from tokmill.base.remote import Absent, Changed, listed
from tokmill.base.stop import Stop
from tokmill.store.manifest import decode, encode
from tokmill.training.runs.checkpoint import RUN_ID, say

OWNER = "owner.json"
LEASE, RENEWED = 60.0, 15.0
"""Seconds without a sign after which a machine counts as lost, and between two signs."""
ANOTHER = "--push another address for this run, or remove what is there"


class Signature(msgspec.Struct, frozen=True):
    """Who trains a run: `key` is drawn for each session, `sign` counts up."""

    key: str
    host: str
    pid: int
    processes: str
    """Boot of the machine and namespace of its processes: equal ones have the same numbers."""
    since: str
    sign: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def sign_here() -> Signature:
    """Return a new signature of this process."""
    boot = read_file(Path("/proc/sys/kernel/random/boot_id")).decode().strip()
    processes = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return Signature(secrets.token_hex(16), socket.gethostname(), os.getpid(), processes, since)


class Owner:
    """Holds the run at an address while it is a context."""

    def __init__(self, address: str, stop: Stop) -> None:
        self.address, self.stop, self.mine = remote.target_of(address), stop, sign_here()
        self.where = f"{self.address}/{OWNER}"
        self.lost: MachineError | None = None
        self._ended, self._thread = threading.Event(), threading.Thread()

    def __enter__(self) -> None:
        names = {one.address.removeprefix(f"{self.address}/") for one in listed(self.address)}
        if names - {OWNER} and RUN_ID not in names:
            what = "something else than a run lies at the address"
            raise TokmillError(what, where=self.address, hint=ANOTHER)
        before = self._wait()
        self._write(before[1] if before else "")
        self.check()
        self._thread = threading.Thread(target=self._renew, name="tokmill-owner", daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        # If it cannot be removed, the next one waits.
        with contextlib.suppress(TokmillError):
            self._thread.join(RENEWED)
            self.check()
            remote.delete(self.where)

    def check(self) -> str:
        """Return the ETag of the signature; raise `MachineError` if it is another's."""
        there = None if self.lost else self._read()
        if there and there[0].key != self.mine.key:
            what = f"another process trains the run that is pushed here: {there[0]}"
            hint = "let only one go on, or --push another address; checkpoints in RUN are whole"
            self.lost = MachineError(what, where=self.address, hint=hint)
        if self.lost:
            raise self.lost
        return there[1] if there else ""

    def _read(self) -> tuple[Signature, str] | None:
        try:
            facts = remote.head(self.where)
            data = remote.read(facts)
        except Absent:
            return None
        except Changed:
            return self._read()
        return decode(data, self.where, Signature, sealed=False), facts.mark

    def _write(self, mark: str) -> None:
        # Whether it was written is seen by `check`: a request that was repeated may be refused.
        remote.put(self.where, encode(self.mine), "", replace=mark)

    def _wait(self) -> tuple[Signature, str] | None:
        """Return the signature of a machine that is lost; raise if it is not lost."""
        there, until = self._read(), time.monotonic() + LEASE
        if there and not self._is_gone(there[0]):
            say(f"waiting up to {LEASE:g} s for a sign of another training: {there[0]}")
        first = there[0] if there else None
        while there and not self._is_gone(there[0]) and time.monotonic() < until:
            if self.stop.reason:
                what, hint = f"stopped by {self.stop.reason}", "the same command waits again"
                raise Interrupted(f"{what} before it began", where=self.address, hint=hint)
            time.sleep(0.5)
            if (there := self._read()) and there[0] != first:
                self.check()
        return there

    def _is_gone(self, one: Signature) -> bool:
        """Say whether a process of this machine has ended."""
        here = one.processes == self.mine.processes
        return here and (one.pid == os.getpid() or not os.path.exists(f"/proc/{one.pid}"))

    def _renew(self) -> None:
        while not self.lost and not self._ended.wait(RENEWED):
            # A server that does not answer is told by the next checkpoint.
            with contextlib.suppress(TokmillError):
                self.mine = msgspec.structs.replace(self.mine, sign=self.mine.sign + 1)
                self._write(self.check())
