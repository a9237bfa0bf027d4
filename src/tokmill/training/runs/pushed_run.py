"""A run at an address: checkpoints are sent while it trains, and a new folder begins with them.

Below the address lie files of the run's folder under the same names. A checkpoint's `state.json` is
written last and removed first, so whoever reads finds all of a checkpoint or none.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokmill.base import remote
from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import (
    TEMPORARY,
    address_of,
    inside,
    make_folder,
    read_file,
    stamp,
    write_file,
)
from tokmill.base.headers import loads_json, refused
from tokmill.base.remote import AT_ONCE, WHOLE, Absent, at_once, head, listed
from tokmill.training.launch import told_when_waiting
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.read_recipe import RECIPE
from tokmill.training.runs import checkpoint as saved
from tokmill.training.runs import run as runs
from tokmill.training.runs.checkpoint import FOLDER, NAME, RUN_ID, STATE, checkpoints, run_id, say

FILES = re.compile(
    r"run-id|schema\.json|input_format\.json|vocab/[^/.][^/]*|sessions\.jsonl|metrics\.jsonl|"
    r"wandb-id|recipe\.json|(?P<best>best/(model\.safetensors|config\.json))"
)
"""Names of the files of a run that lie at its address besides checkpoints."""


ANOTHER = "--push another address for this run, or remove what is there"


def _another(address: str, theirs: bytes, out: Path, why: str = "") -> TokmillError:
    mine = f" ({run_id(out)[:12]})" if run_id(out) else ""
    name = theirs.decode(errors="replace").strip()[:12]
    what = f"another run ({name}) than that of {out}{mine} is at the address{why}"
    return TokmillError(what, where=address, hint=ANOTHER)


def _names(address: str) -> set[str]:
    return {one.address.removeprefix(f"{address}/") for one in listed(address)}


def _steps(names: Iterable[str]) -> list[str]:
    """Return the names of checkpoints that are whole at an address, oldest first."""
    parts = [name.split("/") for name in names if name.endswith(f"/{STATE}")]
    found = [part[1] for part in parts if part[0] == FOLDER and len(part) == 3]
    return sorted((name for name in found if NAME.fullmatch(name)), key=lambda one: int(one[5:]))


@contextlib.contextmanager
def open_run(out: Path, config: TrainConfig) -> Iterator[None]:
    """Do as `run.open_run`; then bring the folder to the newest checkpoint at `run.push`."""
    with runs.open_run(out, config):
        if config.run.push:
            _take(address_of(config.run.push), out, config)
        yield


def _take(address: str, out: Path, config: TrainConfig) -> None:
    """Fetch the newest whole checkpoint at an address if the folder has none as new.

    Raises `TokmillError` if something else, or another run, lies there.
    """
    names = _names(address)
    if not names:
        return
    if RUN_ID not in names:
        what = "something else than a run lies at the address"
        raise TokmillError(what, where=address, hint=ANOTHER)
    data = {name: b"" for name in names if (m := FILES.fullmatch(name)) and not m["best"]}
    data[RUN_ID] = remote.read_whole(f"{address}/{RUN_ID}")
    theirs, steps = data[RUN_ID].decode(errors="replace").strip(), _steps(names)
    begun = (out / RECIPE).exists()
    if begun and theirs != run_id(out):
        raise _another(address, data[RUN_ID], out)
    mine = saved.step_of_name(checkpoints(out)[-1]) if checkpoints(out) else -1
    newer = [name for name in steps if int(name[5:]) > mine]
    if begun and not newer:
        return
    fetched = at_once(lambda name: remote.read_whole(f"{address}/{name}"), data)
    data = dict(zip(data, fetched, strict=True))
    if not begun and RECIPE in data:
        where = f"{address}/{RECIPE}"
        with refused("the recipe cannot be read", where, hint=ANOTHER):
            recipe = loads_json(data[RECIPE], dict[str, Any])
        try:
            runs.check_resume(recipe, config, int(newer[-1][5:]) if newer else 0, address)
        except TokmillError as error:
            raise _another(address, data[RUN_ID], out, f": {error.what}") from None
    data = data if newer or RECIPE in data else {RUN_ID: data[RUN_ID]}
    for name in sorted(data, key=lambda name: name == RECIPE):
        if name != RECIPE or not begun:
            path = inside(out, name, deep=True)
            make_folder(path.parent)
            write_file(path, data[name])
    for name in sorted(names, reverse=True):
        if (match := FILES.fullmatch(name)) and match["best"]:
            make_folder((out / name).parent)
            write_file(out / name, remote.stream(f"{address}/{name}"))
    if newer:
        _take_checkpoint(address, newer, out)


def _take_checkpoint(address: str, names: list[str], out: Path) -> None:
    """Fetch the newest of some checkpoints that is whole by its digests."""
    for name in reversed(names):
        where, private = f"{address}/{FOLDER}/{name}", out / FOLDER / f"{TEMPORARY}{name}"

        def fetch(file: str, where: str = where, private: Path = private) -> None:
            write_file(inside(private, file), remote.stream(f"{where}/{file}"), sync=False)

        try:
            make_folder(private)
            fetch(STATE)
            for _ in at_once(fetch, saved.read_state(private).files, AT_ONCE):
                pass
            saved.check_checkpoint(private)
            saved.replace(private, out / FOLDER / name)
            return
        except TokmillError as error:
            shutil.rmtree(private, ignore_errors=True)
            if isinstance(error, MachineError):
                raise
            say(f"{where} is not used: {error.what}")
            last = error
    hint = "--push another address, and `--from RUN/best` or no --from begins another run"
    raise TokmillError(f"no checkpoint there can be used: {last.what}", where=address, hint=hint)


class Pusher:
    """Sends checkpoints to an address in a thread; at most the newest one waits.

    As a context it waits for the last one at its end, unless a second signal came.
    """

    def __init__(self, out: Path, config: TrainConfig, rank: int) -> None:
        self.out, self.keep = out, config.run.keep
        self.address = address_of(config.run.push) if rank == 0 else ""
        self._wake = threading.Condition()
        self._waiting: Path | None = None
        self._busy: Path | None = None
        self._ending = False
        self._stamps: dict[str, tuple[int, ...]] = {}
        self.asked = self.sent = 0
        self.error: Exception | None = None

    def __enter__(self) -> Pusher:
        if self.address:
            self._claim()
            self._thread = threading.Thread(target=self._work, name="tokmill-push", daemon=True)
            self._thread.start()
            for newest in checkpoints(self.out)[-1:]:
                self.push(newest)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if not self.address or not (error is None or isinstance(error, TokmillError)):
            return
        with self._wake:
            self._ending = True
            self._wake.notify()
        with told_when_waiting(f"the push of the newest checkpoint to {self.address}"):
            self._thread.join()
        saved.drop_old(self.out, self.keep)
        if self.sent < self.asked:
            count = f"{self.asked - self.sent} of {self.asked} checkpoints were not pushed"
            say(f"{count}{'' if self.error else '; the newest one was'}: {self.address}")
        if self.error and error is None:
            what = getattr(self.error, "what", str(self.error))
            raise MachineError(
                f"the newest checkpoint is in {self.out}, and not at the address: {what}",
                where=self.address,
                hint="the same command sends it again; --push '' does without",
            )

    def held(self) -> list[Path]:
        """Return the checkpoints that are being sent, or wait for it."""
        with self._wake:
            return [path for path in (self._busy, self._waiting) if path]

    def push(self, folder: Path) -> None:
        """Send a checkpoint when the one before is sent; one that waits is given up."""
        if self.address:
            with self._wake:
                self._waiting, self.asked = folder, self.asked + 1
                self._wake.notify()

    def _claim(self) -> None:
        """Write the run's id where there is none, and compare it."""
        mine, where = run_id(self.out), f"{self.address}/{RUN_ID}"
        try:
            there = remote.read_whole(where)
        except Absent:
            remote.put(where, mine.encode(), "")
            there = remote.read_whole(where)
        if there.decode(errors="replace").strip() != mine:
            raise _another(self.address, there, self.out)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._ending)
                self._busy, self._waiting = self._waiting, None
            if self._busy is None:
                return
            try:
                self._send(self._busy)
                self.sent, self.error = self.sent + 1, None
            except Exception as error:
                # A thread that ended would end in silence.
                self.error = error
                what = f"{error.where}: {error.what}" if isinstance(error, TokmillError) else error
                say(f"{self._busy.name} was not pushed: {what}")
            with self._wake:
                self._busy = None

    def _send(self, folder: Path) -> None:
        self._claim()
        names = _names(self.address)
        state = f"{FOLDER}/{folder.name}/{STATE}"
        if state not in names:
            files = [path.relative_to(self.out).as_posix() for path in folder.iterdir()]
            files += [
                name
                for name in self._of_run()
                if self._stamps.get(name) != stamp((self.out / name).stat())
            ]
            for _ in at_once(self._put, (name for name in files if name != state), AT_ONCE):
                pass
            self._put(state)
        whole = _steps({*names, state})
        parts = {name.split("/")[1] for name in names if name.startswith(f"{FOLDER}/")}
        for name in filter(NAME.fullmatch, parts):
            unfinished = name not in whole and int(name[5:]) >= saved.step_of_name(folder)
            if name in whole[-self.keep :] or unfinished:
                continue
            mine = [one for one in names if one.startswith(f"{FOLDER}/{name}/")]
            for one in sorted(mine, key=lambda one: not one.endswith(f"/{STATE}")):
                remote.delete(f"{self.address}/{one}")

    def _of_run(self) -> list[str]:
        paths = [path for place in ("", "vocab", "best") for path in (self.out / place).glob("*")]
        names = [path.relative_to(self.out).as_posix() for path in paths if path.is_file()]
        return [name for name in names if FILES.fullmatch(name) and name != RUN_ID]

    def _put(self, name: str) -> None:
        path, where = self.out / name, f"{self.address}/{name}"
        now = stamp(path.stat())
        # A log may grow meanwhile.
        data = read_file(path) if path.suffix == ".jsonl" else path
        remote.put(where, data, "", replace=True)
        size = len(data) if isinstance(data, bytes) else now[0]
        if size > WHOLE and (there := head(where).size) != size:
            # Of what is sent in parts a server may have lost one.
            what = f"{there} bytes are there, and {size} were sent"
            raise MachineError(what, where=where, hint="the same command sends it again")
        self._stamps[name] = now
