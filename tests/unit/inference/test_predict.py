"""`predict`: the classes of records, of inputs that are read as the run's store was built."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tokmill
import toy
from entry_stores import lay
from making import here as in_process
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.cli import main
from tokmill.inference.predict import predict
from tokmill.models.model import Tensors
from tokmill.store.store import Store
from tokmill.tasks.classify import Classify
from tokmill.training.runs.run import load_task

torch.set_num_threads(1)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue", "a", "is", "sky"]
HOW = How(quiet=True, amount=in_process())
PAIRS = [
    ("a sky is red", "blue is a", "other"),
    ("a sky", "red", "same"),
    ("sky is a sky is a sky is blue", "red is a", "same"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on pairs, whose rows are so short that a record is cut; tables with labels."""
    root = tmp_path_factory.mktemp("predict")
    (root / "vocab.txt").write_text("\n".join(WORDS))
    write_table(root / "train.tsv", PAIRS * 5)
    tokmill.build(
        "tsv", root / "train.tsv", root / "train", tokenizer=root / "vocab.txt", how=HOW,
        labels=("same", "other", "never"), max_tokens=10,
    )  # fmt: skip
    value = toy.recipe(
        root / "train", 3,
        data={"batch": 4},
        model={"kind": "encoder", "dim": 16, "context": 16, "layers": 1, "heads": 2},
        task={"kind": "classify", "length": 9},
        optim={"lr": 1e-2},
    )  # fmt: skip
    tokmill.train(value, root / "run", quiet=True)
    return root


def write_table(path: Path, rows: Sequence[tuple[str, ...]], *, label: bool = True) -> Path:
    heads = ["sentence1", "sentence2", "gold_label"][: 2 + label]
    path.write_text("".join("\t".join(row[: len(heads)]) + "\n" for row in [heads, *rows]))
    return path


def by_hand(run: Path, rows: Sequence[tuple[str, ...]]) -> np.ndarray:
    """(N, C) probabilities: one record at a time, of ids that are looked up here.

    At most 10 tokens, of which the longer sentence loses its last ones, and 9 that are read.
    """
    task: Any = load_task(run)
    found = []
    for first, second, *_ in rows:
        a, b = ([WORDS.index(word) for word in text.split()] for text in (first, second))
        while len(a) + len(b) > 10 - 3:
            (a if len(a) > len(b) else b).pop()
        ids = ([2, *a, 3, *b, 3])[:9]
        segment = ([0] * (len(a) + 2) + [1] * (len(b) + 1))[:9]
        row = torch.zeros(1, len(ids), dtype=torch.int64)
        columns = {"token": torch.tensor([ids]), "segment": torch.tensor([segment])}
        batch = Tensors(columns, row, torch.arange(len(ids))[None], whole=True)
        with torch.no_grad():
            logits = task.predicted_values(batch)[0].numpy().astype(np.float64)
        share = np.exp(logits - logits.max())
        found.append(share / share.sum())
    return np.asarray(found)


def test_stores_tables_and_lines_get_the_same_probabilities(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = by_hand(folder / "run", PAIRS * 5)
    of_store = predict(folder / "run", folder / "train", device="cpu")
    assert of_store.names == ("same", "other", "never") and of_store.step == 3
    np.testing.assert_allclose(of_store.probabilities, right, atol=1e-5)
    labels = [of_store.names[number] for number in right.argmax(1)]
    assert [row["label"] for row in of_store.rows()] == labels
    assert of_store.keys == {"record": list(range(15))}
    assert "are in no row" in of_store.notes[0]
    # The vocabulary and the options are the run's: neither the store nor its tokenizer is needed.
    (folder / "vocab.txt").rename(folder / "away.txt")
    (folder / "train").rename(folder / "gone")
    bare = write_table(tmp_path / "bare.tsv", PAIRS, label=False)
    wild = write_table(tmp_path / "wild.tsv", [(*row[:2], "new") for row in PAIRS])
    for table in (bare, wild):
        found = predict(folder / "run", table, device="cpu")
        np.testing.assert_allclose(found.probabilities, right[:3], atol=1e-5)
        assert found.keys == {"record": [0, 1, 2], "line": [2, 3, 4]}
    lines = "\n".join("\t".join(row[:2]) for row in PAIRS)
    stdin = SimpleNamespace(buffer=io.BytesIO((lines.replace("\n", "\n\n") + "\none\n").encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    found = predict(folder / "run", "-", device="cpu")
    np.testing.assert_allclose(found.probabilities, right[:3], atol=1e-5)
    assert found.keys["line"] == [1, 3, 5]
    assert "1 columns, 2 blank line; the first reject is in line 6" in found.notes[-1]
    # By hand: 10, 6 and 15 tokens with the special ones, of which 10 are kept and 9 are read.
    cut = ["-: 2 tokens of 2 records are in no row: a longer task.length reads more"]
    cut += ["records that were cut to max_tokens: 1", "tokens cut off: 5"]
    assert found.notes[:-1] == cut
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"a\xff\tred\n")))
    with pytest.raises(TokmillError, match="UTF-8") as error:
        predict(folder / "run", "-")
    assert "-t UTF-8 FILE > NEW" in error.value.hint
    (folder / "gone").rename(folder / "train")
    (folder / "away.txt").rename(folder / "vocab.txt")


