"""Make the pictures of the tutorials from the files that their commands write.

    python scripts/tutorial_pictures.py FOLDER [NAME …]

types the commands of docs/tutorials/NAME.md in FOLDER/NAME and puts a picture of fewer than 60 kB
into docs/images. Needs chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]


LARGEST = 60_000
"""Bytes of a picture."""


class Picture(NamedTuple):
    """Which file of a tutorial is shown, the size of the window, and what is cut out of it."""

    file: str
    window: tuple[int, int] = (0, 0)
    cut: tuple[int, int, int, int] | None = None


PICTURES = {
    "compare-two-programs": Picture("page.html#0", (1000, 1060), (0, 145, 1000, 1020)),
    "find-a-function": Picture("page.html#2-graph", (1400, 1000), (384, 190, 1400, 900)),
    "points-of-an-execution": Picture("phases.png"),
    "language-model": Picture("loss.svg"),
    "bert-and-classifier": Picture("loss.svg"),
    "tune-a-model": Picture("tune.svg"),
}


def run_commands(page: Path, folder: Path) -> None:
    """Run the commands of a page's console blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (link := folder.parent / "tokmill").exists():
        link.symlink_to(ROOT)
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                subprocess.run(["sh", "-c", line[2:]], cwd=folder, check=True)
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def main() -> None:
    base = Path(sys.argv[1]).resolve()
    for name in sys.argv[2:] or PICTURES:
        picture = PICTURES[name]
        run_commands(ROOT / f"docs/tutorials/{name}.md", base / name)
        shot = base / name / picture.file
        wide, high = picture.window
        if wide:
            shot = base / f"{name}.png"
            subprocess.run(
                [
                    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                    "--hide-scrollbars", f"--user-data-dir={base / 'profile'}",
                    "--blink-settings=preferredColorScheme=1", "--virtual-time-budget=3000",
                    f"--window-size={wide},{high}", f"--screenshot={shot}",
                    f"file://{base / name / picture.file}",
                ],
                check=True, capture_output=True,
            )  # fmt: skip
        if shot.suffix == ".svg":
            shutil.copy(shot, ROOT / f"docs/images/tutorial-{name}.svg")
            continue
        target = ROOT / f"docs/images/tutorial-{name}.png"
        image = Image.open(shot).convert("RGB").crop(picture.cut)
        for colours in (128, 64, 32):
            image.quantize(colours).save(target, optimize=True)
            if target.stat().st_size < LARGEST:
                break
        print(target, target.stat().st_size)


if __name__ == "__main__":
    main()
