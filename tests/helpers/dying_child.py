"""What a child may do with a schedule: answer, crash, hang, fill the memory."""

import ctypes
import time
from typing import Any


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Behave by the actions of a schedule."""
    schedule = request["schedule"]
    if '"vectorize"' in schedule:
        ctypes.string_at(0)
    if '"interchange"' in schedule:
        time.sleep(1000)
    if '"pack"' in schedule:
        hoard = [bytearray(1 << 26) for _ in range(1 << 10)]
        return {
            "status": "wrong",
            "reason": str(len(hoard)),
            "error": 0,
            "allowed": 0,
            "compile": 0,
        }
    return {
        "status": "ok", "reason": "", "times": [5e5], "baseline": [1e6], "compile": 0.1,
        "error": 0.0, "allowed": 1.0,
    }  # fmt: skip
