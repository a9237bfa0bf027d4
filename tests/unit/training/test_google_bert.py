"""BERT of TensorFlow as a run: what comes out, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tokmill
from bundle_writer import entry, masked, write_bundle
from tokmill.base.errors import TokmillError
from tokmill.cli import main
from tokmill.models.public.public_encoders import public_name
from tokmill.training.engines.tensors import read_tensors
from tokmill.training.runs.exchange import export_model, import_model
from tokmill.training.runs.run import load_task
from tokmill.training.runs.tensorflow.google_bert_run import import_bert, read_bert

GOLDEN = Path(__file__).parents[2] / "golden" / "tensorflow"
ARRAYS = dict[str, np.ndarray]


@pytest.fixture
def values() -> ARRAYS:
    """The variables of the golden checkpoint, as TensorFlow reads them, without the counter."""
    with np.load(GOLDEN / "bert/expected.npz") as expected:
        return {name: expected[name] for name in expected.files if name != "global_step"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the configuration and the vocabulary, for checkpoints that are written here."""
    (tmp_path / "in").mkdir()
    for name in ("bert_config.json", "vocab.txt"):
        shutil.copy(GOLDEN / "bert" / name, tmp_path / "in")
    return tmp_path / "in"


def refused(match: str, place: Path, hint: str = "") -> None:
    with pytest.raises(TokmillError, match=match) as caught:
        import_bert(place, place.parent / "out")
    assert caught.value.hint and hint in caught.value.hint
    assert not (place.parent / "out").exists()


@pytest.mark.parametrize("name", ["bert", "two-shards"])
def test_names_and_kernels(name: str, values: ARRAYS, tmp_path: Path) -> None:
    run = import_bert(GOLDEN / name, tmp_path / "run")
    assert run.notes[0].startswith("left out: 93 variables of the optimiser (")
    export_model(tmp_path / "run", tmp_path / "out")
    tensors = read_tensors(tmp_path / "out/model.safetensors")
    for name_there, value in values.items():
        if not re.search("adam_|Adam|_power", name_there):
            wanted = torch.from_numpy(value)
            wanted = wanted.T if name_there.endswith("kernel") else wanted
            assert torch.equal(tensors.pop(public_name(name_there)), wanted)
    assert not tensors
    config = json.loads((tmp_path / "out/config.json").read_text())
    asked = json.loads((GOLDEN / "bert/bert_config.json").read_text())
    # Dropout and the spread of first weights belong to a training.
    free = {"attention_probs_dropout_prob", "hidden_dropout_prob", "initializer_range"}
    assert {k: v for k, v in asked.items() if k not in free}.items() <= config.items()
    assert (config["layer_norm_eps"], config["pad_token_id"]) == (1e-12, 0)
    task = load_task(tmp_path / "run")
    words = (GOLDEN / "bert/vocab.txt").read_text("utf-8").split()
    assert task.reads.roles["token"]["mask"] == words.index("[MASK]")
    tokenizer = json.loads((tmp_path / "run/vocab/tokenizer.json").read_text())
    assert [*tokenizer["model"]["vocab"]] == words and tokenizer["normalizer"]["lowercase"]


def test_what_does_not_fit_is_named(place: Path, values: ARRAYS) -> None:
    def changed(**other: np.ndarray | None) -> None:
        found = {**values, **{name.replace("__", "/"): value for name, value in other.items()}}
        write_bundle(place / "m", {name: v for name, v in found.items() if v is not None})

    refused("no checkpoint of TensorFlow", place, "NAME.index")
    changed(cls__predictions__output_bias=None)
    refused("lacks the tensors cls.predictions.bias", place, "not of one model")
    changed(bert__encoder__extra=np.ones(2))
    refused("also holds the tensors encoder.extra", place)
    changed(bert__pooler__dense__kernel=np.ones((8, 9)))
    refused(r"pooler.dense.weight' is .* of \[9, 8\]; config.json asks for .* \[8, 8\]", place)
    write_bundle(place / "m", {"a": np.ones(2)})
    refused("lacks the tensors cls.predictions.bias, .*, …", place)
    changed()
    config = json.loads((place / "bert_config.json").read_text())
    for key, value, match in (
        ("num_hidden_layers", 3, "lacks the tensors encoder.layer.2"),
        ("num_hidden_layers", 10**12, "is above 1000"),
        ("hidden_act", "relu", "hidden_act = 'relu'"),
        ("num_attention_heads", 3, "heads"),
        ("num_attention_heads", 0, "heads"),
        ("vocab_size", 10, "ids up to 10, the model 0 to 9"),
        ("vocab_size", "x", "Expected `int`"),
    ):
        (place / "bert_config.json").write_text(json.dumps({**config, key: value}))
        refused(match, place)
    (place / "bert_config.json").unlink()
    refused("no bert_config.json", place, "put it beside")


