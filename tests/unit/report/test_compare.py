"""Runs side by side, real ones: what is one line, what a mean, and what may not be compared."""

import csv
import io
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from small_runs import EVERY, STEPS, cut, edit_recipe, make_runs, rewrite, train
from tokmill.base.errors import TokmillError, UsageError
from tokmill.report.comparison import comparison_table as tables
from tokmill.report.comparison.compare_runs import Comparison, compare
from tokmill.report.comparison.run_summaries import read_run
from tokmill.report.pages import figures
from tokmill.report.pages.page import page


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs"))


def values(folder: Path, metric: str = "val_loss", step: int = STEPS) -> list[float]:
    """The values of the seeds at a step, read line by line."""
    found = []
    for seed in range(3):
        for line in (folder / f"seed-{seed}/metrics.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if entry["step"] == step and metric in entry:
                found.append(entry[metric])
    assert len(found) == 3
    return found


def cell(found: Comparison, name: str, header: str) -> str:
    """What the table for people says of a group, without the spaces around it."""
    headers, rows = tables.text_rows(found)
    row = next(row for row in rows if row[0].strip() == name)
    return row[[one.strip() for one in headers].index(header)].strip()


def test_seeds_are_one_line_and_what_differs_a_column(root: Path) -> None:
    found = compare([root / "runs"])
    fast, slow = found.groups
    assert [fast.name, slow.name] == ["lr-0.01/seed-…", "lr-0.003/seed-…"]
    assert found.columns == ["optim.lr"]
    assert (found.metric, found.higher, found.comparable, found.notes) == (
        "val_loss", False, True, []
    )  # fmt: skip
    for one, folder in ((fast, "lr-0.01"), (slow, "lr-0.003")):
        expected = values(root / "runs" / folder)
        assert one.mean == pytest.approx(statistics.mean(expected))
        half = 4.302652729911275 * statistics.stdev(expected) / math.sqrt(3)
        assert one.half == pytest.approx(half)
        assert [member.run.path.name for member in one.members] == ["seed-0", "seed-1", "seed-2"]
    assert (fast.best, slow.best) == (True, False)
    shown = f"{fast.mean:.4f}*"
    assert (cell(found, fast.name, "val_loss"), cell(found, fast.name, "lr")) == (shown, "0.01")
    assert cell(found, slow.name, "± 95 %") == f"{slow.half:.4f}"
    assert compare([root / "runs"], "tokens_per_second").higher


def test_the_loss_of_a_column_called_precision_is_a_loss(root: Path, tmp_path: Path) -> None:
    runs = shutil.copytree(root / "runs/lr-0.01", tmp_path / "runs")
    for run in runs.iterdir():
        rewrite(run, lambda e: {**e, "val_loss_precision": 1.0})
    assert not compare([runs], "val_loss_precision").higher


def test_the_order_of_the_arguments_and_twice_the_same_run_change_nothing(root: Path) -> None:
    runs = sorted((root / "runs").glob("*/*"))
    once = tables.as_json(compare(runs))
    assert tables.as_json(compare([*reversed(runs), root / "runs"]))["groups"][0]["seeds"] == 3
    assert tables.as_json(compare([root / "runs", *runs])) == once


def test_at_a_step_and_at_the_best(root: Path) -> None:
    folder = root / "runs/lr-0.01"
    found = compare([folder], at=str(EVERY + 1))
    assert found.groups[0].mean == pytest.approx(statistics.mean(values(folder, step=EVERY)))
    assert found.groups[0].first.step == EVERY
    tokens = values(folder, "targets", EVERY)
    assert [member.targets for member in found.groups[0].members] == tokens
    rates = [values(folder, "tokens_per_second", step) for step in range(1, EVERY + 1)]
    medians = [statistics.median(rate) for rate in zip(*rates, strict=True)]
    assert [member.tokens_per_second for member in found.groups[0].members] == medians
    assert cell(found, "seed-…", "step") == str(EVERY)
    best = compare([folder], "loss", "best").groups[0]
    steps = range(1, STEPS + 1)
    by_seed = zip(*(values(folder, "loss", step) for step in steps), strict=True)
    assert best.mean == pytest.approx(statistics.mean(map(min, by_seed)))
    fastest = compare([folder / "seed-0"], "tokens_per_second", "best").groups[0].mean
    entries = read_run(folder / "seed-0").entries
    assert fastest == max(entry.get("tokens_per_second", 0) for entry in entries)


def test_an_unfinished_run_has_a_line_of_its_own(root: Path, tmp_path: Path) -> None:
    runs = [root / "runs/lr-0.01/seed-0", cut(root / "runs/lr-0.01/seed-1", tmp_path / "x", 9)]
    found = compare(runs)
    assert [len(one.members) for one in found.groups] == [1, 1]
    steps = {one.name: one for one in found.groups}
    assert (steps["x"].finished, steps["x"].first.step) == (False, 8)
    assert cell(found, "x", "steps") == f"9 of {STEPS}"
    assert cell(found, "x", "step") == "8"
    together = compare(runs, at="8")
    assert [len(one.members) for one in together.groups] == [2]
    late = compare(runs, at="10")
    assert next(one for one in late.groups if one.name == "x").mean is None
    assert late.notes == ["did not reach step 10: x"]
    assert len(compare(runs, at="best").groups) == 2


def test_the_same_seeds_are_no_second_sample(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "runs/lr-0.01/seed-0", tmp_path / "again")
    edit_recipe(run, lambda recipe: recipe["run"].update(device="cuda", log_every=7))
    found = compare([*sorted((root / "runs/lr-0.01").iterdir()), run])
    assert sorted(len(one.members) for one in found.groups) == [1, 3]
    assert found.columns == []
    assert len(found.notes) == 1 and "the same recipe and seeds" in found.notes[0]
    state = next(run.glob("checkpoints/*/state.json"))
    state.write_text(state.read_text().replace('"cpu, torch', '"cuda, torch'))
    assert (
        compare([root / "runs", run]).notes[1]
        == "speeds were measured on different devices: cpu, cuda"
    )


def test_a_key_that_an_older_run_lacks_has_its_default(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "runs/lr-0.01/seed-0", tmp_path / "old")
    edit_recipe(run, lambda recipe: [recipe["run"].pop("precision"), recipe["optim"].pop("eps")])
    found = compare([run, root / "runs/lr-0.01/seed-1"])
    assert len(found.groups) == 1
    edit_recipe(run, lambda recipe: recipe["model"].pop("dropout"))
    found = compare([run, root / "runs/lr-0.01/seed-1"])
    assert found.columns == ["model.dropout"], "its default is not known without torch"
    assert cell(found, "old", "dropout") == "-"


def test_keys_of_another_kind_of_model_are_no_columns(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "runs/lr-0.01/seed-0", tmp_path / "kind")
    edit_recipe(run, lambda recipe: recipe.update(model={"kind": "other", "dim": 99, "own": 1}))
    found = compare([run, root / "runs/lr-0.01/seed-1"])
    assert found.columns == ["model.kind", "model.dim"]


def test_a_metric_that_a_run_lacks(root: Path, tmp_path: Path) -> None:
    run = train(root / "lm", tmp_path / "plain", 7, data={"val": ""})
    found = compare([run, root / "runs/lr-0.01"])
    assert [one.name for one in found.groups] == ["seed-…", "plain"]
    assert found.groups[1].mean is None
    assert cell(found, "plain", "val_loss") == cell(found, "plain", "val") == "-"
    assert found.columns == ["data.val"] and found.comparable
    only = compare([run])
    assert only.metric == "loss"
    assert "no run was validated" in only.notes[0]


def test_a_loss_that_is_no_number_has_no_mean(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "runs/lr-0.003/seed-0", tmp_path / "nan")
    rewrite(run, lambda e: {**e, "val_loss": None} if "val_loss" in e and e["step"] > 8 else e)
    found = compare([run, root / "runs/lr-0.003/seed-1", root / "runs/lr-0.01"])
    assert [one.best for one in found.groups] == [True, False]
    assert math.isnan(found.groups[1].mean or 0)
    assert found.groups[1].half is None
    best = compare([run, root / "runs/lr-0.003/seed-1"], at="best").groups[0]
    assert [member.step for member in best.members] == [8, STEPS]


def test_other_vocabularies_compare_by_bits_alone(root: Path, tmp_path: Path) -> None:
    runs = [root / "runs/lr-0.01", train(root / "other", tmp_path / "other")]
    loss = compare(runs)
    assert not loss.comparable and not any(one.best for one in loss.groups)
    assert "different vocabularies" in loss.notes[0]
    assert loss.columns == ["data.train", "data.val"]
    shown = [one["settings"]["data.val"] for one in tables.as_json(loss)["groups"]]
    assert sorted(shown) == ["lm/val", "other/val"]
    # The documents have equal lengths, so the text passes for the same.
    bits = compare(runs, "val_bits_per_byte")
    assert bits.comparable and sum(one.best for one in bits.groups) == 1
    assert not bits.notes
    few = [
        train(root / name, tmp_path / f"few-{name}", run={"eval_rows": 3})
        for name in ("lm", "other")
    ]
    assert "run.eval_rows=0" in compare(few, "val_bits_per_byte").notes[0]
    train(root / "other", tmp_path / "text", data={"val": str(root / "other/train")})
    text = compare([root / "runs/lr-0.01", tmp_path / "text"], "val_bits_per_byte")
    assert not text.comparable and "the same text" in text.notes[0]


def test_other_validation_stores_and_rows_are_said(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "lm/val", tmp_path / "gone")
    base = root / "runs/lr-0.01/seed-0"
    stores = train(root / "lm", tmp_path / "a", data={"val": str(root / "lm/train")})
    gone = train(root / "lm", tmp_path / "b", 1, data={"val": str(tmp_path / "gone")})
    rows = train(root / "lm", tmp_path / "c", 1, run={"eval_rows": 3})
    assert len(compare([base, gone]).groups) == 1, "a copy of a store is the same store"
    shutil.rmtree(tmp_path / "gone")
    for other, word in (
        (stores, "different stores"),
        (gone, "cannot be opened"),
        (rows, "numbers of rows: all, 3"),
    ):
        found = compare([base, other])
        assert len(found.groups) == 2 and not found.comparable
        assert word in found.notes[0]
        assert compare([base, other], "loss").comparable
    text = train(root / "lm", tmp_path / "d", data={"train": str(root / "lm/val")})
    assert "learned from different stores" in compare([base, text], "loss").notes[0]
    assert compare([base, text], "grad_norm").notes == []
    assert compare([base, text]).comparable


def of_task(root: Path, place: Path, batch: int = 4, **keys: object) -> Path:
    """A run whose recipe has this task; its files do not say what decides its loss."""
    shutil.copytree(root / "runs/lr-0.01/seed-0", place)
    task = {"kind": "contrastive", **keys}
    edit_recipe(
        place, lambda recipe: (recipe.update(task=task), recipe["data"].update(batch=batch))
    )
    return place


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ({"temperature": 0.1}, {"temperature": 0.5}, "task.temperature"),
        ({"batch": 8}, {"batch": 2}, "data.batch"),
        ({"size": 2}, {"size": 4}, "task.size"),
        ({"same": []}, {"same": ["part"]}, "task.same"),
        ({"loss": "triplet", "margin": 0.2}, {"loss": "triplet", "margin": 0.3}, "task.margin"),
        ({"loss": "circle", "gamma": 80}, {"loss": "circle", "gamma": 90}, "task.gamma"),
        ({"kind": "signature", "cpi": "cpi"}, {"kind": "signature", "cpi": ""}, "task.cpi"),
        ({"kind": "classify", "column": "a"}, {"kind": "classify", "column": "b"}, "task.column"),
        ({"kind": "masked", "share": 0.1}, {"kind": "masked", "share": 0.2}, "task.share"),
        ({"kind": "not_here", "own": 1}, {"kind": "not_here", "own": 2}, "task.own"),
        ({}, {"kind": "masked"}, "task.kind"),
        # What has no effect, or changes the model alone.
        ({"margin": None}, {"margin": 0.1}, ""),
        ({"gamma": 80}, {"gamma": 90}, ""),
        ({"negatives": "own"}, {"negatives": "own", "batch": 8}, ""),
        ({"columns": ["a", "b"]}, {"columns": ["a", "b"], "size": 4}, ""),
        ({"length": 64}, {"length": 128}, ""),
        ({"kind": "signature", "cpi": ""}, {"kind": "signature", "cpi": "", "cpi_weight": 2}, ""),
        ({"kind": "classify"}, {"kind": "classify", "batch": 8}, ""),
    ],
)
def test_losses_of_other_tasks_are_not_compared(
    root: Path, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], key: str
) -> None:
    """A loss at another temperature, or of other hidden tokens, is another quantity."""
    both = [of_task(root, tmp_path / "a", **first), of_task(root, tmp_path / "b", **second)]
    found = compare(both)
    assert found.comparable == (not key)
    if key:
        assert not any(group.best for group in found.groups)
        assert f"differ in {key}: their val_loss cannot be compared" in found.notes[0]
    assert compare(both, "grad_norm").comparable


