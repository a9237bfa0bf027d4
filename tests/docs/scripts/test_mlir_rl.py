"""MLIR-RL: tokens of operations, embeddings, settings, and trainings of policies, row by row."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from page import Checks, Played, scripts_without_row, section

import made_times
from document_formulas import bucket_ids
from tokmill.mlir.loops import legal
from tokmill.mlir.measure import Measurements
from tokmill.mlir.modules import generators, problem
from tokmill.mlir.tokens import features, field_tokens, views
from tokmill.mlir.tokens.bucket_tokens import MLIROperationTokenizer
from tokmill.rl.embedding import embeddings
from toy import losses, weights

SYSTEM, FILE = "MLIR-RL", "config/config_distilbert.json"
LATER = (
    f"tokmill rl train {FILE} --dry-run --json --set bench_count=32 --set ppo_batch_size=16 "
    "--set value_batch_size=16",
)
checks = Checks(SYSTEM)
TESTING = {
    "model_type": "distilbert", "bench_count": 4, "ppo_batch_size": 8, "value_batch_size": 8,
    "lr": 0.0001, "benchmarks_folder_path": "data/test/code_files",
}  # fmt: skip
PRODUCTION = TESTING | {
    "bench_count": 32, "ppo_batch_size": 16, "value_batch_size": 16,
    "benchmarks_folder_path": "data/all/code_files",
}  # fmt: skip
MODEL = {
    "model_config": {
        "distilbert": {
            "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 6,
            "max_seq_length": 128, "vocab_size": 10000, "dropout": 0.1,
        }
    }
}  # fmt: skip
"""As the document prints them."""
SMALL = {"distilbert": {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}}


@pytest.fixture(scope="module", autouse=True)
def measured() -> Any:
    """Measure nothing: times follow from the actions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurements, "_measure", made_times.made)
        yield


@pytest.fixture(scope="module")
def played(play: Any, measured: None) -> Played:
    def put_inputs(folder: Path) -> None:
        (folder / "config").mkdir()
        (folder / FILE).write_text(json.dumps(TESTING | MODEL))
        for name in ("test", "all"):
            place = folder / "data" / name / "code_files"
            place.mkdir(parents=True)
            for number, line in enumerate(("matmul 8 8 8, relu", "add 8 16")):
                (place / f"{number}.mlir").write_text(generators.chain(line))

    done: Played = play(SYSTEM, put_inputs, LATER)
    return done