def test_objects_and_partitioned_variables(place: Path) -> None:
    for name, match in (("objects/ckpt", "object-based one of TensorFlow 2"),
                        ("partitioned/model.ckpt", "was saved in 3 parts")):  # fmt: skip
        for path in GOLDEN.glob(f"{name}.*"):
            shutil.copy(path, place)
        refused(match, place)
        for path in place.glob("*ckpt.*"):
            path.unlink()


def write_as(place: Path, values: ARRAYS, name: str, dtype: int, array: np.ndarray) -> None:
    """Write a variable as another dtype, behind all others."""
    shard, data = place / "m.data-00000-of-00001", array.tobytes()
    write_bundle(place / "m", values)
    lies = entry(dtype, array.shape, shard.stat().st_size, len(data), masked(data))
    write_bundle(place / "m", values, extra={name.encode(): lies})
    shard.write_bytes(shard.read_bytes() + data)


def test_other_dtypes(place: Path, values: ARRAYS) -> None:
    name = "bert/pooler/dense/bias"
    half = values[name].astype("<f2")
    write_as(place, values, name, 19, half)
    found = read_bert(place).tensors["bert.pooler.dense.bias"]
    assert torch.equal(found, torch.from_numpy(half.astype(np.float32)))
    write_as(place, values, name, 3, half.astype("<i4"))
    refused("dense.bias' is torch.int32 of", place)


def test_vocabularies(place: Path, values: ARRAYS) -> None:
    write_bundle(place / "m", values)
    words = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "Mov"]
    (place / "vocab.txt").write_text("\r\n".join(words))
    import_bert(place, place.parent / "out")
    written = json.loads((place.parent / "out/vocab/tokenizer.json").read_text())
    assert written["normalizer"]["lowercase"] is False
    assert [*written["model"]["vocab"]] == words
    shutil.rmtree(place.parent / "out")
    (place / "vocab.txt").write_text("\n".join([*words, *"abcdefgh"]))
    refused("ids up to 12, the model 0 to 10", place, "--tokenizer")
    (place / "vocab.txt").write_text("[UNK]\nmov\n")
    refused("the vocabulary of the column 'token' has no 'mask' token", place)
    (place / "vocab.txt").write_bytes(b"a\n\xff\n")
    refused("vocab.txt: byte 2", place)
    (place / "vocab.txt").unlink()
    refused("there is no tokenizer", place, "--tokenizer")
    import_bert(place, place.parent / "out", tokenizer=GOLDEN / "bert/vocab.txt")


def test_the_command(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*line: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["model", "import", *line])
        return int(left.value.code or 0), *capsys.readouterr()

    golden, out = str(GOLDEN / "bert/bert_model.ckpt"), str(tmp_path / "out")
    code, _, said = run(golden, "-o", out, "--length", "5")
    assert code == 0 and "93 variables of the optimiser" in said and "--from" in said
    assert json.loads((tmp_path / "out/recipe.json").read_text())["task"]["length"] == 5
    code, shown, _ = run(golden, "-o", out + "2", "--json")
    told = json.loads(shown)
    assert code == 0 and told["run"] == out + "2" and told["step"] == 0
    assert "already holds a run" in run(golden, "-o", out)[2]
    code, _, said = run(golden, "-o", out + "3", "--length", "8")
    assert code == 2 and "the model has 6 positions, not 8" in said
    code, _, said = run(str(place), "-o", out + "3")
    assert code == 1 and "hint:" in said
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    assert "holds other files" in run(golden, "-o", str(tmp_path / "other"))[2]
    assert "a file stands where" in run(golden, "-o", str(tmp_path / "other/file"))[2]


def test_one_goes_on_with_it(tmp_path: Path) -> None:
    """On a store of its vocabulary that has no segments: the same weights, and one step."""
    import_bert(GOLDEN / "bert", tmp_path / "bert")
    # What transformers calls BertForMaskedLM; its rows may be as short as this checkpoint's.
    export_model(tmp_path / "bert", tmp_path / "public")
    config = tmp_path / "public/config.json"
    config.write_text(config.read_text().replace("BertForPreTraining", "BertForMaskedLM"))
    import_model(tmp_path / "public", tmp_path / "run")
    (tmp_path / "a.txt").write_text("mov rax\ncall rax mov\nmov mov raxl\n" * 20)
    store, run = tmp_path / "store", tmp_path / "run"
    tokmill.build(
        "text",
        [tmp_path / "a.txt"],
        store,
        tokenizer=str(run),
        record="line",
        template="none",
        end_of_record="none",
    )
    value = {
        "data": {"train": str(store), "batch": 4},
        "optim": {"lr": 0.0},
        "run": {"start": str(run), "steps": 1, "device": "cpu"},
        "model": {"dropout": 0.1, "attention_dropout": 0.1},
    }
    tokmill.train(value, tmp_path / "more", quiet=True)
    before, after = (load_task(place).state_dict() for place in (run, tmp_path / "more"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
