"""Public checkpoints of encoders against transformers: read, written, and what both compute."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tokmill.feed.feed import Batch
from tokmill.models.model import Tensors
from tokmill.models.public.public import to_public
from tokmill.tasks.task import to_tensors
from tokmill.training.engines.tensors import write_tensors
from tokmill.training.runs.exchange import export_model, import_model, public_parts
from tokmill.training.runs.run import load_task

WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "mov", "rax", "call", "##l", "##x",
    *(f"w{number}" for number in range(30)),
]  # fmt: skip
VOCAB, LENGTH = 48, 24
"""8 rows more than the tokenizer has ids."""
LENGTHS = [24, 17, 5]
MASKED = [[1, 2, 9, 23], [3, 16], []]
"""Positions of rows that are predicted."""

# In processes of their own: the warnings of transformers are not ours.
SEEING = """
import json, sys, torch, transformers
from pathlib import Path
from safetensors.torch import load_file, save_file
folder = Path(sys.argv[1])
rows = load_file(folder / "rows.safetensors")

def see(place, kind):
    model, told = getattr(transformers, kind).from_pretrained(
        place, attn_implementation="eager", output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"], (place, told)
    asked = {"input_ids": rows["ids"], "attention_mask": rows["mask"]}
    if kind.startswith("Bert"):
        asked["token_type_ids"] = rows["segment"]
    if "For" in kind:
        asked["labels"] = rows["labels"]
    if kind == "BertForPreTraining":
        asked["next_sentence_label"] = torch.tensor([1, 0, 1])
    out = model.float().eval()(**asked)
    names = ("prediction_logits", "seq_relationship_logits", "logits", "last_hidden_state")
    found = {name: out[name].contiguous() for name in names if name in out}
    if "For" in kind:
        out.loss.backward()
        found["loss"] = out.loss.reshape(1)
        found |= {"gradient." + name: p.grad for name, p in model.named_parameters()
            if p.grad is not None}
    found = {name: value.detach().clone() for name, value in found.items()}
    save_file(found, place / f"{kind}-seen.safetensors")
    return model, told
"""

MAKING = """
torch.manual_seed(0)
bert = dict(vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=40, max_position_embeddings=32)
distil = dict(vocab_size=48, dim=32, n_layers=2, n_heads=4, hidden_dim=40,
    max_position_embeddings=32)
t = transformers
models = {
    "bert": t.BertForPreTraining(t.BertConfig(**bert)),
    "bert-masked": t.BertForMaskedLM(t.BertConfig(**bert, hidden_act="gelu_new")),
    "bert-untied": t.BertForMaskedLM(t.BertConfig(**bert, tie_word_embeddings=False)),
    "bert-old": t.BertForPreTraining(t.BertConfig(**bert, layer_norm_eps=1e-6)),
    "distilbert": t.DistilBertForMaskedLM(t.DistilBertConfig(**distil)),
}
for name, model in models.items():
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.5 * (parameter.ndim == 1), std=0.2)
    model.save_pretrained(folder / name)
    see(folder / name, type(model).__name__)
# As bert-base-uncased is: more than its architecture says, names of TensorFlow, aliases.
place = folder / "bert-old"
old = load_file(place / "model.safetensors")
old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
old["bert.embeddings.position_ids"] = torch.arange(32)[None]
old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias",
    "LayerNorm.beta"): value for name, value in old.items()}
