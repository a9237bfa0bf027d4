"""The report in a real browser: it renders, in light and in dark, and asks for nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from report_stores import write_store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def browse(tmp_path: Path, name: str, *flags: str) -> str:
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--hide-scrollbars", f"--user-data-dir={tmp_path / name}", *flags,
        (tmp_path / "page.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def ground(path: Path) -> float:
    """Return the mean lightness of a picture's left edge, 0 to 255."""
    image = pytest.importorskip("PIL.Image")
    with image.open(path) as picture:
        edge = picture.convert("L").crop((0, 0, 4, picture.height))
        return sum(edge.tobytes()) / (4 * picture.height)


def test_page_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tokmill.report.page import page

    store = write_store(tmp_path / "a store", [[[2, 3, 0]] * 9, [[9] * 70 + [0], [0]]], kept=True)
    page([store.path], tmp_path / "page.html")
    dom = browse(tmp_path, "dom", "--dump-dom")
    assert dom.count("<svg") == 2
    assert store.fingerprint in dom
    for name, flags in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
        picture = f"--screenshot={tmp_path / name}.png"
        browse(tmp_path, name, picture, "--window-size=900,1400", *flags)
    assert ground(tmp_path / "light.png") > 230
    assert ground(tmp_path / "dark.png") < 60
