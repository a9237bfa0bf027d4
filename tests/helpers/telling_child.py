"""A child that measures nothing: it tells who it is."""

from __future__ import annotations

import os
from typing import Any


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Refuse a schedule; the reason is the number of this process."""
    return {"status": "refused", "reason": str(os.getpid())}