def recipe(run: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((run / "recipe.json").read_text())
    return kept


def said(played: Played, words: str) -> str:
    """Return what the first command with these words wrote."""
    return next(played.output[one] for one in played.every if words in one)


def vectors(*shape: int) -> np.ndarray:
    """Return numbers in and out of [0, 1], some of them not finite."""
    random = np.random.default_rng(len(shape))
    found = random.uniform(-0.5, 1.5, shape)
    found.flat[random.choice(found.size, 9, replace=False)] = [math.nan, math.inf, -math.inf] * 3
    return found


def test_the_commands_of_the_section_run(played: Played) -> None:
    assert not played.failed
    assert len(played.every) >= 28


def test_every_row_has_a_test() -> None:
    assert not checks.missing() and not scripts_without_row(SYSTEM)
    assert all(row.here for row in section(SYSTEM))


@checks("`distilbert_tokenizer.py`", "`[CLS] consumer", "Attention mask", "Overhead")
def test_sequences_of_a_batch(played: Played) -> None:
    (call,) = [
        one for one in played.every if one.startswith("MLIR") and "vocab_size=10000)(" in one
    ]
    ids, mask = played.value(call)
    assert ids.shape == mask.shape == (8, 128) and mask.sum(1).tolist() == [102] * 8
    consumers, producers = vectors(8, 50), vectors(8, 50)[::-1]
    tokenizer = MLIROperationTokenizer(50, max_seq_length=128, vocab_size=10_000)
    ids, mask = tokenizer(consumers, producers)
    for row in range(8):
        inner = bucket_ids(consumers[row]) + bucket_ids(producers[row])
        assert ids[row].tolist() == [0, *inner, 1, *[2] * 26]
        assert mask[row].tolist() == [1] * 102 + [0] * 26
        assert (tokenizer(consumers[row], producers[row]).ids[0] == ids[row]).all()


@checks("`4 + (feature_idx", "NaN and infinities")
def test_ids_are_those_of_the_formula(played: Played) -> None:
    (call,) = [one for one in played.every if "linspace" in one]
    assert played.value(call).tolist() == bucket_ids(np.linspace(-0.5, 1.5, 250))
    given = vectors(250)
    for repeated in (True, False):
        made = MLIROperationTokenizer(250, seed_compatible=repeated)
        assert made.tokens(given).tolist() == bucket_ids(given, repeated)
    (call,) = [one for one in played.every if "numpy.nan" in one]
    assert played.value(call).tolist() == [3, 3, 4 + 2 * 50, 4 + 3 * 50 + 49]


@checks("Memory", "PyTorch compatible")
def test_arrays_of_torch(played: Played) -> None:
    (call,) = [one for one in played.every if one.endswith(".ids.nbytes")]
    assert played.value(call) == 16 * 128 * 8
    (call,) = [one for one in played.every if one.endswith(".ids.dtype")]
    assert played.value(call) == np.int64
    ids, mask = MLIROperationTokenizer(50)(np.zeros((3, 50), np.float32), np.ones((3, 50)))
    tensor = torch.from_numpy(ids)
    assert tensor.data_ptr() == ids.ctypes.data and not tensor.requires_grad
    assert ids.nbytes == mask.nbytes
    assert torch.nn.Embedding(10_000, 8)(tensor).shape == (3, 102, 8)


@checks("Adjustable vocabulary")
def test_what_is_cut_is_counted(played: Played) -> None:
    (call,) = [one for one in played.every if one.endswith(".coverage()")]
    found = played.value(call)
    # [CLS] is one of the 128; 100 of the 127 numbers have ids, and 27 have those of others.
    assert (found.numbers, found.kept, found.distinct) == (2 * 2051, 127, 100 - 27)


@checks("`OpFeatures`")
def test_vectors_of_operations(played: Played) -> None:
    (call,) = [one for one in played.every if one.startswith("features.vector(")]
    found = played.value(call).tolist()
    kinds = len(features.KINDS)
    assert sum(found[:kinds]) == 1 and found[kinds : kinds + 5] == [64, 1000, 3, 0, 0]


@checks("`rl_autoschedular/model.py`")
def test_an_embedding_is_cls_and_history() -> None:
    """Rows of 768 numbers and the history, for the document's sizes and its tokenizer."""
    problems = [problem.of_line(line) for line in ("matmul 64 32 16", "add 8 8")]
    sizes = features.Sizes.of(each for one in problems for each in one.operations)
    buckets = {"tokens": "buckets", "truncate": True, "seed_compatible": True, "dropout": 0.0}
    small = {"num_hidden_layers": 1}
    config = {"distilbert": MODEL["model_config"]["distilbert"] | buckets | small}
    view = views.make(embeddings.view_of("distilbert", config), sizes, problems)
    states = [legal.begin(each) for one in problems for each in one.operations]
    seen = [view(states[number % len(states)], None) for number in range(8)]
    made = embeddings.make("distilbert", view.spaces(), config).eval()
    history = seen[0]["history"]
    with torch.no_grad():
        out = made(embeddings.batch(seen))
    assert out.shape == (8, 768 + len(history)) and made.output_size == 768 + len(history)
    assert (out[3, 768:].numpy() == seen[3]["history"]).all()


@checks("`bin/train.py`", "`config/config_distilbert.json`", "`CONFIG_FILE_PATH")
def test_a_dry_run_of_the_file_as_it_is(played: Played) -> None:
    output = said(played, "--dry-run")
    for fact in ("operation features", "history features", "evaluations a step", "memory, about"):
        assert f"\n{fact} " in output
    for key in ("vocab_size = 10000", "dropout = 0.1"):
        assert f"model_config.distilbert.{key} has no effect" in output
    assert "max_seq_length =" not in output
    assert "256 × 2120" in output  # 768, 1,280 of the history, 72 of masks
    short = "--set model.model_config.distilbert.max_seq_length=20"
    refused = played.run(f"tokmill rl train {FILE} --dry-run {short}", code=2)
    assert "a sequence can have 68 tokens" in refused and "hint: 68 keeps all" in refused
    run = played.folder / "distilbert"
    assert "model.observes.encoder.blocks.0.attention.q.weight" in weights(run)
    assert recipe(run)["model"]["model_config"]["distilbert"]["max_seq_length"] == 128
    assert recipe(run)["task"]["benchmarks_folder_path"] == str(
        played.folder / "data/test/code_files"
    )


@checks("`config/config_distilbert.json`")
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["tokens=buckets"], "max_seq_length = 128 keeps 127 of 694 numbers"),
        (["tokens=buckets", "truncate=true"], "vocab_size = 10000 has no room for 17,354 ids"),
        (["tokens=buckets", "truncate=true", "seed_compatible=true"], "127 of 694 numbers (18.3%)"),
    ],
)
def test_the_tokenizer_of_the_document_must_be_asked_for(
    played: Played, keys: list[str], wanted: str
) -> None:
    sets = " ".join(f"--set model.model_config.distilbert.{key}" for key in keys)
    few = "--set model.model_config.distilbert.num_hidden_layers=1"
    code = 0 if len(keys) == 3 else 2
    assert wanted in played.run(f"tokmill rl train {FILE} --dry-run {few} {sets}", code)


