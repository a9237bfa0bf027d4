"""The same weights in a decoder of transformers: logits, loss and gradients to compare with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from tokmill.models.model import Tensors
from tokmill.models.model_inputs import Inputs
from tokmill.models.transformers.decoder import Decoder, DecoderConfig
from tokmill.tasks.next_token import NextToken, NextTokenConfig
from tokmill.training.engines.tensors import write_tensors

VOCAB, ROWS, LENGTH = 50, 2, 24

# In a process of its own: the warnings of transformers are not ours.
PEER = """
import json, pathlib, sys, torch, transformers
from safetensors.torch import load_file, save_file
folder = pathlib.Path(sys.argv[1])
for name, (kind, keys) in json.loads((folder / "cases.json").read_text()).items():
    config = getattr(transformers, kind + "Config")(attn_implementation="eager", **keys)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, kind + head)(config).float().eval()
    weights = load_file(folder / f"{name}-weights.safetensors")
    left = model.load_state_dict(weights, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert left.missing_keys == tied and not left.unexpected_keys, left
    ids = load_file(folder / "ids.safetensors")["ids"]
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    answer = {"logits": out.logits, "loss": out.loss.reshape(1)}
    answer |= {"gradient." + name: p.grad for name, p in model.named_parameters()}
    answer = {name: value.detach().contiguous().clone() for name, value in answer.items()}
    save_file(answer, folder / f"{name}-out.safetensors")
"""


class Case(NamedTuple):
    """Our configuration, theirs, and whether the head is the embedding."""

    config: DecoderConfig
    keys: dict[str, Any]
    tied: bool


def make_task(case: Case) -> NextToken:
    """Return the case's model in its task, with weights that leave no gradient small."""
    torch.manual_seed(0)
    model = Decoder(case.config, Inputs({"token": VOCAB}))
    config = NextTokenConfig(length=LENGTH, tied=case.tied)
    task = NextToken(config, model, Inputs({"token": VOCAB}))
    for name, parameter in task.named_parameters():
        scale = parameter.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(scale), std=0.2)
    return task


def ask(
    kind: str,
    cases: Mapping[str, Case],
    translated: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    folder: Path,
) -> None:
    """Let transformers compute all cases in one process.

    `kind` is GPT2 or Llama; `translated` turns our named tensors, weights or gradients, into
    theirs.
    """
    torch.manual_seed(1)
    write_tensors(folder / "ids.safetensors", {"ids": torch.randint(0, VOCAB, (ROWS, LENGTH))})
    for name, case in cases.items():
        weights = {key: p.detach() for key, p in make_task(case).named_parameters()}
        write_tensors(folder / f"{name}-weights.safetensors", translated(weights))
    asked = {name: [kind, case.keys] for name, case in cases.items()}
    (folder / "cases.json").write_text(json.dumps(asked))
    subprocess.run([sys.executable, "-c", PEER, folder], check=True)


def compare(
    name: str,
    case: Case,
    translated: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    folder: Path,
) -> None:
    """Compare logits, loss and the gradient of every weight of a case."""
    ids = load_file(folder / "ids.safetensors")["ids"]
    theirs = load_file(folder / f"{name}-out.safetensors")
    task = make_task(case)
    place = torch.arange(LENGTH).expand(ROWS, LENGTH)
    targets = torch.cat([ids[:, 1:], torch.full((ROWS, 1), -1)], dim=1)
    batch = Tensors(
        {"token": ids}, torch.zeros_like(ids), place, whole=True, targets={"token": targets}
    )
    loss, _ = task(batch)
    mean = loss / (ROWS * (LENGTH - 1))
    mean.backward()
    torch.testing.assert_close(mean, theirs["loss"][0], atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        logits = task.logits(task.model(batch))
    torch.testing.assert_close(logits, theirs["logits"], atol=1e-5, rtol=1e-5)
    gradients = {key: p.grad for key, p in task.named_parameters() if p.grad is not None}
    mine = translated(gradients)
    assert mine.keys() == {key.removeprefix("gradient.") for key in theirs} - {"loss", "logits"}
    for key, value in mine.items():
        torch.testing.assert_close(value, theirs[f"gradient.{key}"], atol=1e-5, rtol=1e-5)
