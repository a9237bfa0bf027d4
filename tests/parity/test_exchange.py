"""Public checkpoints against transformers: what it wrote is read, and what we write it reads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from making import TOKENIZER
from tokmill.models.model import Tensors
from tokmill.models.public.public import GPT2_NAMES, LLAMA_NAMES, to_public
from tokmill.models.public.public_decoders import GPT2, Llama
from tokmill.tasks.next_token import NextToken
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.training.runs.exchange import export_model, import_model
from tokmill.training.runs.run import load_task

TEXT = "def main(): return 'Zwölf Boxkämpfer'<|endoftext|>\n"
VOCAB = 320
"""20 rows more than the tokenizer has ids."""

# In processes of their own: the warnings of transformers are not ours.
SEEING = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
folder = Path(sys.argv[1])
ids = torch.arange(48).reshape(2, 24) * 37 % 300

def see(place):
    model = AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager").float().eval()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    seen = {"ids": ids, "logits": out.logits, "loss": out.loss.reshape(1)}
    seen |= {"gradient." + name: weight.grad for name, weight in model.named_parameters()}
    seen = {name: value.detach().contiguous() for name, value in seen.items()}
    save_file(seen, place / "seen.safetensors")
    return model
"""

MAKING = """
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, bos_token_id=None, eos_token_id=0)
gpt2 = dict(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64)
models = {
    "gpt2": GPT2LMHeadModel(GPT2Config(**gpt2)),
    "gpt2-exact-gelu": GPT2LMHeadModel(GPT2Config(
        **gpt2, n_inner=48, activation_function="gelu", tie_word_embeddings=False)),
    "gpt2-old": GPT2LMHeadModel(GPT2Config(**gpt2)),
    "llama": LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, rope_theta=500.0)),
    "llama-wide": LlamaForCausalLM(LlamaConfig(**sizes, head_dim=16, tie_word_embeddings=True)),
    "llama-3": LlamaForCausalLM(LlamaConfig(**sizes, rope_theta=100.0, rope_scaling={
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16})),
    "llama-bias": LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)),
    "llama-shards": LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16(),
    "llama-half": LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1)).half(),
}
for name, model in models.items():
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.5 * (parameter.ndim == 1), std=0.2)
    model.save_pretrained(folder / name, max_shard_size="20KB" if "shards" in name else "1GB")
    see(folder / name)
# As the first checkpoints of GPT-2 are: names without the prefix, masks among the weights.
place = folder / "gpt2-old" / "model.safetensors"
old = {name.removeprefix("transformer."): value for name, value in load_file(place).items()}
old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
old |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
save_file(old, place)
"""

READING = """
from transformers import AutoTokenizer
for place in sorted(folder.iterdir()):
    model = see(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    said = {
        "ids": tokenizer(sys.argv[2])["input_ids"],
        "eos": [tokenizer.eos_token_id, model.generation_config.eos_token_id],
        "class": type(model).__name__,
    }
    (place / "said.json").write_text(json.dumps(said))
"""

NAMES = (
    "gpt2", "gpt2-exact-gelu", "gpt2-old",
    "llama", "llama-3", "llama-wide", "llama-bias", "llama-shards", "llama-half",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of transformers, with a tokenizer and logits beside them."""
    folder = tmp_path_factory.mktemp("made")
    subprocess.run([sys.executable, "-c", SEEING + MAKING, folder], check=True)
    for place in folder.iterdir():
        Tokenizer.from_file(TOKENIZER).save(place)
    return folder


@pytest.fixture(scope="module")
def runs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoints as runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        import_model(made / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def exported(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs as checkpoints, and what transformers makes of them."""
    folder = tmp_path_factory.mktemp("exported")
    for name in NAMES:
        export_model(runs / name, folder / name)
    subprocess.run([sys.executable, "-c", SEEING + READING, folder, TEXT], check=True)
    return folder


def logits_of(run: Path, ids: torch.Tensor) -> torch.Tensor:
    task = load_task(run)
    assert isinstance(task, NextToken)
    place = torch.arange(ids.shape[1]).expand(ids.shape)
    with torch.no_grad():
        hidden = task.model(Tensors({"token": ids}, torch.zeros_like(ids), place, whole=True))
        return task.logits(hidden)


@pytest.mark.parametrize("name", NAMES)
def test_an_imported_model_computes_the_same(name: str, made: Path, runs: Path) -> None:
    seen = load_file(made / name / "seen.safetensors")
    logits = logits_of(runs / name, seen["ids"])
    assert logits.shape == (2, 24, VOCAB) and logits.std() > 0.1
    torch.testing.assert_close(logits, seen["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_theirs(name: str, made: Path, runs: Path) -> None:
    seen = load_file(made / name / "seen.safetensors")
    task, ids = load_task(runs / name), seen["ids"]
    place = torch.arange(23).expand(2, 23)
    columns, targets = {"token": ids[:, :-1]}, {"token": ids[:, 1:].contiguous()}
    batch = Tensors(columns, torch.zeros_like(place), place, whole=True, targets=targets)
    loss = task(batch)[0] / place.numel()
    loss.backward()
    torch.testing.assert_close(loss.detach(), seen["loss"][0], atol=1e-6, rtol=1e-5)
    family, names = (GPT2, GPT2_NAMES) if name.startswith("gpt2") else (Llama, LLAMA_NAMES)
    (head,) = family.heads.values()
    gradients = {key: weight.grad for key, weight in task.named_parameters()}
    found = to_public(gradients, names, head, "token")
    assert {f"gradient.{key}" for key in found} == {key for key in seen if "gradient." in key}
    for key, gradient in found.items():
        expected = seen[f"gradient.{key}"]
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_computes_the_same(name: str, runs: Path, exported: Path) -> None:
    seen = load_file(exported / name / "seen.safetensors")
    logits = logits_of(runs / name, seen["ids"])
    torch.testing.assert_close(logits, seen["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_tokenizer_and_roles(name: str, exported: Path) -> None:
    said = json.loads((exported / name / "said.json").read_text())
    tokenizer = Tokenizer.from_file(TOKENIZER)
    assert said == {
        "ids": tokenizer.encode(TEXT),
        "eos": [0, 0],
        "class": "GPT2LMHeadModel" if name.startswith("gpt2") else "LlamaForCausalLM",
    }


@pytest.mark.parametrize("name", NAMES)
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
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, after[key]), key
