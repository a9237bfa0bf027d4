"""The report in a real browser: it renders, in light and in dark, and asks for nothing."""

from pathlib import Path

import pytest

from browser import DARK, browse, ground, needs_chromium, violations
from report_stores import write_run

pytestmark = needs_chromium


def test_page_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tokmill.report.pages.page import page

    run = write_run(tmp_path / "a run", [{"step": i, "loss": 3 - i / 10} for i in range(1, 9)])
    made = page([run], tmp_path / "page.html")
    dom = browse(made, tmp_path / "dom", "--dump-dom")
    assert dom.count("<svg") == 1
    # Contrast in both themes, and tables that are scrolled by keys in a narrow window.
    assert violations(made, tmp_path / "axe-light") == []
    assert violations(made, tmp_path / "axe-dark", DARK, "--window-size=400,900") == []
    for name, flags in (("light", []), ("dark", [DARK])):
        picture = f"--screenshot={tmp_path / name}.png"
        browse(made, tmp_path / name, picture, "--window-size=900,1400", *flags)
    assert ground(tmp_path / "light.png") > 230
    assert ground(tmp_path / "dark.png") < 60