def test_the_command_writes_tables_csv_and_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path / "t.tsv", PAIRS, label=False)
    right = by_hand(folder / "run", PAIRS)

    def run(*more: str, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["predict", str(folder / "run"), str(table), "--device", "cpu", *more])
        assert ended.value.code == code
        return capsys.readouterr()

    lines = run()[0].splitlines()
    assert lines[0].split() == ["record", "line", "label", "p(same)", "p(other)", "p(never)"]
    assert len(lines) == 5
    run("-o", str(tmp_path / "p.csv"))
    cells = list(csv.reader(io.StringIO((tmp_path / "p.csv").read_text())))
    assert cells[1][:2] == ["0", "2"]
    np.testing.assert_allclose([[*map(float, row[3:])] for row in cells[1:]], right, atol=1e-5)
    found = json.loads(run("--json")[0])
    assert found["classes"] == ["same", "other", "never"]
    rows = found["records"]
    assert rows[1]["line"] == 3
    assert rows[0]["probabilities"]["other"] == pytest.approx(right[0, 1], abs=1e-5)
    run("-o", str(tmp_path / "p.csv"))  # its own answers are replaced, other files are not
    assert "-o FILE.csv" in run("-o", str(tmp_path / "p.txt"), code=2)[1]
    own = tmp_path / "own.csv"
    own.write_text("record_id,price\n")
    before = own.read_bytes()
    assert "holds no answers of `predict`" in run("-o", str(own), code=2)[1]
    assert own.read_bytes() == before


def test_inputs_of_another_form_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "run"
    (tmp_path / "one.txt").write_text("a sky is red\n")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"a sky is red\n")))
    with pytest.raises(UsageError, match="stdin: the first line has 1 text, and .* the run 2"):
        predict(run, "-")
    with pytest.raises(UsageError, match="which columns are sentences") as error:
        predict(run, tmp_path / "one.txt")
    assert "- reads lines" in error.value.hint and "build tsv" in error.value.hint
    with pytest.raises(TokmillError, match="neither a store nor a file"):
        predict(run, tmp_path / "nothing.tsv")
    single = tmp_path / "single.tsv"
    single.write_text("sentence\tlabel\na sky is red\tsame\n")
    tokmill.build("tsv", single, tmp_path / "single", tokenizer=folder / "vocab.txt", how=HOW)
    with pytest.raises(TokmillError, match="a record has 1 sentences, and the run has learned 2"):
        predict(run, tmp_path / "single")
    (run / "input_format.json").rename(run / "away")
    with pytest.raises(TokmillError, match="does not know how its records were built"):
        predict(run, single)
    (run / "away").rename(run / "input_format.json")


def test_a_causal_classifier_of_json_lines_reads_lines_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents with their end, of labels in an overlay; keys come along."""
    texts = ["one two three", "two three", "three one one two", "two"]
    tokmill.train_tokenizer(texts, 300).save(tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    rows = [{"id": f"r{n}", "text": text} for n, text in enumerate(texts)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokmill.build(
        "jsonl", tmp_path / "d.jsonl", tmp_path / "all", tokenizer=tokenizer, keep=("id",), how=HOW
    )
    store = tokmill.build("select", tmp_path / "all", tmp_path / "store", how=HOW)
    lay(store.path, "label", {"label": np.array([0, 1, 0, 1], np.uint8)})
    value = toy.recipe(
        store.path, 2,
        data={"batch": 2, "overlays": ["label"]},
        task={"kind": "classify", "length": 16, "pool": "last"},
    )  # fmt: skip
    tokmill.train(value, tmp_path / "run", quiet=True)
    of_store = predict(tmp_path / "run", store.path, device="cpu")
    assert of_store.keys == {"record": [0, 1, 2, 3], "id": ["r0", "r1", "r2", "r3"]}
    found = predict(tmp_path / "run", tmp_path / "d.jsonl", device="cpu")
    assert found.keys["id"] == of_store.keys["id"] and found.keys["line"] == [1, 2, 3, 4]
    np.testing.assert_array_equal(found.probabilities, of_store.probabilities)
    stdin = SimpleNamespace(buffer=io.BytesIO("\n".join(texts).encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    found = predict(tmp_path / "run", "-", device="cpu")
    np.testing.assert_array_equal(found.probabilities, of_store.probabilities)
    # Records without the end after which the run has learned to predict.
    open_ = tokmill.build(
        "jsonl", tmp_path / "d.jsonl", tmp_path / "open", tokenizer=tokenizer,
        end_of_record="none", how=HOW,
    )  # fmt: skip
    with pytest.raises(TokmillError, match="the special tokens around a record of 'token'"):
        predict(tmp_path / "run", open_.path)
    assert Store(open_.path).records == 4


def test_runs_of_other_tasks_name_their_command(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "store", toy.cycles(20))
    tokmill.train(toy.recipe(store, 1), tmp_path / "run", quiet=True)
    with pytest.raises(UsageError, match="the task of the run is next_token") as error:
        predict(tmp_path / "run", store)
    assert "tokmill sample" in error.value.hint


def test_outputs_that_are_no_numbers_are_no_prediction(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Classify.predicted_values
    monkeypatch.setattr(Classify, "predicted_values", lambda *of: right(*of) * float("nan"))
    with pytest.raises(TokmillError, match="outputs are not finite"):
        predict(folder / "run", folder / "train", device="cpu")