@checks('`"model_type": "lstm"`')
def test_the_model_is_one_word(played: Played) -> None:
    assert "model.observes.lstm.weight_ih_l0" in weights(played.folder / "lstm")
    for kind in ("lstm", "distilbert"):
        kept = recipe(played.folder / kind)["model"]
        assert kept["model_type"] == kind and losses(played.folder / kind, "evaluations") == {1: 4}
        # What belongs to the other model is kept.
        assert kept["model_config"]["distilbert"]["vocab_size"] == 10_000
    output = said(played, "-o lstm ")
    assert "vocab_size" not in output  # what belongs to the other model is not spoken of
    refused = played.run(f"tokmill rl train {FILE} --dry-run --set model_type=gru", code=2)
    assert all(kind in refused for kind in ("distilbert", "loop_transformer", "lstm"))


@checks("Small data set", '"Out of memory"')
def test_the_sizes_of_the_document(played: Played) -> None:
    rows = [line.rsplit("  ", 1) for line in said(played, "--dry-run").splitlines()]
    facts = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
    # 42.5 M in the six layers, as published; tables, the policy and its heads are on top. The
    # 66 M of DistilBERT are with its 30,522 words.
    names = [name for name in facts if ".blocks." in name]
    assert {name.split(".blocks.")[1].split(".")[0] for name in names} == set("012345")
    assert 42_500_000 < int(facts["parameters"].replace(",", "")) < 45_000_000
    assert round((66_000_000 - 30_522 * 768) / 1e6, 1) == 42.6
    assert (facts["modules to learn from"], facts["tokens a sequence"]) == ("2", "128")
    assert facts["evaluations a step"] == str(TESTING["bench_count"])
    assert facts["moves an update"] == str(TESTING["ppo_batch_size"])
    kept = recipe(played.folder / "distilbert")
    assert (kept["task"]["value_batch_size"], kept["optim"]["lr"]) == (8, 0.0001)