def test_ranks_among_other_numbers_of_records_are_not_compared(root: Path, tmp_path: Path) -> None:
    for name, pool in (("a", 31.0), ("b", 31.0), ("c", 62.5)):
        run = of_task(root, tmp_path / name)
        rewrite(run, lambda e, n=pool: {**e, "val_mrr": 0.5, "val_recall_1": 0.4, "val_pool": n})
    same, other = [tmp_path / "a", tmp_path / "b"], [tmp_path / "a", tmp_path / "c"]
    for metric in ("val_mrr", "val_recall_1"):
        assert compare(same, metric).comparable
        found = compare(other, metric)
        assert not found.comparable and "numbers of records: 31, 62.5" in found.notes[0]


def test_a_run_that_says_nothing_or_is_damaged_is_refused(root: Path, tmp_path: Path) -> None:
    run = cut(root / "runs/lr-0.01/seed-0", tmp_path / "begun", 0)
    with pytest.raises(UsageError, match="no run has logged anything"):
        compare([run])
    for name in ("schema.json", "recipe.json"):
        (run / name).write_text('{"vocabularies": {"token": 3}')
        with pytest.raises(TokmillError, match=name):
            compare([run])


def test_a_mix_without_weights_is_shown_as_such(root: Path, tmp_path: Path) -> None:
    stores = [str(root / "lm/train"), str(root / "lm/val")]
    for name, weights in (("plain", []), ("weighted", [3, 1])):
        train(root / "lm", tmp_path / name, data={"train": stores, "weights": weights})
    found = compare([tmp_path])
    assert cell(found, "plain", "weights").strip() == "-"
    assert cell(found, "weighted", "weights").strip() == "[3.0, 1.0]"


