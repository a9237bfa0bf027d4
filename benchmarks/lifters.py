"""The contestants of `lifting.py`: how each runs on a program; what it found is kept as JSON."""

import hashlib
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tokmill.base.errors import TokmillError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "plugin-angr"))
import tokmill_angr as angr  # noqa: E402

PEERS = Path(__file__).parent / "peers"
LIMIT = 1200
"""Seconds that angr and SMDA may take for one program."""
ROUNDS = 3
NAMES = {"tokmill": "tokmill", "angr": "angr", "smda": "SMDA", "objdump": "objdump"}


class Found(msgspec.Struct):
    """What one contestant made of one program."""

    seconds: float = 0.0
    """CPU time, imports left out; of objdump that of the whole process."""
    whole: float = 0.0
    """The whole process."""
    peak: int = 0
    """Its largest resident bytes, until the last function was found."""
    starts: list[int] = []
    failed: str = ""


@dataclass
class Bench:
    """Where things are, and whether earlier answers count."""

    folder: Path
    peers_python: str
    reuse: bool
    found: dict[tuple[str, Path], Found] = field(default_factory=dict)
    """Answers of this run, which count in any case."""

    def run(self, who: str, path: Path) -> Found:
        """Return what a contestant found, kept by the program's digest."""
        make = {
            "tokmill": self._tokmill,
            "angr": self._angr,
            "smda": self._smda,
            "objdump": self._objdump,
        }[who]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        kept = self.folder / who / f"{path.name}-{digest}.json"
        if self.reuse and kept.exists():
            return msgspec.json.decode(kept.read_bytes(), type=Found)
        if (who, path) not in self.found:
            self.found[who, path] = make(path)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(msgspec.json.encode(self.found[who, path]))
        return self.found[who, path]

    def _angr(self, path: Path) -> Found:
        started = time.perf_counter()
        try:
            answer = angr.analyse(path, seconds=LIMIT)
        except TokmillError as error:
            return Found(failed=error.what)
        starts = [address for address, _ in answer.functions]
        return Found(answer.seconds, time.perf_counter() - started, answer.peak, starts)

    def _tokmill(self, path: Path) -> Found:
        script = str(PEERS / "native_lift.py")
        runs = [timed(sys.executable, script, str(path)) for _ in range(ROUNDS)]
        return sorted(runs, key=lambda run: run.seconds)[ROUNDS // 2]

    def _smda(self, path: Path) -> Found:
        return timed(self.peers_python, str(PEERS / "smda_peer.py"), str(path), str(LIMIT))

    def _objdump(self, path: Path) -> Found:
        return timed(sys.executable, str(PEERS / "objdump_peer.py"), str(path))


def timed(*command: str) -> Found:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    whole = time.perf_counter() - started
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return Found(failed=said[-1] if said else f"exit code {done.returncode}")
    found = msgspec.json.decode(done.stdout, type=Found)
    found.whole = whole
    return found
