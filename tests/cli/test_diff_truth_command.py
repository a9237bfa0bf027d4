"""`tokmill diff --truth`: scores, what does not count, and files that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from diff_sources import NEW, OLD
from tokmill.x86.commands.diff_truth import judged
from tokmill.x86.diff.truth.ground_truth import LeftOut, Score
from x86_programs import compiler, run

Here = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a program, each with its source, before and after `strip`."""
    root = tmp_path_factory.mktemp("built")
    for name, source in (("old", OLD), ("new", NEW)):
        folder = root / name
        (folder / "src").mkdir(parents=True)
        (folder / "src" / "a.c").write_text(source)
        run(compiler("gcc"), "-g", "-O1", "-o", str(folder / "tool"), str(folder / "src" / "a.c"))
        run(compiler("objcopy"), "--strip-all", str(folder / "tool"), str(folder / "stripped"))
    return root


def command(built: Path, *more: object) -> list[object]:
    return ["diff", built / "old/stripped", built / "new/stripped", *more]


def test_scores_of_two_versions(here: Here, built: Path) -> None:
    truth = ["--truth", built / "old/tool", built / "new/tool"]
    source = ["--source", built / "old/src", built / "new/src"]
    out, _ = here(*command(built, *truth, *source), code=1)
    assert "functions: recall 1.000, precision 1.000, F1 1.000 (3 right, 0 wrong, 0 lost)" in out
    assert "without debug information" in out and "names of functions" not in out
    found = json.loads(here(*command(built, *truth, *source, "--json"), code=1)[0])["truth"]
    assert (found["functions"]["right"], found["functions"]["f1"]) == (3, 1)
    assert found["blocks"]["right"] >= 2 and found["blocks"]["wrong"] == 0
    assert found["functions"]["left_out"]["a"]["not known to the other"] == 1
    out, _ = here("diff", *truth[1:], *truth, code=1)
    assert "names of functions were looked at; --no-names leaves them out" in out


def test_nothing_to_judge_is_no_perfect_score() -> None:
    nothing = judged(Score(0, 0, 0), LeftOut())
    assert (nothing.recall, nothing.precision, nothing.f1) == (None, None, None)
    lost = judged(Score(0, 0, 3), LeftOut())
    assert (lost.recall, lost.precision, lost.f1) == (0.0, None, 0.0)


def test_what_does_not_fit(here: Here, built: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.c"
    other.write_text("int different(int x) { return x; }\nint start(void) { return 1; }\n")
    run(
        compiler("gcc"), "-g", "-O1", "-shared", "-nostdlib", "-o", str(tmp_path / "other"),
        str(other),
    )  # fmt: skip
    old, new = built / "old/tool", built / "new/tool"
    for more, words in (
        (["--truth", old, built / "new/stripped"], "it has no debug information"),
        (["--truth", old, tmp_path / "other"], "no function in common"),
        (["--truth", old, tmp_path / "none"], "there is no such file"),
        (["--source", built, built], "--source is of --truth"),
        (["--truth", old, new, "--source", tmp_path / "none", built], "no folder"),
        (["--truth", old, new, "--source", tmp_path, tmp_path], "none of the program's source"),
    ):
        _, said = here(*command(built, *more), code=2)
        assert words in said and "\nhint: " in said
    _, said = here("diff", built / "old", built / "new", "--truth", old, new, code=2)
    assert "--truth is for two programs" in said


def test_debug_information_of_another_build(here: Here, built: Path, tmp_path: Path) -> None:
    """Names fit, addresses do not."""
    source = tmp_path / "a.c"
    shutil.copy(built / "old/src/a.c", source)
    moved = tmp_path / "moved"
    run(compiler("gcc"), "-g", "-O1", "-Wl,-Ttext=0x40000", "-o", str(moved), str(source))
    _, said = here(*command(built, "--truth", moved, built / "new/tool"), code=2)
    assert "no function of the program begins where this debug information says" in said
