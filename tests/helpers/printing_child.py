"""What a child may do with a schedule: print megabytes, and never end to print."""

import os
from typing import Any

LINE = b"remark: " + b"x" * 1015 + b"\n"


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Behave by the actions of a schedule."""
    while True:
        for stream in (1, 2):
            os.write(stream, LINE)
        if '"im2col"' not in request["schedule"]:
            break
    for stream in (1, 2):
        for _ in range(3 << 10):
            os.write(stream, LINE)
    return {
        "status": "ok", "reason": "", "times": [5e5], "baseline": [1e6], "compile": 0.1,
        "error": 0.0, "allowed": 1.0,
    }  # fmt: skip
