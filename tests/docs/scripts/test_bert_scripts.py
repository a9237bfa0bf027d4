"""BERT: tokenizer, checkpoint, walks through pairs, their text, settings and trainings."""

import json
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page import Checks, Played, scripts_without_row, section

import tokmill
from document_formulas import bert_rate
from tokmill.training.engines.tensors import read_tensors
from toy import losses
from x86_programs import compiles

SYSTEM = "BERT"
checks = Checks(SYSTEM)
GOLDEN = Path(__file__).parents[2] / "golden/tensorflow/bert"
LEVELS = ("O0", "O1", "O2")
SETTINGS = {
    "seed": 3431, "batch_size": 4, "lr": 2e-4, "n_epochs": 30, "warmup": 0.25, "save_steps": 2,
    "total_steps": 4,
}  # fmt: skip
MODEL = {
    "dim": 32, "dim_ff": 48, "n_layers": 1, "n_heads": 2, "p_drop_attn": 0.1, "p_drop_hidden": 0.1,
    "max_len": 128, "n_segments": 2, "vocab_size": 30522,
}  # fmt: skip
SOURCE = """
#include <stdio.h>
int twist(int x) { for (int i = 0; i < 9; i++) { x = x * 3 + i; if (x & 4) x ^= 7; } return x; }
int count(const char *s) {
    int n = 0;
    for (; *s; s++) n += *s == 'a' ? 1 : 2;
    puts("letters were counted");
    return n;
}
int main(int c, char **v) { printf("%d is the number\\n", twist(c) + count(v[0])); return 0; }
"""
LATER = ("tokmill train bert-base --data pairs --dry-run",)


@pytest.fixture(scope="module")
def played(play: Any, tmp_path_factory: pytest.TempPathFactory) -> Played:
    def put_inputs(folder: Path) -> None:
        made = tmp_path_factory.mktemp("compiled")
        for level in LEVELS:
            (folder / "versions" / level).mkdir(parents=True)
            for name in ("chroot", "other")[: 1 + (level == "O0")]:
                program = compiles(made, f"{name}-{level}", SOURCE, f"-{level}")
                shutil.copy(program, folder / "versions" / level / name)
        (folder / "uncased").mkdir()
        for path in GOLDEN.iterdir():
            if path.suffix != ".npz":
                shutil.copy(path, folder / "uncased")
        (folder / "config").mkdir()
        for name, value in (("pretrain", SETTINGS), ("bert_small", MODEL)):
            (folder / f"config/{name}.json").write_text(json.dumps(value))

    done: Played = play(SYSTEM, put_inputs, LATER)
    return done


