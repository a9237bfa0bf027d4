"""A training loop of one's own around tokmill's parts: no store, no recipe, no run.

    python examples/own_loop.py corpus.txt toy.safetensors 200

The bytes of a text are the ids. The loop writes a checkpoint at its end, and goes on from one that
is there, to the same weights as without a stop. `tokmill train` does all of this and more; copy
from here where you want to write it yourself. docs/parts.md lists the parts.
"""

from __future__ import annotations

import math
import sys
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tokmill.models.heads import Heads
from tokmill.models.model import Inputs, Tensors
from tokmill.models.transformers.layers import linear_cross_entropy
from tokmill.models.transformers.transformer import Decoder, DecoderConfig
from tokmill.training.engines.optimisers.optim import clip_gradients, make_optimizer
from tokmill.training.engines.tensors import read_metadata, read_tensors, write_tensors
from tokmill.training.recipe.config import OptimConfig

COLUMN = "token"
MODEL, OPTIMIZER = "model.", "optimizer."


class LanguageModel(nn.Module):
    """A decoder and its head over `vocab_size` ids; `tied`: its embedding is its head.

    Its parameters have the names that they have in a run of the task `next_token` on a column
    `token`, so the weights of one load into the other.
    """

    def __init__(self, config: DecoderConfig, vocab_size: int, tied: bool = True) -> None:
        super().__init__()
        self.model = Decoder(config, Inputs({COLUMN: vocab_size}))
        self.heads = Heads(self.model, {COLUMN: vocab_size}, tied)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) from integer ids (B, T); each row is one document."""
        return self.heads.logits(self.model, self.hidden(ids), COLUMN)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of int64 targets (B, T), -1 where there is none.

        It is that of the logits, which are never there as a whole.
        """
        head = self.heads.weight(self.model, COLUMN)
        return linear_cross_entropy(self.hidden(ids), head, targets) / (targets >= 0).sum()

    def hidden(self, ids: Tensor) -> Tensor:
        """Return hidden states (B, T, D) from integer ids (B, T)."""
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        batch = Tensors({COLUMN: ids}, torch.zeros_like(ids), place, whole=True)
        states: Tensor = self.model(batch)
        return states


def cosine_schedule(step: int, max_lr: float, min_lr: float, warmup: int, steps: int) -> float:
    """Return the learning rate of a step, 0, 1, ….

    It rises linearly from 0 to `max_lr` at `warmup`, falls along half a cosine to `min_lr` at
    `steps`, and stays there. The schedule of `tokmill train` begins above 0
    (`tokmill.training.engines.optimisers.optim.learning_rate`).
    """
    if step < warmup:
        return max_lr * step / warmup
    if step >= steps:
        return min_lr
    share = (step - warmup) / (steps - warmup)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * share)) / 2


def sample_batch(
    array: np.ndarray[Any, Any],
    batch_size: int,
    context_length: int,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return windows that begin anywhere in an array of ids, and the ids that follow each.

    `array` is (n,), in memory or mapped, longer than a window; both results are int64
    (batch_size, context_length). `generator` is of the CPU, None: torch's own.
    """
    places = len(array) - context_length
    starts = torch.randint(places, (batch_size, 1), generator=generator).numpy()
    windows = torch.from_numpy(array[starts + np.arange(context_length + 1)].astype(np.int64))
    x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    return x.to(device), y.to(device)


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    target: Path | str | BufferedIOBase,
) -> None:
    """Write weights, what the optimiser keeps of them, and the step, to a path or an open file.

    The format is safetensors, with a digest of the file in it; nothing is pickled. Learning rates
    are not written: a schedule sets them.
    """
    tensors = {MODEL + name: value for name, value in model.state_dict().items()}
    for number, kept in optimizer.state_dict()["state"].items():
        tensors |= {f"{OPTIMIZER}{number}.{key}": value for key, value in kept.items()}
    where = Path(target) if isinstance(target, str) else target
    write_tensors(where, tensors, {"step": str(step)})


def load_checkpoint(
    source: Path | str | BufferedIOBase, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Put back what `save_checkpoint` wrote, and return the step.

    Raises `TokmillError` where the file is damaged.
    """
    where = Path(source) if isinstance(source, str) else source
    step, tensors = int(read_metadata(where)["step"]), read_tensors(where)
    weights: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(MODEL):
            weights[name.removeprefix(MODEL)] = tensor
        else:
            number, _, key = name.removeprefix(OPTIMIZER).partition(".")
            state.setdefault(int(number), {})[key] = tensor
    model.load_state_dict(weights)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return step


def train(corpus: Path, checkpoint: Path, steps: int, stop: int = 0) -> list[float]:
    """Train on the bytes of a file and return the loss of each step that was made.

    `stop`: after how many steps to end; 0: all.
    """
    ids = np.memmap(corpus, np.uint8, "r")
    torch.manual_seed(0)
    model = LanguageModel(DecoderConfig(dim=64, layers=2, heads=4), vocab_size=256)
    groups = model.model.param_groups(weight_decay=0.1) + model.heads.param_groups(0.1)
    optimizer = make_optimizer(groups, OptimConfig())
    first = load_checkpoint(checkpoint, model, optimizer) if checkpoint.exists() else 0
    losses = []
    for step in range(first, stop or steps):
        for group in optimizer.param_groups:
            group["lr"] = cosine_schedule(step, max_lr=3e-3, min_lr=3e-4, warmup=5, steps=steps)
        # The windows of a step follow from its number, so that a resume draws the same.
        generator = torch.Generator().manual_seed(step)
        x, y = sample_batch(ids, batch_size=8, context_length=64, generator=generator)
        loss = model.loss(x, y)
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save_checkpoint(model, optimizer, stop or steps, checkpoint)
    return losses


if __name__ == "__main__":
    if len(sys.argv) != 4 or not sys.argv[3].isdecimal():
        sys.exit("usage: own_loop.py CORPUS CHECKPOINT STEPS")
    made = train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    if made:
        print(f"{made[0]:.2f} → {made[-1]:.2f} nats a byte")
    else:
        print("the checkpoint has as many steps already")
