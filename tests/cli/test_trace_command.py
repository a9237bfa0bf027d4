"""`tokmill trace` on a real run, as a user meets it; its answers are those of test_trace.py."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tokmill
from toy import recipe, text_store

Here = Callable[..., tuple[str, str]]
TEXTS = [f"document {number} says {number * 7}" for number in range(40)]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of whole records, four a step; then losses with a jump in the third of 12."""
    root = tmp_path_factory.mktemp("trace")
    store = text_store(root / "store", TEXTS)
    value = recipe(
        store, 12, data={"batch": 4}, task={"length": 40, "rows": "whole"},
        run={"checkpoint_every": 6},
    )  # fmt: skip
    run = tokmill.train(value, root / "run", quiet=True).path
    lines = [{"step": step, "loss": 9.0 if step == 11 else 3 - step / 10} for step in range(1, 13)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_step(run: Path, here: Here) -> None:
    out, _ = here("trace", run, "--step", 3, "--json")
    facts = json.loads(out)
    assert (facts["step"], facts["steps"], facts["rows"], facts["processes"]) == (3, 12, 4, 1)
    assert facts["done"] and facts["documents_in_all"] == 4
    for one in facts["documents"]:
        length = len(TEXTS[one["record"]]) + 1
        assert (one["start"], one["stop"], one["length"]) == (0, length, length)
        assert one["preview"] == TEXTS[one["record"]] + END
        assert one["columns"] == {"bytes": 2 * length}
    text, err = here("trace", run, "--step", 3, "--head", 2)
    assert text.startswith("step 3 of 12, done: 4 rows, 1 process\n")
    assert facts["documents"][1]["preview"] in text and "2 of 4 shown; --head 4" in err


def test_the_steps_of_records(run: Path, here: Here) -> None:
    of = {
        step: {one["record"] for one in
               json.loads(here("trace", run, "--step", step, "--json")[0])["documents"]}
        for step in range(1, 13)
    }  # fmt: skip
    facts = json.loads(here("trace", run, "--record", 17, "--json")[0])
    assert [one["step"] for one in facts["read"]] == [s for s in of if 17 in of[s]]
    facts = json.loads(here("trace", run, "--where", "bytes < 40", "--json")[0])
    short = {i for i, text in enumerate(TEXTS) if 2 * (len(text) + 1) < 40}
    assert facts["records"] == len(short) > 0
    assert {(one["step"], one["record"]) for one in facts["read"]} == {
        (step, i) for step in of for i in of[step] & short
    }
    out, err = here("trace", run, "--record", 17)
    assert "done" in out and "of 12 steps" in err


def test_jumps_and_the_page(run: Path, tmp_path: Path, here: Here) -> None:
    (jump,) = json.loads(here("trace", run, "--spike", "--json")[0])["jumps"]
    assert (jump["step"], jump["metric"], jump["value"]) == (11, "loss", 9.0)
    assert [one["preview"] for one in jump["documents"]] == [
        TEXTS[one["record"]] + END for one in jump["documents"]
    ]
    assert jump["documents"][0]["preview"] in here("trace", run, "--spike")[0]
    here("report", run, "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Steps with jumps" in page and jump["documents"][0]["preview"].removesuffix(END) in page


def test_refusals(run: Path, tmp_path: Path, here: Here) -> None:
    for options, said in {
        ("--step", "13"): "there is no step 13",
        ("--step", "0"): "there is no step 0",
        (): "one of --step N",
        ("--step", "1", "--spike"): "one of --step N",
        ("--step", "1", "--store", "x"): "--store goes with",
        ("--record", "40"): "there is no record 40",
        ("--where", "colour = red"): "no column 'colour'",
        ("--record", "4", "--store", "x"): "reads no store x",
    }.items():
        assert said in here("trace", run, *options, code=2)[1]
    shutil.copytree(run, tmp_path / "old")
    (tmp_path / "old/sessions.jsonl").unlink()
    assert "those of one process" in here("trace", "old", "--step", 1)[1]
    (run.parent / "store").rename(run.parent / "away")
    assert "there is no such store" in here("trace", run, "--step", 1, code=1)[1]
    (run.parent / "away").rename(run.parent / "store")
