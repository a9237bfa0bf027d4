"""`tokmill compare` and `inspect` of several runs, as a user meets them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from small_runs import cut, make_runs, train

Here = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_runs(tmp_path_factory.mktemp("runs"))
    cut(root / "runs/lr-0.01/seed-0", root / "part", 9)
    train(root / "other", root / "other-run")
    return root


def test_a_table(root: Path, here: Here) -> None:
    out, err = here("compare", root / "runs", root / "part")
    header, rule, *rows = out.splitlines()
    assert header.split() == [
        "run", "lr", "seeds", "val_loss", "±", "95", "%", "step", "steps", "targets", "parameters",
        "tokens/s", "seconds",
    ]  # fmt: skip
    assert set(rule) == {"-", " "}
    assert [row.split()[:3] for row in rows] == [
        ["lr-0.01/seed-…", "0.01", "3"],
        [f"{root.name}/part", "0.01", "1"],
        ["lr-0.003/seed-…", "0.003", "3"],
    ]
    assert [row.split()[3].endswith("*") for row in rows] == [True, False, False]
    assert ["9 of 12" in row for row in rows] == [False, True, False]
    assert err == ""


def test_notes_go_to_stderr(root: Path, here: Here) -> None:
    for more in ([], ["--json"]):
        out, err = here("compare", root / "runs", root / "other-run", *more)
        assert err.startswith("note: the runs have different vocabularies")
        assert ("different vocabularies" in out) == bool(more)
    assert json.loads(out)["groups"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing argument"),
        (["lm"], 1, "the folder holds no run"),
        (["nowhere"], 1, "no such folder"),
        (["runs", "--metric", "val_los"], 2, "did you mean 'val_loss'"),
        (["runs", "--at", "end"], 2, "--at 'end' is not a step"),
        (["runs", "--format", "tex"], 2, "no format is called 'tex'"),
    ],
)
def test_refusals_have_hints(
    root: Path, here: Here, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(root)
    out, err = here("compare", *arguments, code=code)
    assert message in err
    assert "hint:" in err
    assert out == ""