def recipe(run: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((run / "recipe.json").read_text())
    return kept


def words_of(store: Path) -> list[list[str]]:
    """Return the words of each record, by the store's own list of words."""
    words = json.loads((store / "vocab/asm.json").read_text("utf-8"))["tokens"]
    return [[words[number] for number in record["asm"]] for record in tokmill.Store(store)]


def test_the_commands_of_the_section_run(played: Played) -> None:
    assert not played.failed
    assert len(played.every) >= 18


def test_every_row_has_a_test() -> None:
    assert not checks.missing() and not scripts_without_row(SYSTEM)
    assert all(row.here for row in section(SYSTEM))


@checks("`tokenization.py`")
def test_ids_are_those_of_transformers(played: Played) -> None:
    (command,) = [one for one in played.every if "tokenizer encode" in one]
    assert played.output[command].split() == ["7", "5", "6"]
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    lines = (played.folder / "bert/corpus.txt").read_text().lower()[:20_000]
    (played.folder / "lower.txt").write_text(lines)
    for vocabulary, lower, name in (("uncased", True, "lower"), ("bert", False, "bert/corpus")):
        file = played.folder / vocabulary / "vocab.txt"
        peer = transformers.BertTokenizer(vocab=str(file), do_lower_case=lower)
        shown = (played.folder / f"{name}.txt").read_text()[:20_000]
        wanted = peer.encode(shown, add_special_tokens=False)
        (played.folder / "shown.txt").write_text(shown)
        said = played.run(f"tokmill tokenizer encode -t {vocabulary}/vocab.txt shown.txt")
        assert len(set(wanted)) > 1 and [int(one) for one in said.split()] == wanted


def public(name: str) -> str:
    """Return the name in transformers of a variable of Google's BERT."""
    fixed = {
        "cls/predictions/output_bias": "cls.predictions.bias",
        "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
        "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
    }
    end = {"gamma": "weight", "beta": "bias", "kernel": "weight"}
    parts = name.replace("layer_", "layer.").split("/")
    last = end.get(parts[-1], parts[-1])
    dotted = ".".join([*parts[:-1], last])
    return fixed.get(name, dotted + ".weight" * dotted.endswith("_embeddings"))


@checks("`checkpoint.py`")
def test_a_checkpoint_of_tensorflow_comes_in_and_goes_out(played: Played, tmp_path: Path) -> None:
    with np.load(GOLDEN / "expected.npz") as expected:
        wanted = {name: expected[name] for name in expected.files if name != "global_step"}
    found = read_tensors(played.folder / "public/model.safetensors")
    assert found.keys() == {public(name) for name in wanted}
    for name, value in wanted.items():
        value = value.T if name.endswith("kernel") else value
        assert (found[public(name)].numpy() == value).all(), name
    shutil.copytree(played.folder / "uncased", tmp_path / "bad")
    (data,) = (tmp_path / "bad").glob("*.data-*")
    content = bytearray(data.read_bytes())
    content[10] ^= 1
    data.write_bytes(content)
    assert "checksum" in played.run(f"tokmill model import {tmp_path}/bad -o {tmp_path}/x", code=1)


@checks("`gendata.py`, `biname`", "More than 100")
def test_all_pairs_of_a_name(played: Played) -> None:
    for store, names in (
        ("pairs", [f"{level}/chroot" for level in LEVELS]),
        ("every", ["O0/other", *(f"{level}/chroot" for level in LEVELS)]),
    ):
        found = {(one["first"], one["second"]) for one in tokmill.Store(played.folder / store)}
        assert {frozenset(pair) for pair in found} == set(map(frozenset, combinations(names, 2)))
        assert len(found) == len(names) * (len(names) - 1) // 2
    assert 16 * 15 // 2 > 100


@checks("`gendata.py` for a single pair")
def test_walks_of_a_pair(played: Played) -> None:
    store = tokmill.Store(played.folder / "pair")
    assert {(one["first"], one["second"]) for one in store} == {("O0/chroot", "O2/chroot")}
    blocks = [int((one["border"] == 3).sum()) for one in store]
    assert max(blocks) == 4 and {int(one["walk"]) for one in store} >= {0, 1}
    # Other pairs of a store change none of its walks: those from O0 begin with a block of O0.
    assert all(
        one["side"][0] == (one["origin"] != "O0/chroot") for one in store if len(one["side"])
    )


@checks("`outputDir`")
def test_nothing_temporary_is_left(played: Played) -> None:
    stores = ("pairs", "pair", "every")
    assert all(list((played.folder / name / "shards").glob("*.safetensors")) for name in stores)
    assert not list(played.folder.rglob("*.tmp")) and not (played.folder / "pairs/tmp").exists()


@checks("`data` with sub-folders")
def test_a_pair_is_found_by_name(played: Played) -> None:
    pairs, of_o0 = (tokmill.Store(played.folder / name) for name in ("pairs", "of-O0"))
    wanted = [one["asm"].tolist() for one in pairs if one["first"].startswith("O0/")]
    assert [one["asm"].tolist() for one in of_o0] == wanted and len(wanted) < len(pairs)


@checks("Results of merging")
def test_the_merged_graph_is_counted(played: Played) -> None:
    notes = tokmill.Store(played.folder / "pairs").manifest.notes
    for figure in ("blocks", "edges", "imports of both programs", "strings of both programs",
                   "walks that cross from one program to the other"):  # fmt: skip
        assert notes[figure] > 0
    assert notes["pairs"] == 3


@checks("`dataprocess.py`")
def test_corpus_and_vocabulary(played: Played) -> None:
    words = json.loads((played.folder / "pairs/vocab/asm.json").read_text("utf-8"))["tokens"]
    assert (played.folder / "bert/vocab.txt").read_text("utf-8").split("\n") == [*words, ""]
    lines, before = [], None
    records = zip(tokmill.Store(played.folder / "pairs"), words_of(played.folder / "pairs"),
                  strict=True)  # fmt: skip
    for record, line in records:
        pair = (record["first"], record["second"])
        lines += [""] * (before not in (None, pair)) + [" ".join(line)]
        before = pair
    assert (played.folder / "bert/corpus.txt").read_text("utf-8").split("\n") == [*lines, ""]
    assert lines.count("") == 2


@checks("Corpora and vocabularies")
def test_ids_of_a_corpus_are_lines_of_its_vocabulary(played: Played) -> None:
    place = {
        word: number
        for number, word in enumerate((played.folder / "bert/vocab.txt").read_text().split("\n"))
    }
    lines = (played.folder / "bert/corpus.txt").read_text().splitlines()
    store = tokmill.Store(played.folder / "corpus")
    assert [record["token"].tolist() for record in store] == [
        [place[word] for word in line.split()] for line in lines if line
    ]


@checks("`config/pretrain.json`", "`pretrain.py`")
def test_settings_are_read(played: Played, tmp_path: Path) -> None:
    run = played.folder / "pretrained"
    kept = recipe(run)
    assert {
        "seed": kept["data"]["seed"], "batch_size": kept["data"]["batch"],
        "lr": kept["optim"]["lr"], "n_epochs": kept["run"]["epochs"],
        "warmup": kept["optim"]["warmup_share"], "save_steps": kept["run"]["checkpoint_every"],
        "total_steps": kept["run"]["steps"],
    } == SETTINGS  # fmt: skip
    assert kept["run"]["seed"] == SETTINGS["seed"] and kept["optim"]["kind"] == "bert_adam"
    assert {
        "dim": kept["model"]["dim"], "dim_ff": kept["model"]["hidden"],
        "n_layers": kept["model"]["layers"], "n_heads": kept["model"]["heads"],
        "p_drop_attn": kept["model"]["attention_dropout"],
        "p_drop_hidden": kept["model"]["dropout"], "max_len": kept["model"]["context"],
        "n_segments": 2, "vocab_size": 30522,
    } == MODEL  # fmt: skip
    assert kept["task"]["length"] == MODEL["max_len"]
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "step-00000002", "step-00000004",
    ]  # fmt: skip
    (dry,) = [one for one in played.every if "-o pretrained --dry-run" in one]
    assert "epochs of" in played.output[dry] and "s per step" in played.output[dry]
    for changed, said in (({"lrr": 1}, "lrr"), ({"lr": "much"}, "float")):
        (tmp_path / "other.json").write_text(json.dumps(SETTINGS | changed))
        command = f"tokmill train {tmp_path}/other.json --data pairs --dry-run"
        assert said in played.run(command, code=2)