save_file(old, place / "model.safetensors", {"format": "pt"})
said = json.loads((place / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
(place / "config.json").write_text(json.dumps(said))
see(place, "BertForMaskedLM")
"""

READING = """
from transformers import AutoTokenizer
for place in sorted(path for path in folder.iterdir() if path.is_dir()):
    kind = json.loads((place / "config.json").read_text())["architectures"][0]
    model, told = see(place, kind)
    assert not told["unexpected_keys"], told
    if place.name in sys.argv[2].split():  # The same without its head.
        see(place, kind.partition("For")[0] + "Model")
    tokenizer = AutoTokenizer.from_pretrained(place)
    ids = tokenizer("Mov raxl")["input_ids"]
    said = {"ids": ids, "class": kind, "pad": tokenizer.pad_token_id}
    said["inputs"] = sorted(tokenizer("mov", "rax"))
    (place / "said.json").write_text(json.dumps(said))
"""

TASKS = {
    "bert": ("BertForPreTraining", "sentence_pair"),
    "bert-masked": ("BertForMaskedLM", "masked"),
    "bert-untied": ("BertForMaskedLM", "masked"),
    "bert-old": ("BertForMaskedLM", "masked"),
    "distilbert": ("DistilBertForMaskedLM", "masked"),
}
BARE = ("bert", "distilbert")
"""Of these transformers reads the backbone alone too; a BERT's has a pooler."""
NAMES = pytest.mark.parametrize("name", TASKS)


def rows() -> dict[str, Tensor]:
    """Ids, segments and what is not padding."""
    random, shape = np.random.default_rng(0), (len(LENGTHS), LENGTH)
    inside = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    ids = np.where(inside, random.integers(5, VOCAB, shape), 0)
    segment = (np.arange(LENGTH) >= 3) & inside
    made = {"ids": ids, "segment": segment.astype(np.int64), "mask": inside.astype(np.int64)}
    # Not as many in each row, and in one none.
    made["labels"] = np.full(shape, -100)
    for row, places in enumerate(MASKED):
        made["labels"][row, places] = random.integers(5, VOCAB, len(places))
    return {name: torch.from_numpy(value) for name, value in made.items()}


def tokenizer_of(place: Path) -> None:
    (place / "vocab.txt").write_text("\n".join(WORDS) + "\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of transformers, with a tokenizer and what they compute beside them."""
    folder = tmp_path_factory.mktemp("made")
    write_tensors(folder / "rows.safetensors", rows())
    subprocess.run([sys.executable, "-c", SEEING + MAKING, folder], check=True)
    for name in TASKS:
        tokenizer_of(folder / name)
    return folder


@pytest.fixture(scope="module")
def runs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoints as runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in TASKS:
        import_model(made / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def exported(made: Path, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs as checkpoints, and what transformers makes of them."""
    folder = tmp_path_factory.mktemp("exported")
    shutil.copy(made / "rows.safetensors", folder)
    for name in TASKS:
        export_model(runs / name, folder / name)
    subprocess.run([sys.executable, "-c", SEEING + READING, folder, " ".join(BARE)], check=True)
    return folder


def batch_of(task: Any) -> Tensors:
    given = rows()
    document = np.where(given["mask"].numpy() == 1, 0, -1).astype(np.int32)
    columns = {"token": given["ids"].numpy(), "segment": given["segment"].numpy()}
    read = {name: columns[name] for name in task.reads.embedded}
    return to_tensors(Batch(read, document, np.zeros(3, np.uint64)), torch.device("cpu"))


@torch.no_grad()
def outputs_of(run: Path) -> dict[str, Tensor]:
    """What the task of a run computes of the rows, under the names of transformers."""
    task: Any = load_task(run)
    hidden = task.model(batch_of(task))
    found = {"last_hidden_state": hidden}
    logits = task.heads.logits(task.model, hidden, "token")
    found["logits"] = found["prediction_logits"] = logits
    if task.config.kind == "sentence_pair":
        found["seq_relationship_logits"] = task.relation(task.pooler(hidden))
    return found


def compare(place: Path, kind: str, found: dict[str, Tensor]) -> None:
    seen = load_file(place / f"{kind}-seen.safetensors")
    inside = rows()["mask"].bool()
    names = [name for name in seen if name in found]
    assert names
    for name in names:
        ours, theirs = found[name], seen[name]
        if ours.ndim == 3:
            ours, theirs = ours[inside], theirs[inside]
        assert theirs.std() > 0.01
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=f"{place} {name}")


@NAMES
def test_an_imported_model_computes_the_same(name: str, made: Path, runs: Path) -> None:
    kind, task = TASKS[name]
    assert json.loads((runs / name / "recipe.json").read_text())["task"]["kind"] == task
    compare(made / name, kind, outputs_of(runs / name))


@NAMES
def test_loss_and_gradients_are_theirs(name: str, made: Path, runs: Path) -> None:
    seen = load_file(made / name / f"{TASKS[name][0]}-seen.safetensors")
    task: Any = load_task(runs / name)
    hidden, labels = task.model(batch_of(task)), rows()["labels"]
    targets = {"token": labels.masked_fill(labels < 0, -1)}
    loss = task.heads.losses(task.model, hidden, targets)["token"] / (labels >= 0).sum()
    if task.config.kind == "sentence_pair":
        loss = loss + F.cross_entropy(task.relation(task.pooler(hidden)), torch.tensor([1, 0, 1]))
    loss.backward()
    torch.testing.assert_close(loss.detach(), seen["loss"][0], atol=1e-6, rtol=1e-5)
    public, head, column = public_parts(task, "")
    gradients = {key: weight.grad for key, weight in task.named_parameters()}
    found = to_public(gradients, public.tensor_names, head, column)
    theirs = {key: value for key, value in seen.items() if key.startswith("gradient.")}
    assert theirs.keys() <= {f"gradient.{key}" for key in found}
    for key, value in theirs.items():
        mine = found[key.removeprefix("gradient.")]
        torch.testing.assert_close(mine, value, atol=1e-5, rtol=1e-4, msg=key)


@NAMES
def test_an_exported_model_computes_the_same(name: str, runs: Path, exported: Path) -> None:
    found = outputs_of(runs / name)
    kinds = [path.name.partition("-")[0] for path in (exported / name).glob("*-seen.safetensors")]
    assert TASKS[name][0] in kinds and len(kinds) == 1 + (name in BARE)
    for kind in kinds:
        compare(exported / name, kind, found)


@NAMES
def test_transformers_reads_tokenizer_and_segments(name: str, exported: Path) -> None:
    said = json.loads((exported / name / "said.json").read_text())
    assert said["ids"] == [2, 5, 6, 8, 3] and said["pad"] == 0
    assert said["class"] == TASKS[name][0]
    segments = ["token_type_ids"] if name.startswith("bert") else []
    assert said["inputs"] == ["attention_mask", "input_ids", *segments]


@NAMES
def test_export_and_import_are_the_identity(
    name: str, runs: Path, exported: Path, tmp_path: Path
) -> None:
    import_model(exported / name, tmp_path / "again")
    for file in ("recipe.json", "schema.json", "model/config.json", "vocab/tokenizer.json"):
        again = (tmp_path / "again" / file).read_bytes()
        assert again == (runs / name / file).read_bytes(), file
    before = load_file(runs / name / "model/model.safetensors")
    after = load_file(tmp_path / "again/model/model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key


def test_what_is_left_out_is_told(made: Path, tmp_path: Path) -> None:
    """bert-base-uncased says BertForMaskedLM, and has the other head and its pooler too."""
    run = import_model(made / "bert-old", tmp_path / "run")
    assert run.notes == ("left out: 4 tensors of other heads (bert.pooler.dense.bias, …)",)
    assert import_model(made / "bert", tmp_path / "other").notes == ()
