"""ModernBERT against transformers' `ModernBertForMaskedLM` with the same weights.

Rows are padded, or stand in one row. Compared are hidden states, logits and losses of a head that
computes the masked positions alone, and the gradient of every weight.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tokmill.feed.feed import Batch
from tokmill.models.heads import Heads, Transform
from tokmill.models.model import Tensors
from tokmill.models.model_inputs import Inputs, predicted, taken
from tokmill.models.transformers.modernbert import ModernBert, ModernBertConfig
from tokmill.tasks.task import to_tensors
from tokmill.training.engines.tensors import write_tensors

VOCAB, LENGTH = 50, 40
LENGTHS = [40, 27, 5]
"""Of rows; padding is behind."""
MASKED = [[1, 2, 9, 39], [3, 16], []]

# In a process of its own: the warnings of transformers are not ours.
PEER = """
import json, pathlib, sys, torch
from safetensors.torch import load_file, save_file
from transformers import ModernBertConfig, ModernBertForMaskedLM
folder = pathlib.Path(sys.argv[1])
rows = load_file(folder / "rows.safetensors")
for name, keys in json.loads((folder / "cases.json").read_text()).items():
    config = ModernBertConfig(attn_implementation="eager", **keys)
    model = ModernBertForMaskedLM(config).float().eval()
    left = model.load_state_dict(load_file(folder / f"{name}-weights.safetensors"), strict=False)
    assert left.missing_keys == ["decoder.weight"] and not left.unexpected_keys, left
    out = model(
        input_ids=rows["ids"], attention_mask=rows["mask"], labels=rows["labels"],
    )
    out.loss.backward()
    hidden = model.model(input_ids=rows["ids"], attention_mask=rows["mask"]).last_hidden_state
    answer = {"hidden": hidden, "loss": out.loss.reshape(1), "logits": out.logits}
    answer |= {"gradient." + name: p.grad for name, p in model.named_parameters()}
    answer = {name: value.detach().contiguous().clone() for name, value in answer.items()}
    save_file(answer, folder / f"{name}-out.safetensors")
"""

OUTER = {
    "model.fields.embeddings.column_token": "model.embeddings.tok_embeddings",
    "model.embedding_norm": "model.embeddings.norm",
    "model.norm": "model.final_norm",
    "heads.transform.linear": "head.dense",
    "heads.transform.norm": "head.norm",
    "heads.biases": "decoder",
}
BLOCK = {
    "attention_norm": "attn_norm",
    "attention.o": "attn.Wo",
    "feed_forward_norm": "mlp_norm",
    "feed_forward.down": "mlp.Wo",
}


class Learner(nn.Module):
    """A ModernBERT with the head of its pre-training."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.model = ModernBert(config, Inputs({"token": VOCAB}))
        transform = Transform(config.dim, config.bias, config.norm_eps)
        self.heads = Heads(self.model, {"token": VOCAB}, tied=True, bias=True, transform=transform)


CASES = {
    "window": ModernBertConfig(dim=32, layers=4, heads=4, hidden=48, window=8),
    "one-layer": ModernBertConfig(dim=16, layers=1, heads=2, hidden=24),
    "wide-window": ModernBertConfig(
        dim=24, layers=3, heads=2, hidden=40, window=128, global_every=2, norm_eps=1e-3,
        rope_theta=500.0, local_theta=50.0,
    ),
    "biases": ModernBertConfig(dim=32, layers=5, heads=2, hidden=32, window=2, bias=True),
}  # fmt: skip


def keys_of(config: ModernBertConfig) -> dict[str, Any]:
    """What transformers calls the same."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "local_attention": config.window,
        "global_attn_every_n_layers": config.global_every,
        "global_rope_theta": config.rope_theta,
        "local_rope_theta": config.local_theta,
        "norm_eps": config.norm_eps,
        **dict.fromkeys(
            ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), config.bias
        ),
        "pad_token_id": None,
    }


def translated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our named tensors → theirs, where queries, keys and values are one, and gate and up."""
    theirs, parts = {}, dict[str, list[Tensor]]()
    for name, tensor in tensors.items():
        part, _, leaf = name.rpartition(".")
        if not part.startswith("model.blocks."):
            theirs[f"{OUTER[part]}.{'bias' if part == 'heads.biases' else leaf}"] = tensor
            continue
        _, _, number, rest = part.split(".", 3)
        place = f"model.layers.{number}"
        if rest in BLOCK:
            theirs[f"{place}.{BLOCK[rest]}.{leaf}"] = tensor
        else:
            fused = "attn.Wqkv" if rest.startswith("attention") else "mlp.Wi"
            parts.setdefault(f"{place}.{fused}.{leaf}", []).append(tensor)
    return theirs | {name: torch.cat(some) for name, some in parts.items()}


