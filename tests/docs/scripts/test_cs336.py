"""CS336: ids of both texts, flat files, and trainings from them, row by row."""

import json
import mmap
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page import Checks, Played, scripts_without_row, section
from tokenizers import Tokenizer

import tokmill
from tokenizers_peer import merges_and_ids
from toy import losses

SYSTEM, SEPARATOR = "CS336", "<|endoftext|>"
DRY = "tokmill train lm/train --dry-run --set dim=32 --set layers=1"
checks = Checks(SYSTEM)
CONFIG = {
    "vocab_size": 2000, "context_length": 48, "d_model": 32, "num_layers": 3, "num_heads": 4,
    "d_ff": 80, "rope_theta": 10000.0, "batch_size": 6, "max_learning_rate": 1e-3,
    "warmup_iters": 1, "max_iters": 2, "weight_decay": 0.02, "max_l2_norm": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def played(play: Any, corpus: Any) -> Played:
    texts = [text.strip() for text in corpus.texts]

    def put_inputs(folder: Path) -> None:
        # The first ends without a separator, the second with one.
        (folder / "train.txt").write_text(SEPARATOR.join(texts[:60]), "utf-8")
        (folder / "val.txt").write_text(SEPARATOR.join([*texts[60:80], ""]), "utf-8")
        (folder / "cs336.json").write_text(json.dumps(CONFIG))

    done: Played = play(SYSTEM, put_inputs)
    return done


def text(played: Played, name: str) -> str:
    return (played.folder / f"{name}.txt").read_bytes().decode()


def flat(path: Path) -> list[int]:
    """Return the ids of a file without a header."""
    ids: list[int] = np.memmap(path, dtype="uint16", mode="r").tolist()
    return ids


def recipe(run: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((run / "recipe.json").read_text())
    return kept


def test_the_commands_of_the_section_run(played: Played) -> None:
    assert not played.failed
    assert len(played.every) >= 17


def test_every_row_has_a_test() -> None:
    assert not checks.missing() and not scripts_without_row(SYSTEM)
    assert all(row.here for row in section(SYSTEM))


@checks("`preprocess_data.py`")
def test_ids_are_those_of_the_whole_files(played: Played) -> None:
    reference = Tokenizer.from_file(str(played.folder / "lm/tokenizer.json"))
    for name in ("train", "val"):
        wanted = reference.encode(text(played, name)).ids
        found = flat(played.folder / f"lm/{name}.bin")
        # The last document of the training text has no separator of its own.
        assert found == wanted + [0] * (name == "train")
        assert reference.id_to_token(0) == SEPARATOR
        store = tokmill.Store(played.folder / "lm" / name)
        assert np.concatenate([record["token"] for record in store]).tolist() == found


@checks("`preprocess_data.py`")
def test_the_tokenizer_knows_the_training_text_alone(played: Played) -> None:
    model = json.loads((played.folder / "lm/tokenizer.json").read_text("utf-8"))["model"]
    documents = text(played, "train").split(SEPARATOR)
    wanted = merges_and_ids(documents, 2000, [SEPARATOR])
    assert ([list(pair) for pair in model["merges"]], model["vocab"]) == (
        [list(pair) for pair in wanted[0]],
        wanted[1],
    )


@checks("`--train_file`")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--train_file", "--train"), ("--val_file", "--val"), ("--vocab_size", "--vocab-size"),
        ("--output_dir", "-o PATH"), ("--tokenizer_path", "--tokenizer"),
    ],
)  # fmt: skip
def test_old_names_of_options_lead_to_the_new_ones(played: Played, old: str, new: str) -> None:
    said = played.run(f"tokmill build text {old} x", code=2)
    assert old in said and new in said.replace(old, "")


@checks("`tinystories_train_tokens.bin`", "Checklist")
def test_files_have_the_names_of_the_document(played: Played, tmp_path: Path) -> None:
    data = played.folder / "data"
    for name in ("train", "val"):
        old = data / f"tinystories_{name}_tokens.bin"
        assert old.read_bytes() == (played.folder / f"lm/{name}.bin").read_bytes()
    assert (data / "tokenizer.json").is_file()
    for name in ("data", "lm"):
        assert "ok" in played.run(f"tokmill store validate {name}")
    # A file of the right name and size may be damaged.
    shutil.copytree(data, tmp_path / "data")
    content = bytearray((tmp_path / "data/tinystories_val_tokens.bin").read_bytes())
    content[99] ^= 1
    (tmp_path / "data/tinystories_val_tokens.bin").write_bytes(content)
    said = played.run(f"tokmill store validate {tmp_path}/data", code=1)
    assert "tinystories_val_tokens.bin" in said