def test_a_name_is_no_formula_and_no_line() -> None:
    """A spreadsheet runs what begins with one of these; a reader of lines sees a run of its own."""
    names = ["=cmd|' -C calc'!A0", "+1+1", "@SUM(A1)", "-x", "-1.5e3", "a\nb\t9", "plain"]
    text = tables.csv_text([["run"], *([name] for name in names)])
    shown = [row["run"] for row in csv.DictReader(io.StringIO(text))]
    assert shown == [f"'{name}" for name in names[:4]] + ["-1.5e3", "a\\nb\\t9", "plain"]
    assert len(text.splitlines()) == 1 + len(names)


def test_latex_sees_no_command_in_names(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "runs/lr-0.01/seed-0", tmp_path / r"a_b&50%\x~^{}#$")
    text = tables.write_latex(compare([run, root / "runs/lr-0.003"]))
    head, first, second = text.splitlines()[3], *text.splitlines()[5:7]
    assert text.splitlines()[1] == r"\begin{tabular}{lrrrrrrrr}"
    assert head.startswith(r"run & lr & seeds & val\_loss & steps")
    name = r"a\_b\&50\%\textbackslash{}x\textasciitilde{}\textasciicircum{}\{\}\#\$"
    assert first.startswith(f"{name} & 0.01 & 1 & \\textbf{{")
    assert r"$\pm$" not in first and r"$\pm$" in second
    assert second.startswith(r"seed-\dots{} & ")
    assert text.count(r"\\") == 3
    assert [line for line in text.splitlines() if line.endswith("rule")] == [
        r"\toprule", r"\midrule", r"\bottomrule",
    ]  # fmt: skip


