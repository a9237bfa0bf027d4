"""The commands of docs/simpoint.md from programs to shared points, at a small size."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from profiled import text_file

SMALL = {
    "--measured": "--measured --runs 2 --intervals 12",
    "--steps 300": "--steps 2 --set dim=32 --set layers=1 --set heads=2 --set length=64",
    "--data mined": "--data mined --steps 3 --set dim=32 --set layers=1 --set eval_every=0",
    "--points 30": "--points 10",
}


@pytest.mark.long
def test_the_commands_from_programs_to_shared_points_work(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "simpoint.md").read_text("utf-8")
    section = page.partition("## Points that programs share")[2].partition("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    script = "".join(blocks)
    for large, small in SMALL.items():
        assert large in script
        script = script.replace(large, small)
    for number, name in enumerate(("one", "two")):
        text_file(tmp_path / f"{name}.txt", 150_000 * (1 + number), number)
    (tmp_path / "recipes").symlink_to(repository / "recipes")
    command = f'set -e\ntokmill() {{ {sys.executable} -m tokmill "$@"; }}\n{script}'
    done = subprocess.run(
        ["bash", "-c", f"{command.rstrip()} --json > found.json"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["program"] for row in found["programs"]] == ["bzip2", "gzip", "xz"]
    assert found["cpi_kind"] == "measured" and 5 < len(found["points"]) <= 10
    assert sorted(path.name for path in (tmp_path / "shared").glob("*.weights")) == [
        "bzip2.weights", "gzip.weights", "xz.weights"
    ]  # fmt: skip