@checks("`--vocab_size 50257`")
def test_without_a_size_the_vocabulary_is_that_of_gpt2(played: Played) -> None:
    learned = json.loads((played.folder / "default/learned.json").read_text())
    assert learned["vocab_size"] == 50257
    (said,) = [played.output[one] for one in played.every if one.endswith("-o default")]
    found = tokmill.Tokenizer.from_file(played.folder / "default/tokenizer.json").size
    assert found < 50257 and f"{found:,} ids, not 50,257" in said


@checks("`uint16`")
@pytest.mark.parametrize(("size", "width"), [(65_536, 2), (65_537, 4)])
def test_width_changes_above_65536_ids(
    played: Played, tmp_path: Path, size: int, width: int
) -> None:
    ids = np.asarray([0, size - 1, 5, 65_535], "<u4")
    ids.tofile(tmp_path / "ids.bin")
    played.run(
        f"tokmill build bin {tmp_path}/ids.bin --dtype u4 --vocab-size {size} -o {tmp_path}/s"
    )
    played.run(f"tokmill store export bin {tmp_path}/s -o {tmp_path}/out.bin")
    assert np.fromfile(tmp_path / "out.bin", f"<u{width}").tolist() == ids.tolist()
    wide = np.fromfile(played.folder / "wide.bin", "<u4").tolist()
    assert wide == flat(played.folder / "lm/train.bin")
    (said,) = [played.output[one] for one in played.every if "-o lm " in one]
    assert f"lm/train.bin: {len(wide):,} ids of uint16" in said


@checks("`np.memmap(", "Huge files")
def test_files_are_mapped(played: Played) -> None:
    mapped = played.value('numpy.memmap("lm/train.bin", dtype="uint16", mode="r")')
    assert isinstance(mapped, np.memmap) and mapped.nbytes == 2 * len(mapped)
    assert (played.folder / "lm/train.bin").stat().st_size == mapped.nbytes
    dataset = played.value('tokmill.TokenDataset("lm/train", 128)')
    for number in (0, 7, len(dataset) - 1):
        # Rows share a token, so that each of them is learned once.
        row = mapped[127 * number :][:128].tolist()
        item = dataset[number]
        assert item["input_ids"].tolist() == row + [0] * (128 - len(row))
        assert item["labels"][1 : len(row)].tolist() == row[1:]
    # A record of a store is a view of its file.
    view: Any = tokmill.Store(played.folder / "lm/train").record(0)["token"]
    while isinstance(view, np.ndarray | memoryview):
        view = view.obj if isinstance(view, memoryview) else view.base
    assert isinstance(view, mmap.mmap)


@checks("`--tokenizer_path`")
def test_a_tokenizer_that_is_there_is_taken(played: Played) -> None:
    for name in ("train.bin", "val.bin"):
        assert (played.folder / "again" / name).read_bytes() == (
            played.folder / "lm" / name
        ).read_bytes()
    assert not (played.folder / "again/tokenizer.json").exists()


@checks("`pretrain.py`")
def test_every_key_has_a_default(played: Played) -> None:
    plan = json.loads(played.run("tokmill train lm/train --dry-run --json"))
    # 0.8 million, and 128 for each id.
    assert round(plan["parameters"] - 128 * 2000, -5) == 800_000
    assert losses(played.folder / "run").keys() == {1, 2}


@checks("`--use_params`")
def test_a_configuration_of_the_course_makes_a_decoder(played: Played) -> None:
    kept = recipe(played.folder / "params")
    found = {
        "context_length": kept["task"]["length"], "d_model": kept["model"]["dim"],
        "num_layers": kept["model"]["layers"], "num_heads": kept["model"]["heads"],
        "d_ff": kept["model"]["hidden"], "rope_theta": kept["model"]["rope_theta"],
        "batch_size": kept["data"]["batch"], "max_learning_rate": kept["optim"]["lr"],
        "warmup_iters": kept["optim"]["warmup"], "max_iters": kept["run"]["steps"],
        "weight_decay": kept["optim"]["weight_decay"], "max_l2_norm": kept["optim"]["clip"],
        "vocab_size": CONFIG["vocab_size"],
    }  # fmt: skip
    assert found == CONFIG
    assert (kept["model"]["kind"], kept["task"]["kind"]) == ("decoder", "next_token")
    (said,) = [played.output[one] for one in played.every if one.endswith("-o params")]
    assert "not used: vocab_size: the vocabulary of the store says it" in said


