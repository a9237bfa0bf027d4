"""A run at an address: checkpoints are sent while it trains, and a new folder begins with them.

Below the address lie files of the run's folder under the same names. A checkpoint's `state.json` is
written last and removed first, so whoever reads finds all of a checkpoint or none.

One machine at a time continues the run at an address, which has no locks: who does signs there.
The signature is renewed while the run goes on, and removed at its end. Whoever finds one waits:
where it is renewed the run is refused, and where it is not renewed for `LEASE` seconds of the own
clock that machine is lost. One that was only cut off notices later that it was replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tokmill.base import remote
from tokmill.base.errors import Interrupted, MachineError, TokmillError
from tokmill.base.files import (
    TEMPORARY,
    inside,
    make_folder,
    read_file,
    stamp,
    write_file,
)
from tokmill.base.remote import AT_ONCE, WHOLE, Absent, Changed, at_once, head, listed
from tokmill.base.stop import Stop
from tokmill.store.manifest import decode, encode
from tokmill.training.launch import told_when_waiting
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.read_recipe import RECIPE
from tokmill.training.runs import checkpoint as saved
from tokmill.training.runs import run as runs
from tokmill.training.runs.checkpoint import FOLDER, NAME, RUN_ID, STATE, checkpoints, run_id, say

OWNER = "owner.json"
LEASE, RENEWED = 60.0, 15.0
"""Seconds without a sign after which a machine counts as lost, and between two signs."""
ANOTHER = "--push another address for this run, or remove what is there"
FILES = re.compile(
    r"run-id|schema\.json|input_format\.json|vocab/[^/.][^/]*|sessions\.jsonl|metrics\.jsonl|"
    r"wandb-id|recipe\.json|(?P<best>best/(model\.safetensors|config\.json))"
)
"""Names of the files of a run that lie at its address besides checkpoints."""


def _another(address: str, id_there: bytes, out: Path, why: str = "") -> TokmillError:
    own_id = f" ({run_id(out)[:12]})" if run_id(out) else ""
    name = id_there.decode(errors="replace").strip()[:12]
    what = f"another run ({name}) than that of {out}{own_id} is at the address{why}"
    return TokmillError(what, where=address, hint=ANOTHER)


def _in_a_line(error: Exception) -> str:
    return str(error).partition("\nhint: ")[0]


def _names(address: str) -> set[str]:
    return {one.address.removeprefix(f"{address}/") for one in listed(address)}


def _steps(names: Iterable[str]) -> list[str]:
    """Return the names of checkpoints that are whole at an address, oldest first."""
    matches = (re.fullmatch(rf"{FOLDER}/({NAME.pattern})/{STATE}", name) for name in names)
    return sorted((match[1] for match in matches if match), key=lambda one: int(one[5:]))


def take(out: Path, config: TrainConfig) -> None:
    """Fetch the newest whole checkpoint at `run.push` if the folder has none as new."""
    address = remote.target_of(config.run.push)
    names = _names(address) - {OWNER}
    own = [name for name in names if (match := FILES.fullmatch(name)) and not match["best"]]
    fetched = at_once(lambda name: remote.read_whole(f"{address}/{name}"), own)
    data, begun = dict(zip(own, fetched, strict=True)), (out / RECIPE).exists()
    newest = saved.step_of_name(checkpoints(out)[-1]) if checkpoints(out) else -1
    newer = [name for name in _steps(names) if int(name[5:]) > newest]
    if not begun and RECIPE in data:
        recipe = decode(data[RECIPE], f"{address}/{RECIPE}", dict[str, Any], has_checksum=False)
        try:
            runs.check_resume(recipe, config, int(newer[-1][5:]) if newer else 0, address)
        except TokmillError as error:
            raise _another(address, data[RUN_ID], out, f": {error.what}") from None
    elif begun and names and data[RUN_ID].split() != [run_id(out).encode()]:
        raise _another(address, data[RUN_ID], out)
    # Without a recipe nothing but the id is there; a folder that has begun keeps its recipe.
    data = {RUN_ID: data[RUN_ID]} if names and RECIPE not in data else data
    kept = {name: one for name, one in data.items() if newer or not begun}
    for name in sorted(
        kept, key=lambda name: (name.split("/")[0] not in runs.BEGUN, name != RECIPE)
    ):
        if name != RECIPE or not begun:
            _write(inside(out, name, deep=True), kept[name])
    for name in sorted(names, reverse=True):
        if newer and (match := FILES.fullmatch(name)) and match["best"]:
            _write(out / name, remote.stream(f"{address}/{name}"))
    if newer:
        _take_checkpoint(address, newer, out)


def _write(path: Path, data: bytes | Iterator[bytes]) -> None:
    make_folder(path.parent)
    write_file(path, data)


def _take_checkpoint(address: str, names: list[str], out: Path) -> None:
    """Fetch the newest of some checkpoints that is whole by its digests."""
    for name in reversed(names):
        where, private = f"{address}/{FOLDER}/{name}", out / FOLDER / f"{TEMPORARY}{name}"

        def fetch(file: str, where: str = where, private: Path = private) -> None:
            _write(inside(private, file), remote.stream(f"{where}/{file}"))

        try:
            fetch(STATE)
            for _ in at_once(fetch, saved.read_state(private).files, AT_ONCE):
                pass
            saved.check_checkpoint(private)
            return saved.replace(private, out / FOLDER / name)
        except MachineError:
            raise
        except TokmillError as error:
            say(f"{where} is not used: {error.what}")
            last = error
    hint = "--push another address, and `--from RUN/best` or no --from begins another run"
    raise TokmillError(f"no checkpoint there can be used: {last.what}", where=address, hint=hint)


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
        return decode(data, self.where, Signature, has_checksum=False), facts.mark

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
        here = one.processes == self.mine.processes
        return here and (one.pid == os.getpid() or not os.path.exists(f"/proc/{one.pid}"))

    def _renew(self) -> None:
        while not self.lost and not self._ended.wait(RENEWED):
            # A server that does not answer is told by the next checkpoint.
            with contextlib.suppress(TokmillError):
                self.mine = msgspec.structs.replace(self.mine, sign=self.mine.sign + 1)
                self._write(self.check())


class Pusher:
    """Sends checkpoints to an address in a thread; at most the newest one waits.

    As a context it waits for the last one at its end, unless a second signal came.
    """

    def __init__(self, out: Path, keep: int, owner: Owner | None) -> None:
        self.out, self.keep, self.owner = out, keep, owner
        self.address = owner.address if owner else ""
        self.asked = self.sent = 0
        self._busy: Path | None = None
        self._waiting: Path | None = None
        self._lock, self._thread = threading.Lock(), threading.Thread()
        self._error: Exception | None = None
        self._stamps: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> Pusher:
        if self.address:
            self._claim()
            for newest in checkpoints(self.out)[-1:]:
                self.push(newest)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if not self.asked or not (error is None or isinstance(error, TokmillError)):
            return
        with told_when_waiting(f"the push of the newest checkpoint to {self.address}"):
            self._thread.join()
        saved.drop_old(self.out, self.keep)
        if self.sent < self.asked:
            count = f"{self.asked - self.sent} of {self.asked} checkpoints were not pushed"
            say(f"{count}{'' if self._error else '; the newest one was'}: {self.address}")
        if self._error and error is None:
            what = f"the newest checkpoint is in {self.out}, and not at the address"
            hint = "the same command sends it again; --push '' does without"
            raise MachineError(f"{what}: {_in_a_line(self._error)}", where=self.address, hint=hint)

    def held(self) -> list[Path]:
        """Return the checkpoints that are being sent, or wait for it."""
        with self._lock:
            return [path for path in (self._busy, self._waiting) if path]

    def push(self, folder: Path) -> None:
        """Send a checkpoint when the one before is sent; one that waits is given up."""
        if not self.owner:
            return
        if self.owner.lost:
            raise self.owner.lost
        with self._lock:
            self.asked += 1
            if self._busy:
                self._waiting = folder
                return
            self._busy = folder
            self._thread = threading.Thread(target=self._work, name="tokmill-push", daemon=True)
            self._thread.start()

    def _claim(self) -> None:
        """Write the run's id where there is none, and compare it; is the run still ours?"""
        if self.owner:
            self.owner.check()
        own, where = run_id(self.out), f"{self.address}/{RUN_ID}"
        try:
            there = remote.read_whole(where)
        except Absent:
            remote.put(where, own.encode(), "")
            there = remote.read_whole(where)
        if there.decode(errors="replace").strip() != own:
            raise _another(self.address, there, self.out)

    def _work(self) -> None:
        while folder := self._busy:
            try:
                self._send(folder)
                self.sent, self._error = self.sent + 1, None
            except Exception as error:  # A thread that ended would end in silence.
                self._error = error
                say(f"{folder.name} was not pushed: {_in_a_line(error)}")
            with self._lock:
                self._busy, self._waiting = self._waiting, None

    def _send(self, folder: Path) -> None:
        self._claim()
        state = f"{FOLDER}/{folder.name}/{STATE}"
        here, there = read_file(self.out / state), state in _names(self.address)
        if not there or remote.read_whole(f"{self.address}/{state}") != here:
            # One that was damaged there, and whose steps were done again, is replaced.
            remote.delete(f"{self.address}/{state}")
            patterns = ("*", "vocab/*", "best/*", f"{FOLDER}/{folder.name}/*")
            paths = [path for pattern in patterns for path in self.out.glob(pattern)]
            names = [path.relative_to(self.out).as_posix() for path in paths]
            first = [n for n in names if n.startswith(f"{FOLDER}/") or FILES.fullmatch(n)]
            for _ in at_once(self._put, (n for n in first if n not in (state, RUN_ID)), AT_ONCE):
                pass
            self._claim()
            self._put(state)
        try:
            self._drop_old(saved.step_of_name(folder))
        except TokmillError as error:
            say(f"old checkpoints are still at the address: {_in_a_line(error)}")

    def _put(self, name: str) -> None:
        path, where = self.out / name, f"{self.address}/{name}"
        now = stamp(path.stat())
        if self._stamps.get(name) == now:
            return
        # A log may grow meanwhile.
        data = read_file(path) if path.suffix == ".jsonl" else path
        remote.put(where, data, "", replace=True)
        if data is path and now[0] > WHOLE and (size := head(where).size) != now[0]:
            # Of what is sent in parts a server may have lost one.
            what = f"{size} bytes are there, and {now[0]} were sent"
            raise MachineError(what, where=where, hint="the same command sends it again")
        self._stamps[name] = now

    def _drop_old(self, newest: int) -> None:
        """Remove old checkpoints, and those that were not sent to their end."""
        names = _names(self.address)
        whole = _steps(names)
        for name in sorted(names, key=lambda name: not name.endswith(f"/{STATE}")):
            step = name.removeprefix(f"{FOLDER}/").partition("/")[0]
            old = NAME.fullmatch(step) and step not in whole[-self.keep :]
            if old and (step in whole or int(step[5:]) < newest):
                remote.delete(f"{self.address}/{name}")