@checks("`models.py`")
@pytest.mark.long
def test_sizes_have_names(played: Played) -> None:
    played.rest()
    assert not played.failed
    (said,) = [played.output[one] for one in LATER]
    assert "model.blocks.11.feed_forward.up.weight" in said and "3072 × 768" in said


@checks("`optim.py`")
def test_rates_are_those_of_bert_adam(played: Played, tmp_path: Path) -> None:
    """How it steps with them: tests/unit/training/test_bert_adam.py."""
    kept = recipe(played.folder / "adam")
    assert kept["optim"]["kind"] == "bert_adam" and kept["optim"]["exact_original"]
    few = "--set log_every=1 --set dim=32 --set layers=1 --set heads=2 --set max_len=32 -q"
    base = f"tokmill train pretrain --data pair --set max_iters=8 --set lr=1e-3 {few}"
    share = "--set optim.warmup_share=0.25"
    played.run(f"{base} {share} -o {tmp_path}/a --set optim.exact_original=true")
    rates = losses(tmp_path / "a", "lr")
    assert rates == pytest.approx(
        {step + 1: bert_rate(1e-3, step, 8, 0.25) for step in range(8)}, abs=1e-12
    )


@checks("`train.py`")
def test_a_run_is_evaluated(played: Played) -> None:
    (said,) = [played.output[one] for one in played.every if " eval " in one]
    for column in ("asm", "mne", "type", "reg", "rw", "eflag"):
        assert column in said
    assert "pair_accuracy" in said and "hidden token" in said


@checks("`utils.py`")
def test_seeds_and_devices_are_keys(played: Played) -> None:
    (said,) = [played.output[one] for one in played.every if "recipe schema" in one]
    for key in ("data.seed", "run.seed", "run.device", "optim.warmup_share"):
        assert f"\n{key} " in said


@checks("`classify.py`")
def test_a_run_is_fine_tuned(played: Played) -> None:
    labels = np.load(played.folder / "labels.npz")["label"]
    store = tokmill.Store(played.folder / "pairs")
    assert labels.tolist() == [int(one["origin"] == "O2/chroot") for one in store]
    (said,) = [played.output[one] for one in played.every if "train classify" in one]
    assert "begin anew: output.linear" in said
    assert recipe(played.folder / "tuned")["model"]["dim"] == MODEL["dim"]


@checks("`python gendata.py`")
def test_the_three_commands(played: Played) -> None:
    def first(words: str) -> int:
        return next(number for number, one in enumerate(played.every) if words in one)

    assert first("tokmill cfg") < first("build pairs") < first("train config/pretrain.json")