@checks("`--use_params`")
def test_unknown_keys_are_errors(played: Played, tmp_path: Path) -> None:
    for key, hint in (("d_modell", "d_model"), ("min_lr", "optim.floor")):
        (tmp_path / "other.json").write_text(json.dumps({**CONFIG, key: 64}))
        said = played.run(f"tokmill train {tmp_path}/other.json --data lm/train --dry-run", code=2)
        assert key in said and hint in said.split("hint:")[1]


@checks("`--batch_size 32")
def test_options_of_a_training(played: Played) -> None:
    said = played.run("tokmill train --batch_size 32", code=2)
    assert "--set data.batch=VALUE" in said
    kept = recipe(played.folder / "options")
    assert (kept["data"]["batch"], kept["optim"]["lr"]) == (32, 3e-4)
    plan = played.run(f"{DRY} --json --set max_iters=10000")
    assert json.loads(plan)["steps"] == 10_000


@checks("Training samples", "Binary files load")
def test_batches_are_windows_of_the_file(played: Played) -> None:
    assert recipe(played.folder / "random")["task"]["rows"] == "stream"
    ids = flat(played.folder / "lm/train.bin")
    shown = bytes(np.asarray(ids, "<u2"))
    expression = 'tokmill.Feed(tokmill.Windows(tokmill.Store("lm/train"), 129), 16).batch(0)'
    rows = played.value(expression).columns["token"].tolist()
    places = [ids[start : start + 129] for start in range(0, len(ids) - 128, 129)]
    assert len(rows) == 16 and all(row in places for row in rows)
    # Rows of a stream begin anywhere, and those of a step are the same each time.
    feed = tokmill.Feed(tokmill.Stream(tokmill.Store(played.folder / "lm/train"), 64), 8, seed=1)
    drawn = feed.batch(3).columns["token"]
    assert (drawn == feed.batch(3).columns["token"]).all()
    starts = [shown.find(bytes(row.astype("<u2"))) // 2 for row in drawn]
    assert min(starts) >= 0 and len({start % 64 for start in starts}) > 4


@checks("Training loop")
def test_a_run_goes_on_to_the_same_weights(played: Played, tmp_path: Path) -> None:
    few = "--set dim=32 --set layers=1 --set checkpoint_every=2 --set warmup=1 -q"
    played.run(f"tokmill train lm/train -o {tmp_path}/whole --set max_iters=4 {few}")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for name in ("model", "checkpoints/step-00000004"):
        shutil.rmtree(tmp_path / "stopped" / name)
    played.run(f"tokmill train -o {tmp_path}/stopped")
    whole, stopped = (tmp_path / name / "model/model.safetensors" for name in ("whole", "stopped"))
    assert whole.read_bytes() == stopped.read_bytes()
    found = losses(tmp_path / "whole")
    assert losses(tmp_path / "stopped") == found


@checks("Monitoring")
def test_metrics_are_written_and_plotted(played: Played) -> None:
    assert losses(played.folder / "run", "val_loss")
    assert (played.folder / "loss.svg").read_text().count("<path") > 5
    played.run("tokmill train lm/train --dry-run --set 'run.track=[\"wandb\"]'")
    said = played.run("tokmill train lm/train --dry-run --set 'run.track=[\"wand\"]'", code=2)
    assert "wandb" in said


@checks("`.bin` files as the input")
def test_flat_files_become_stores(played: Played) -> None:
    store = tokmill.Store(played.folder / "imported")
    documents = [*text(played, "train").split(SEPARATOR)]
    assert store.records == len(documents)
    assert np.concatenate([record["token"] for record in store]).tolist() == flat(
        played.folder / "lm/train.bin"
    )
    said = played.run("tokmill train lm/train.bin -o nothing", code=2)
    assert "tokmill build bin lm/train.bin" in said


@checks("Deterministic")
def test_equal_inputs_give_equal_stores(played: Played) -> None:
    stores = [tokmill.Store(played.folder / name / "train") for name in ("lm", "data", "again")]
    assert len({store.fingerprint for store in stores}) == 1
    kept = json.loads((played.folder / "run/schema.json").read_text())
    assert stores[0].fingerprint in json.dumps(kept)


@checks("Do not tokenize")
def test_training_reads_no_text_and_builds_are_not_repeated(played: Played) -> None:
    said = played.run("tokmill train train.txt -o nothing", code=2)
    assert "tokmill build text train.txt" in said
    (command,) = [one for one in played.every if "-o lm " in one]
    assert played.run(command).count("nothing was left to do") == 2


@checks("TinyStories")
def test_what_is_not_there_is_said(played: Played) -> None:
    """Rows without a command say why."""
    bare = [row for row in section(SYSTEM) if not row.here.startswith("`")]
    assert [row.document.split()[0] for row in bare] == ["Do", "TinyStories"]
    assert all(row.notes for row in bare)
