"""A page in a real browser, without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
DARK = "--blink-settings=preferredColorScheme=0"


def browse(page: Path, profile: Path, *flags: str, fragment: str = "") -> str:
    """Open a page with a profile folder of its own; return what it prints."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}", *flags,
        page.as_uri() + fragment,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def ground(path: Path) -> float:
    """Return the mean lightness of a picture's left edge, 0 to 255."""
    image = pytest.importorskip("PIL.Image")
    with image.open(path) as picture:
        edge = picture.convert("L").crop((0, 0, 4, picture.height))
        return sum(edge.tobytes()) / (4 * picture.height)
