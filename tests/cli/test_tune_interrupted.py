"""`tokmill rl tune` after a kill: what was measured is not measured again, and the rest is."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LINE, EVALUATIONS, KILLED_AFTER = "matmul 64 64 64", 18, 8
CONFIRMED = 3
"""Results that are measured again at the end: the two best, and the module without a schedule."""


def begun(spec: Path) -> subprocess.Popen[str]:
    words = ["rl", "tune", LINE, "-o", str(spec), "--evaluations", str(EVALUATIONS)]
    return subprocess.Popen(
        [sys.executable, "-m", "tokmill", *words, "--runs", "3", "--quiet", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def state_of(spec: Path) -> Any:
    """Return how far the search of tiles came; None before its first evaluations."""
    found = list(spec.parent.glob(f"{spec.name}.state.*"))
    return json.loads(found[0].read_text()) if found else None


def results_of(spec: Path) -> dict[bytes, bytes]:
    with sqlite3.connect(f"{spec}.measurements") as data:
        return dict(data.execute("SELECT key, result FROM results").fetchall())


def test_a_killed_tuning_goes_on_where_it_was(tmp_path: Path) -> None:
    spec = tmp_path / "some.spec"
    first = begun(spec)
    while (before := state_of(spec)) is None or sum(before["evaluations"]) < KILLED_AFTER:
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before, kept = state_of(spec), results_of(spec)
    made = sum(before["evaluations"])
    assert KILLED_AFTER <= made < EVALUATIONS and not spec.exists()
    assert 1 < len(kept) <= EVALUATIONS

    second = begun(spec)
    out, err = second.communicate(timeout=100)
    assert second.returncode == 0, err
    after, results = state_of(spec), results_of(spec)
    # A time that is measured again is another number.
    again = [key for key in kept if results.get(key) != kept[key]]
    assert len(again) <= CONFIRMED, (len(again), len(kept))
    assert len(results) > len(kept)
    assert sum(after["evaluations"]) == EVALUATIONS
    assert after["seconds"] > before["seconds"]
    told = json.loads(out)
    (part,) = told["operations"]
    assert part["evaluations"] == EVALUATIONS
    assert part["status"].split(":")[0] in ("tuned", "default")
    assert spec.exists() == bool(told["spec"]) and told["whole"]["milliseconds"] > 0
