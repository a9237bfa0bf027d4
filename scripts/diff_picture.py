"""Make the pictures of README.md: minigzip of zlib before and after the fix of CVE-2022-37434.

    python scripts/diff_picture.py CACHE     writes docs/images/diff-light.png and diff-dark.png

Needs gcc, chromium and apt (for the source of zlib 1.2.13, from which the fix is taken out again).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from programs import fetch  # noqa: E402

FIXED = """state->head->extra != Z_NULL &&
                        (len = state->head->extra_len - state->length) <
                            state->head->extra_max) {
"""
BEFORE = """state->head->extra != Z_NULL) {
                        len = state->head->extra_len - state->length;
"""
SCHEMES = {
    "light": "--blink-settings=preferredColorScheme=1",
    "dark": "--blink-settings=preferredColorScheme=0",
}


def compiled(source: Path, out: Path) -> Path:
    files = [*sorted(source.glob("*.c")), source / "test/minigzip.c"]
    words = ["gcc", "-O2", "-s", "-DHAVE_UNISTD_H", "-I", source, "-o", out, *files]
    subprocess.run(words, check=True)
    return out


def main() -> None:
    cache = Path(sys.argv[1]).resolve()
    cache.mkdir(parents=True, exist_ok=True)
    after = fetch("zlib", cache)
    before = cache / "zlib-before"
    shutil.copytree(after, before, dirs_exist_ok=True)
    text = (after / "inflate.c").read_text()
    assert text.count(FIXED) == 1
    (before / "inflate.c").write_text(text.replace(FIXED, BEFORE))
    (cache / "before").mkdir(exist_ok=True)
    (cache / "after").mkdir(exist_ok=True)
    old = compiled(before, cache / "before/minigzip")
    new = compiled(after, cache / "after/minigzip")
    page = cache / "page.html"
    words = ["diff", old, new, "--html", page]
    subprocess.run([sys.executable, "-m", "tokmill", *words], check=False)
    for scheme, setting in SCHEMES.items():
        picture = ROOT / f"docs/images/diff-{scheme}.png"
        subprocess.run(
            [
                "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--hide-scrollbars", f"--user-data-dir={cache / 'profile'}", setting,
                "--window-size=1180,620", f"--screenshot={picture}", page.as_uri(),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        print(picture)


if __name__ == "__main__":
    main()