@checks("Full data set")
@pytest.mark.long
def test_the_full_data_set(played: Played) -> None:
    played.rest()
    assert not played.failed
    (output,) = (played.output[one] for one in LATER)
    found = json.loads(output[output.index("{\n") : output.rindex("}") + 1])
    facts = found["environment"]
    assert facts["modules_to_learn_from"] == 2 and facts["tokens_a_sequence"] == 128
    assert facts["evaluations_a_step"] == PRODUCTION["bench_count"]
    assert facts["moves_an_update"] == PRODUCTION["ppo_batch_size"]


@checks("Small data set")
def test_other_keys_of_the_file_are_noted(played: Played, tmp_path: Path) -> None:
    more = {"num_tile_sizes": 7}
    (tmp_path / "more.json").write_text(json.dumps(TESTING | {"model_config": SMALL} | more))
    assert "num_tile_sizes" in played.run(f"tokmill rl train {tmp_path}/more.json --dry-run")


@checks("`test_distilbert_data.py`", "`test_distilbert.py`")
def test_the_suites_are_there(played: Played, repository: Path) -> None:
    (row,) = [row for row in section(SYSTEM) if "test_distilbert_data.py" in row.document]
    source = (repository / row.here.strip("`")).read_text("utf-8")
    assert source.count("\ndef test_") >= 7
    assert "matmul 8 8 8" in said(played, "rl eval")
    assert "ok" in played.run("tokmill doctor")


@checks("`MODEL_ARCHITECTURE_COMPARISON.py`", '"Different results')
def test_runs_are_compared(played: Played, repository: Path) -> None:
    output = said(played, "tokmill compare")
    assert "lstm" in output and "distilbert" in output and "parameters" in output
    assert "best_speedup" in said(played, "--metric best_speedup")
    figures = (repository / "benchmarks/RESULTS.md").read_text("utf-8")
    assert "| embedding | weights | tokens | observations | forward |" in figures


@checks('"Sequences too long"')
def test_a_sequence_that_is_too_long(played: Played) -> None:
    buckets = "--set model.model_config.distilbert.tokens=buckets"
    refused = played.run(f"tokmill rl train {FILE} --dry-run {buckets}", code=2)
    assert "hint: 696 keeps all" in refused


@checks("Monitor")
def test_plots(played: Played) -> None:
    assert (played.folder / "entropy.svg").stat().st_size > 1000
    assert {1} == losses(played.folder / "distilbert", "entropy").keys()


@checks("`distilbert_quickref.sh`")
def test_help(played: Played) -> None:
    assert "--dry-run" in said(played, "rl train --help")


@checks("Future: BPE", "Future: embeddings")
def test_what_the_document_wants_to_have(played: Played) -> None:
    vocabulary = json.loads((played.folder / "mlir-bpe/tokenizer.json").read_text())["model"]
    assert vocabulary["type"] == "BPE" and len(vocabulary["merges"]) > 50
    # The encoder of the policy is that of the run, and has learned for a step.
    before, after = (weights(played.folder / name) for name in ("encoder", "informed"))
    name = "encoder.blocks.0.attention.q.weight"
    (first,) = [
        value for key, value in before.items() if key.endswith(name.removeprefix("encoder."))
    ]
    assert torch.allclose(first, after[f"model.observes.{name}"], atol=1e-2)


@checks("Future: sequences", "Future: features")
def test_sequences_have_the_length_of_their_operation(played: Played) -> None:
    ops = [problem.of_line(line).operations[0] for line in ("matmul 8 8 8", "add 8")]
    found = [field_tokens.tokens(legal.begin(each), None) for each in ops]
    lengths = [len(each.ids) for each in found]
    assert lengths[0] > lengths[1]
    made, mask = field_tokens.padded(found)
    assert made.ids.shape == (2, lengths[0]) and mask.sum(1).tolist() == lengths
    assert recipe(played.folder / "loops")["model"]["model_type"] == "loop_transformer"
