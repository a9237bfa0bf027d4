"""A page in a real browser, without a window."""

import html
import json
import re
import shutil
import subprocess
from importlib.util import find_spec
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


AXE_RUN = """<script>axe.run(document).then((told) => {
  document.body.dataset.axe = JSON.stringify(told.violations.map(
    (rule) => [rule.id, ...rule.nodes.map((node) => node.target.join(" "))]));
});</script>"""


def violations(page: Path, profile: Path, *flags: str, fragment: str = "") -> list[list[str]]:
    """Return the rules of axe-core (contrast, labels, keyboard) that a page breaks, and where."""
    package = find_spec("axe_playwright_python")
    assert package and package.origin
    axe = (Path(package.origin).parent / "axe.min.js").read_text("utf-8")
    copy = profile.with_suffix(".html")
    text = page.read_text("utf-8").replace("</body>", f"<script>{axe}</script>{AXE_RUN}</body>")
    copy.write_text(text, "utf-8")
    dom = browse(
        copy, profile, "--dump-dom", "--virtual-time-budget=20000", *flags, fragment=fragment
    )
    answer = re.search(r'data-axe="([^"]*)"', dom)
    assert answer, "axe did not end"
    rules: list[list[str]] = json.loads(html.unescape(answer[1]))
    return rules


def ground(path: Path) -> float:
    """Return the mean lightness of a picture's left edge, 0 to 255."""
    image = pytest.importorskip("PIL.Image")
    with image.open(path) as picture:
        edge = picture.convert("L").crop((0, 0, 4, picture.height))
        return sum(edge.tobytes()) / (4 * picture.height)
