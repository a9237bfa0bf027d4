"""A child that measures nothing: it tells who it is."""

import os
from typing import Any


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Refuse a schedule with actions; the reason is the number of this process."""
    if '"action"' in request["schedule"]:
        return {"status": "refused", "reason": str(os.getpid())}
    return {
        "status": "ok", "reason": "", "times": [1e6], "baseline": [1e6], "compile": 0.1,
        "error": 0.0, "allowed": 1.0,
    }  # fmt: skip
