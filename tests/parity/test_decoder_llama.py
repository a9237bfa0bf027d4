"""The decoder against transformers' Llama with the same weights: logits, loss and gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tokmill.models.decoder import Decoder, DecoderConfig
from tokmill.models.model import Tensors
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.train.tensors import write_tensors

NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}

# In a process of its own: the warnings of transformers are not ours.
LLAMA = """
import sys, json, torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
folder, sizes = sys.argv[1], json.loads(sys.argv[2])
model = LlamaForCausalLM(LlamaConfig(attn_implementation="eager", **sizes)).float()
weights = load_file(folder + "/weights.safetensors")
model.load_state_dict(weights)
ids = load_file(folder + "/ids.safetensors")["ids"]
out = model(input_ids=ids, labels=ids)
out.loss.backward()
answer = {"logits": out.logits, "loss": out.loss.reshape(1)}
answer |= {"gradient." + name: p.grad for name, p in model.named_parameters()}
answer = {name: value.detach().contiguous().clone() for name, value in answer.items()}
save_file(answer, folder + "/out.safetensors")
"""


def llama_name(name: str) -> str:
    """Our parameter name → Llama's."""
    if name.startswith("model.blocks."):
        _, _, number, rest = name.split(".", 3)
        part = rest.removesuffix(".weight")
        return f"model.layers.{number}.{NAMES[part]}.weight"
    return {
        "model.fields.embeddings.column_token.weight": "model.embed_tokens.weight",
        "model.norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }[name]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equal_to_llama(kv_heads: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(dim=32, layers=2, heads=4, kv_heads=kv_heads, hidden=48)
    model = Decoder(config, {"token": 50})
    task = NextToken(NextTokenConfig(length=24, tied=False), model, {"token": 50})
    for parameter in task.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.ndim == 1, std=0.2)
    ids = torch.randint(0, 50, (2, 24))
    weights = {llama_name(name): p.detach() for name, p in task.named_parameters()}
    write_tensors(tmp_path / "weights.safetensors", weights)
    write_tensors(tmp_path / "ids.safetensors", {"ids": ids})
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    subprocess.run([sys.executable, "-c", LLAMA, tmp_path, json.dumps(sizes)], check=True)
    theirs = load_file(tmp_path / "out.safetensors")

    place = torch.arange(24).expand(2, 24)
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -1)], dim=1)
    batch = Tensors(
        {"token": ids}, torch.zeros_like(ids), place, whole=True, targets={"token": targets}
    )
    loss, _ = task(batch)
    (loss / 46).backward()
    torch.testing.assert_close(loss / 46, theirs["loss"][0], atol=1e-6, rtol=1e-6)
    logits = task.logits(model(batch))
    torch.testing.assert_close(logits, theirs["logits"], atol=1e-5, rtol=1e-5)
    for name, parameter in task.named_parameters():
        expected = theirs[f"gradient.{llama_name(name)}"]
        torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-4)
