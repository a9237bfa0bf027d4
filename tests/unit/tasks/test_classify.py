"""Classes of records: labels, metrics, sentences, and runs that begin from others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokmill
import toy
from entry_stores import lay
from making import here
from source_cases import block_store
from task_cases import ROLES, make_stores, recipe, special_store, walks
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.cli import main
from tokmill.feed.feed import Feed
from tokmill.report.describe.inspect import describe
from tokmill.store.store import Store
from tokmill.tasks.classify import LABEL, class_metrics, class_tables, label_column
from tokmill.training.evaluate import evaluate
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import facts_from, inputs_of, make_task, read_run

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stores(tmp_path_factory.mktemp("stores"))


def write_tsv(folder: Path, name: str, rows: list[tuple[str, str, str]]) -> Path:
    lines = ["\t".join(row) for row in rows]
    path = folder / f"{name}.tsv"
    path.write_text("\n".join(["gold_label\tsentence1\tsentence2", *lines, ""]))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue", "a", "is", "##s", "sky"]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokmill.build(
        "tsv", [path], folder / name, tokenizer=folder / "vocab.txt",
        sentences=("sentence1", "sentence2"), label_column="gold_label",
        labels=("same", "other"), how=How(quiet=True, amount=here()),
    )  # fmt: skip
    return folder / name


def sentences(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Whether the second sentence says red, as the first one may too."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        left, right = random.choice(["red", "blue"], 2)
        found.append(("same" if right == "red" else "other", f"a sky is {left}", f"{right} is a"))
    return found


def test_sentences_of_a_table_are_classified(tmp_path: Path, capsys: Any) -> None:
    """From words to a run that is right about pairs which it has not seen."""
    train, val = (write_tsv(tmp_path, n, sentences(c, c)) for n, c in (("train", 200), ("val", 40)))
    value = toy.recipe(
        train,
        150,
        data={"val": str(val)},
        model={"kind": "encoder", "dim": 32, "context": 32, "layers": 2, "heads": 4},
        task={"kind": "classify", "length": 32},
        optim={"lr": 5e-3},
        run={"eval_every": 0, "eval_rows": 0},
    )
    tokmill.train(value, tmp_path / "run", quiet=True)
    _, facts = read_run(tmp_path / "run")
    assert facts.classes == {"label": ("same", "other")}
    assert describe(tmp_path / "run")["next"] == f"tokmill predict {tmp_path / 'run'} INPUT"
    found = evaluate(tmp_path / "run", val, device="cpu")
    assert found["accuracy"] > 0.9 and found["rows"] == 40
    names = {"f1", "f1_macro", "f1_same", "f1_other", "count_same", "found_other"}
    assert names <= found.keys()
    assert found["count_same"] + found["count_other"] == 40
    # Segments and special tokens are the store's: the model reads both, and adds none.
    task = tokmill.training.runs.run.load_task(tmp_path / "run")
    batch = task.prepare(
        Feed(task.rows(Store(val)), 4, columns=["token", "segment", "label"]).batch(0)
    )
    assert batch.columns["token"][0, :2].tolist()[0] == 2
    assert (batch.columns["token"] == 2).sum() == 4 and batch.columns["segment"].max() == 1
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tmp_path / "run"), str(val), "--device", "cpu", "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["f1"] == pytest.approx(found["f1"])
    with pytest.raises(SystemExit):
        main(["eval", str(tmp_path / "run"), str(val), "--device", "cpu", "--quiet"])
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    same = str(found["count_same"])
    assert ["majority", f"{max(found['count_same'], found['count_other']) / 40:.4f}"] in rows
    assert ["class,", "predicted", "as", "same", "other"] in rows
    assert ["same", same, "0"] in rows and "f1_same" not in said and "count_same" not in said
    with pytest.raises(SystemExit):
        main(["inspect", str(val), "--head", "1"])
    assert f"label_name: {sentences(40, 40)[0][0]}\n" in capsys.readouterr().out
    other = write_tsv(tmp_path, "swapped", sentences(10, 1))
    vocabulary = other / "vocab" / Store(other).vocabularies["label"].file
    vocabulary.write_text(json.dumps({"tokens": ["other", "same"]}))
    with pytest.raises(UsageError, match="its classes are other, same; the run has learned same"):
        evaluate(tmp_path / "run", other, device="cpu")


def test_metrics_are_those_of_a_table() -> None:
    """Of scikit-learn's classification_report on the same labels."""
    label, found = np.asarray([0, 0, 0, 1, 1, 2]), np.asarray([0, 1, 0, 1, 0, 0])
    metrics = class_metrics(found, label, ["a", "b", "c"])
    assert metrics["f1_a"] == pytest.approx(2 * 2 / (4 + 3))
    assert metrics["f1_b"] == pytest.approx(0.5) and metrics["f1_c"] == 0
    assert metrics["f1"] == metrics["f1_macro"] == pytest.approx((4 / 7 + 0.5) / 3)
    assert (metrics["count_a"], metrics["found_a"]) == (3, 4)
    two = class_metrics(found % 2, label % 2, ["no", "yes"])
    assert two["f1"] == two["f1_yes"] != two["f1_macro"]
    same = class_metrics(found, label, ["macro", "b", "c"])
    assert same["f1_macro"] == metrics["f1_macro"] and same["count_macro"] == 3