def learner(config: ModernBertConfig) -> Learner:
    """Return a case's model with weights that leave no gradient small."""
    torch.manual_seed(0)
    made = Learner(config)
    for name, parameter in made.named_parameters():
        scale = parameter.ndim == 1 and name.endswith("norm.weight")
        nn.init.normal_(parameter, mean=float(scale), std=0.2)
    return made.eval()


def rows() -> dict[str, np.ndarray]:
    """Ids and targets of rows that are padded."""
    random, shape = np.random.default_rng(0), (len(LENGTHS), LENGTH)
    inside = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    targets = np.full(shape, -1)
    for row, places in enumerate(MASKED):
        targets[row, places] = random.integers(0, VOCAB, len(places))
    ids = np.where(inside, random.integers(0, VOCAB, shape), 0)
    return {"ids": ids, "inside": inside, "targets": targets}


def batch_of(document: np.ndarray, ids: np.ndarray) -> Tensors:
    batch = Batch({"token": ids}, document.astype(np.int32), np.zeros(len(ids), np.uint64))
    return to_tensors(batch, torch.device("cpu"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers computes, of all cases."""
    folder, given = tmp_path_factory.mktemp("modernbert"), rows()
    tensors = {
        "ids": given["ids"],
        "mask": given["inside"].astype(np.int64),
        "labels": np.where(given["targets"] < 0, -100, given["targets"]),
    }
    write_tensors(
        folder / "rows.safetensors", {name: torch.from_numpy(x) for name, x in tensors.items()}
    )
    for name, config in CASES.items():
        weights = {key: p.detach() for key, p in learner(config).named_parameters()}
        write_tensors(folder / f"{name}-weights.safetensors", translated(weights))
    (folder / "cases.json").write_text(json.dumps({n: keys_of(c) for n, c in CASES.items()}))
    subprocess.run([sys.executable, "-c", PEER, folder], check=True)
    return folder


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_logits_are_theirs(name: str, masked: bool, answers: Path) -> None:
    theirs = load_file(answers / f"{name}-out.safetensors")
    given, made = rows(), learner(CASES[name])
    batch = batch_of(np.where(given["inside"], 0, -1), given["ids"])
    if masked:
        batch.cu_seqlens = None
    with torch.no_grad():
        hidden = made.model(batch)
        logits = made.heads.logits(made.model, hidden, "token")
    inside = torch.from_numpy(given["inside"])
    close(hidden[inside], theirs["hidden"][inside])
    close(logits[inside], theirs["logits"][inside])
    with torch.no_grad():
        whole = made.model(batch_of(np.zeros((1, LENGTH)), given["ids"][:1]))
    close(whole[0], theirs["hidden"][0])


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_are_the_padded_ones(name: str, answers: Path) -> None:
    """All three in one row: none sees another, also not through a window."""
    theirs = load_file(answers / f"{name}-out.safetensors")
    given, made = rows(), learner(CASES[name])
    document = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None]
    with torch.no_grad():
        hidden = made.model(batch_of(document, given["ids"][given["inside"]][None]))
    close(hidden[0], theirs["hidden"][torch.from_numpy(given["inside"])])


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_of_masked_positions_are_theirs(name: str, answers: Path) -> None:
    theirs = load_file(answers / f"{name}-out.safetensors")
    given, made = rows(), learner(CASES[name])
    batch = batch_of(np.where(given["inside"], 0, -1), given["ids"])
    places, targets = predicted({"token": given["targets"]})
    hidden = made.model(batch, torch.from_numpy(places))
    used = torch.from_numpy(places >= 0)
    close(hidden[used], taken(theirs["hidden"], torch.from_numpy(places))[used])
    wanted = {column: torch.from_numpy(target) for column, target in targets.items()}
    loss = made.heads.losses(made.model, hidden, wanted)["token"] / (given["targets"] >= 0).sum()
    loss.backward()
    torch.testing.assert_close(loss, theirs["loss"][0], atol=1e-6, rtol=1e-6)
    gradients = {key: p.grad for key, p in made.named_parameters() if p.grad is not None}
    mine = translated(gradients)
    kept = {key.removeprefix("gradient.") for key in theirs if key.startswith("gradient.")}
    assert mine.keys() == kept
    for key, value in mine.items():
        torch.testing.assert_close(value, theirs[f"gradient.{key}"], atol=1e-5, rtol=1e-4)