def test_json_has_each_seed(root: Path) -> None:
    found = tables.as_json(compare([root / "runs/lr-0.01"]))
    json.dumps(found)
    (one,) = found["groups"]
    assert [run["value"] for run in one["runs"]] == values(root / "runs/lr-0.01")
    assert [(run["data.seed"], run["run.seed"]) for run in one["runs"]] == [
        (i, i) for i in range(3)
    ]
    assert one["seeds"] == 3 and one["settings"] == {} and not one["best"]


def test_curves_of_seeds_have_a_mean_and_a_band(root: Path, tmp_path: Path) -> None:
    rewrite_to = shutil.copytree(root / "runs/lr-0.01", tmp_path / "three")
    rewrite(rewrite_to / "seed-2", lambda entry: None if entry["step"] == 2 else entry)
    figure = figures.loss([rewrite_to])
    train_curve, validation = figure.series
    assert train_curve.label == "seed-… (3 seeds), train"
    assert train_curve.x.tolist() == [1, *range(3, STEPS + 1)]
    assert validation.line == "--" and validation.x.tolist() == [4, 8, 12]
    last = values(rewrite_to)
    ends = [validation.y[-1], *(validation.more[name][-1] for name in ("lowest", "highest"))]
    assert ends == pytest.approx([statistics.mean(last), min(last), max(last)])
    mixed = figures.loss([rewrite_to, root / "runs/lr-0.003/seed-0"])
    rows = list(csv.DictReader(io.StringIO(figures.write_csv(mixed))))
    alone = [row for row in rows if row["series"].startswith("lr-0.003")]
    assert alone and all(row["lowest"] == row["highest"] == "" for row in alone)


def test_a_page_of_a_folder_of_runs(root: Path, tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="the folder holds no run"):
        page([root / "lm"], tmp_path / "p.html")
    html = page([root / "runs"], tmp_path / "p.html").read_text()
    assert html.count("<section") == 7
    assert "lr-0.003/seed-… (3 seeds), train" in html
    mean = statistics.mean(values(root / "runs/lr-0.01"))
    assert f"{mean:.4f}*" in html


def test_torch_is_not_loaded(root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tokmill.report.comparison import compare_runs;"
        "compare_runs.compare([Path(sys.argv[1])]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root / "runs")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_more_rows_than_the_store_has_are_the_same_measurement(root: Path, tmp_path: Path) -> None:
    runs = [
        train(root / "lm", tmp_path / str(rows), seed, run={"eval_rows": rows})
        for seed, rows in enumerate((256, 2000, 0))
    ]
    found = compare(runs)
    assert found.comparable and not found.notes and not found.columns
    assert len(found.groups) == 1
