"""`tokmill model` and `tokmill train --from`, as a user meets them."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tokmill
from tokmill.store.store import Store
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.training.runs.run import load_task
from toy import recipe, text_store

Here = Callable[..., tuple[str, str]]
TEXTS = ["one two three four " * 4] * 12


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_store(tmp_path_factory.mktemp("model") / "store", TEXTS)


@pytest.fixture(scope="module")
def run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("model") / "run"
    tokmill.train(recipe(store, steps=20), out, quiet=True)
    return out


@pytest.fixture
def checkpoint(run: Path, here: Here, tmp_path: Path) -> Path:
    here("model", "export", run, "-o", "checkpoint")
    return tmp_path / "checkpoint"


def change(file: Path, **keys: object) -> None:
    """Change keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def test_export_and_import_keep_what_a_run_says(
    run: Path, checkpoint: Path, here: Here, tmp_path: Path
) -> None:
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors",
        "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    _, talk = here("model", "import", checkpoint, "-o", "again")
    assert "step 0" in talk and "--from again" in talk
    greedy = ["--prompt", "one two th", "--temperature", "0", "--tokens", "8"]
    said = [here("sample", place, *greedy)[0] for place in (run, "again")]
    assert said[0] == said[1]
    before, after = (load_task(place).state_dict() for place in (run, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "tokmill sample" in here("inspect", "again")[0]


def test_an_export_says_what_it_is(
    run: Path, store: Path, checkpoint: Path, here: Here, tmp_path: Path
) -> None:
    text = (checkpoint / "README.md").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for fact in (
        "license: unknown\n", f"fingerprint `{Store(store).fingerprint}`", "steps: 20",
        f"loss: {lines[-1]['loss']}\n", "task `next_token`",
    ):  # fmt: skip
        assert fact in text, text
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    with contextlib.chdir(checkpoint):
        exec(code, names)
    assert names["model"].num_parameters() == sum(
        weight.numel() for weight in load_task(run).parameters()
    )
    assert names["tokenizer"]("one two")["input_ids"]
    here("model", "export", run, "-o", "twice", "--license", "mit")
    other = (tmp_path / "twice/README.md").read_text()
    assert other == text.replace("license: unknown", "license: mit").replace("`unknown`", "`mit`")


def test_more_rows_than_ids(checkpoint: Path, store: Path, here: Here, tmp_path: Path) -> None:
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    weights = load_file(checkpoint / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    # What no id stands for would be drawn first.
    padding = 100 * table.mean(0).sign().expand(7, -1)
    weights["model.embed_tokens.weight"] = torch.cat([table, padding])
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    change(checkpoint / "config.json", vocab_size=264)
    here("model", "import", checkpoint, "-o", "padded")
    facts = json.loads((tmp_path / "padded/schema.json").read_text())
    assert facts["columns"] == {"token": 264} and facts["vocabularies"]["token"]["size"] == 257
    for seed in range(3):
        here("sample", "padded", "--tokens", "4", "--seed", seed, "--temperature", "9")
    here("train", store, "--from", "padded", "-o", "second", "--steps", "1", "--device", "cpu")
    assert load_task(tmp_path / "second").sizes == {"token": 264}
    here("model", "export", "second", "-o", "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 264


def test_without_a_tokenizer_ids_are_bare(checkpoint: Path, store: Path, here: Here) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (checkpoint / name).unlink()
    here("model", "import", checkpoint, "-o", "bare")
    assert "not learned how a text begins" in here("sample", "bare", code=2)[1]
    assert here("sample", "bare", "--ids", "1,2", "--tokens", "1")[0].strip()
    here("model", "export", "bare", "-o", "out")
    assert not Path("out/tokenizer.json").exists()
    # Of a store it is the same file as the run had.
    here("model", "import", checkpoint, "-o", "named", "--tokenizer", store, "--length", "8")
    assert here("sample", "named", "--tokens", "1")[0] is not None
    assert json.loads(Path("named/recipe.json").read_text())["task"]["length"] == 8


def test_config_names_the_tokens_with_a_role(checkpoint: Path, here: Here) -> None:
    tokens = {i: bytes([i]) for i in range(256)}
    specials = ["<|endoftext|>", "</s>"]
    Tokenizer(tokens, [], specials).save(checkpoint, {})
    change(checkpoint / "config.json", vocab_size=258, eos_token_id=[257, 256], pad_token_id=256)
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    weights = load_file(checkpoint / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([table, table[-1:]])
    save_file(weights, checkpoint / "model.safetensors")
    here("model", "import", checkpoint, "-o", "run2")
    facts = json.loads(Path("run2/schema.json").read_text())
    assert facts["vocabularies"]["token"]["roles"] == {"eot": 257, "pad": 256}
    here("model", "export", "run2", "-o", "out")
    names = json.loads(Path("out/special_tokens_map.json").read_text())
    assert names == {"eos_token": "</s>", "pad_token": "<|endoftext|>"}
    assert json.loads(Path("out/generation_config.json").read_text())["eos_token_id"] == [257, 256]


def test_which_weights_are_exported(run: Path, here: Here) -> None:
    shown = json.loads(here("model", "export", run, "-o", "a", "--at", "20", "--json")[0])
    assert "config.json" in shown["files"]
    assert "there are" in here("model", "export", run, "-o", "b", "--at", "7", code=1)[1]
    assert not Path("b").exists()


def damage(name: str) -> Callable[[Path], None]:
    return {
        "no config": lambda folder: (folder / "config.json").unlink(),
        "half a config": lambda folder: (folder / "config.json").write_text('{"model_type": '),
        "another model": lambda folder: change(folder / "config.json", architectures=["Bert"]),
        "a pickle": lambda folder: (folder / "model.safetensors").rename(
            folder / "pytorch_model.bin"
        ),
        "no weights": lambda folder: (folder / "model.safetensors").unlink(),
        "half the weights": lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:-9]
        ),
        "a shard is missing": lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}'),
        )[0],
        "an index without a map": lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors.index.json").write_text("{}"),
        )[0],
        "an index of nothing": lambda folder: (
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
        )[0],
        "too few ids": lambda folder: change(folder / "config.json", vocab_size=200),
        "another width": lambda folder: change(folder / "config.json", hidden_size=32),
    }[name]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("no config", 1, "there is no config.json"),
        ("half a config", 1, "cannot be read"),
        ("another model", 1, "known: GPT2LMHeadModel, LlamaForCausalLM, BertForPreTraining"),
        ("a pickle", 1, "safe_serialization=True"),
        ("no weights", 1, "save_pretrained"),
        ("half the weights", 1, "fetch the file again"),
        ("a shard is missing", 5, "/b"),
        ("an index without a map", 1, "weight_map"),
        ("an index of nothing", 1, "it names no file of weights"),
        ("too few ids", 1, "ids up to 256, the model 0 to 199"),
        ("another width", 1, "embed_tokens.weight"),
    ],
)
def test_broken_checkpoints(name: str, code: int, said: str, checkpoint: Path, here: Here) -> None:
    damage(name)(checkpoint)
    _, talk = here("model", "import", checkpoint, "-o", "run2", code=code)
    assert said in talk and "hint:" in talk
    assert not Path("run2").exists()


def test_a_folder_that_is_not_there(here: Here) -> None:
    _, talk = here("model", "import", "nowhere", "-o", "run2", code=1)
    assert "nowhere: there is no such folder" in talk and "hint:" in talk


def test_an_imported_run_is_begun_from(checkpoint: Path, here: Here) -> None:
    """It has no checkpoint that could be continued."""
    here("model", "import", checkpoint, "-o", "lmi")
    _, talk = here("model", "import", checkpoint, "-o", "lmi", code=1)
    assert "tokmill train STORE --from lmi -o NEW" in talk


def test_taken_folders(run: Path, checkpoint: Path, here: Here, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    for command in (("export", run), ("import", checkpoint)):
        _, talk = here("model", *command, "-o", "taken", code=1)
        assert "hint:" in talk and [p.name for p in (tmp_path / "taken").iterdir()] == ["notes.txt"]
    assert "already holds a run" in here("model", "import", checkpoint, "-o", run, code=1)[1]
