"""The commands of docs/similarity.md run as they are printed, one after the other."""

import csv
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from leveled_programs import LAYOUT, SECOND, leveled
from tokmill.cli import main
from tokmill.store.store import Store
from x86_programs import C_SOURCE, compiles

KEYS = ("project", "function", "compiler", "level", "program")
SMALL = (
    "model.dim=16", "model.buckets=64", "run.steps=2", "run.eval_every=2", "run.checkpoint_every=2",
    "task.length=64", "data.batch=4",
)  # fmt: skip


def commands(page: Path) -> tuple[list[str], list[str]]:
    """Return the commands of tokmill before the section Evaluation, and those of it."""
    found: tuple[list[str], list[str]] = ([], [])
    for place, text in enumerate(page.read_text("utf-8").split("\n## Evaluation\n")):
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found[place].extend(line for line in lines if line.startswith("tokmill "))
    return found


def does(command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command, comments=True)[1:])
    assert ended.value.code == 0, command


@pytest.mark.long
def test_the_commands_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    queries, evaluation = commands(repository / "docs/similarity.md")
    assert len(queries) >= 6 and len(evaluation) >= 6
    judged = tmp_path / "judged"
    judged.mkdir()
    monkeypatch.chdir(judged)
    leveled(judged / "programs", ("O0", "O3"))
    first, build, *rest = evaluation
    for command in (first, build):
        does(command)
    assert shlex.split(build)[-3] == LAYOUT
    sets = " ".join(f"--set {one}" for one in SMALL)
    recipe = repository / "recipes/x86/similarity-bag.toml"
    does(f"tokmill train {recipe} --data functions --val functions -o RUN -q {sets}")
    store = Store("functions")
    np.save("vectors.npy", np.random.default_rng(0).normal(size=(len(store), 4)))
    with open("keys.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(KEYS)
        # A name stands once for a program; some functions have none.
        lines.writerows(
            [*(one[key] for key in KEYS[:-1]), f"{one['program']} {one['address']}"]
            for one in store
        )
    with open("keys.csv", newline="") as file:
        rows = list(csv.reader(file))
    named = [[*row[:-1], row[-1].split()[0] if "sub_" not in row[1] else row[-1]] for row in rows]
    with open("keys.csv", "w", newline="") as file:
        csv.writer(file).writerows(named)
    for command in rest:
        does(command)
    assert "O0-O3" in capsys.readouterr().out
    # The same programs as of a machine: no layout, one level.
    asked = tmp_path / "asked"
    place = asked / "programs/bin"
    place.mkdir(parents=True)
    monkeypatch.chdir(asked)
    compiles(place, "minigzip", C_SOURCE.replace("dispatch", "inflate"), "-O2")
    compiles(place, "tool", SECOND, "-O2")
    shutil.copytree(judged / "RUN", asked / "RUN")
    for command in queries:
        does(command)
    assert "inflate at 0x" in capsys.readouterr().out