@pytest.mark.parametrize("count", [2, 5, 30])
def test_tables_of_classes_are_those_of_sklearn(count: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(count)
    # The last class is in no record and never predicted.
    label, found = random.integers(0, count - 1, (2, 200))
    found = np.where(random.random(200) < 0.5, label, found)
    names = [f"c{number}" for number in range(count)]
    tables = class_tables(found, label, names)
    numbers = range(count)
    each = metrics.precision_recall_fscore_support(label, found, labels=numbers, zero_division=0)
    for key, right in zip(("precision", "recall", "f1", "records"), each, strict=True):
        assert [one[key] for one in tables["classes"]] == pytest.approx(right.tolist())
    assert [one["class"] for one in tables["classes"]] == names
    assert tables["majority"] == np.bincount(label).max() / 200
    matrix = metrics.confusion_matrix(label, found, labels=numbers)
    assert [one["predicted"] for one in tables["classes"]] == matrix.sum(0).tolist()
    if count <= 12:
        assert tables["confusion"] == matrix.tolist() and "confused" not in tables
        return
    np.fill_diagonal(matrix, 0)
    most = np.sort(matrix.ravel())[::-1][:20]
    assert [pair["records"] for pair in tables["confused"]] == most.tolist()
    for pair in tables["confused"]:
        place = names.index(pair["class"]), names.index(pair["predicted_as"])
        assert matrix[place] == pair["records"]


def test_a_record_gets_its_frame_and_its_label(stores: Path) -> None:
    config = from_dict(recipe(stores, "classify"))
    store = Store(stores / "walks", ["label"])
    task = make_task(config, inputs_of(config, facts_from(config, [store])))
    batch = task.prepare(Feed(task.rows(store), 8, columns=["token", "label"]).batch(0))
    assert batch.document.shape == (8, 16)
    assert (batch.columns["token"][:, 0] == ROLES["cls"]).all()
    assert batch.targets[LABEL].shape == (8,) and not batch.values


def test_it_begins_from_masked_and_tells_what_begins_anew(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokmill.train(recipe(stores, "sentence_pair"), tmp_path / "pre", quiet=True)
    value = recipe(stores, "classify")
    del value["model"]
    value["run"]["start"] = str(tmp_path / "pre")
    capsys.readouterr()
    tokmill.train(value, tmp_path / "run", quiet=True)
    said = capsys.readouterr().err
    assert "begin anew: output.linear.bias, output.linear.weight" in said
    assert "are not used: heads (" in said and "relation (2 tensors)" in said
    assert "pooler" not in said


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"task": {"column": "labl"}}, "the label column 'labl' is not there"),
        ({"task": {"column": "token"}}, "does not have one number for each record"),
        ({"task": {"column": "number"}}, "holds fractions"),
        ({"task": {"dropout": 1.0}}, "task.dropout: expected `float` < 1.0"),
        ({"task": {"length": 3}}, "no room for tokens"),
        ({"task": {"length": 0}}, "no room for tokens"),
        ({"model": {"kind": "decoder"}}, "has seen only one token"),
    ],
)
def test_what_is_no_label_is_told(
    stores: Path, tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    value = recipe(stores, "classify")
    value["data"]["overlays"] = ["label", "number"]
    for name, section in sections.items():
        value[name] = {**(value[name] if name == "task" else {}), **section}
    with pytest.raises(UsageError, match=said) as caught:
        tokmill.train(value, tmp_path / "run", quiet=True)
    assert caught.value.hint


def test_a_label_of_texts_is_told_how_to_become_numbers(tmp_path: Path) -> None:
    blocks = tokmill.Store(str(block_store(tmp_path)[1]))
    with pytest.raises(UsageError, match="'program' does not have one number") as caught:
        label_column(blocks, "program")
    assert "docs/bert.md" in (caught.value.hint or "")


def test_labels_outside_are_errors(tmp_path: Path) -> None:
    for name, label in (("a", [0, 1, 1]), ("b", [0, 1, 2]), ("c", [0, 1, 20_000])):
        store = special_store(tmp_path / name, walks(3))
        lay(store, "label", {"label": np.asarray(label, np.uint32)})
    value = recipe(tmp_path, "classify", steps=1, eval_every=0)
    value["data"] = {"train": str(tmp_path / "a"), "overlays": ["label"], "batch": 2}
    tokmill.train(value, tmp_path / "run", quiet=True)
    with pytest.raises(
        UsageError, match="its classes are 0, 1, 2; the run has learned 0, 1"
    ) as caught:
        evaluate(tmp_path / "run", tmp_path / "b", device="cpu")
    assert "as the run did" in (caught.value.hint or "")
    # Of two stores the one with more classes says how many there are.
    value["data"]["train"] = [str(tmp_path / "a"), str(tmp_path / "b")]
    tokmill.train(value, tmp_path / "both", quiet=True)
    assert read_run(tmp_path / "both")[1].classes == {"label": ("0", "1", "2")}
    value["data"]["train"] = str(tmp_path / "c")
    with pytest.raises(TokmillError, match="classes are 0 to at most 9,999"):
        tokmill.train(value, tmp_path / "many", quiet=True)
