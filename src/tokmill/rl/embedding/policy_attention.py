"""What an embedding looks at: the attention of its encoder, and names of the positions.

Shapes: N layers, B rows, H heads, T positions, K width of a head.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokmill.base.errors import TokmillError, UsageError
from tokmill.mlir.loops import legal
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.tokens import field_tokens, views
from tokmill.models.model import Tensors
from tokmill.models.transformers.attention import Attention, Seen, document_mask
from tokmill.models.transformers.transformer import Encoder
from tokmill.rl.embedding.distilbert import DistilBert
from tokmill.rl.embedding.embeddings import Embedding, Observation, batch
from tokmill.training.runs.run import load_task

NAMES = {number: name for name, number in field_tokens.VOCABULARY.items()}
"""Id → name of a token of a field."""


def attention_of(encoder: Encoder, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Return the attention (N, B, H, T, T) of an encoder, and its states (B, T, D).

    `attention[n, b, h, t, s]` is how much position t looks at s; a row adds up to 1.
    """
    weights: list[Tensor] = []
    mask = document_mask(tensors.document, Seen(encoder.causal))

    def shown(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        scores = q_BHTK @ k_BHTK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1])
        weights.append(scores.masked_fill(~mask, -torch.inf).softmax(dim=-1))
        return weights[-1] @ v_BHTK

    def before(part: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        # x, the rotary turn, and in place of the fast attention the one that keeps its weights.
        return (*given[:2], shown, *given[3:])

    hooks = [
        part.register_forward_pre_hook(before)
        for part in encoder.modules()
        if isinstance(part, Attention)
    ]
    try:
        with torch.no_grad():
            states = encoder(tensors)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(weights), states


def first_seen(run: Path, problem: Problem) -> tuple[Tensor, list[str]]:
    """Return `looked_at` for the policy of a run: a module's last operation before any action.

    Raises `TokmillError` for a run without a policy.
    """
    model = load_task(run).model
    embedding = getattr(model, "embedding", None)
    if not isinstance(embedding, Embedding):
        raise TokmillError(
            "the run has no policy of schedules",
            where=str(run),
            hint="`tokmill rl train` makes one",
        )
    config: Any = model.config
    view = views.make(config.view, config.sizes, [problem])
    operation = problem.operations[-1]
    shown = view(legal.begin(operation), views.producer_of(problem, operation))
    return looked_at(embedding, batch([shown]))


def looked_at(embedding: Embedding, observation: Observation) -> tuple[Tensor, list[str]]:
    """Return the attention of `[CLS]`, (N, H, P), and the names of the positions that it sees.

    Args:
        embedding: a `distilbert` on fields.
        observation: one row.

    Raises `UsageError` for another embedding, or tokens without names.
    """
    if not isinstance(embedding, DistilBert):
        raise UsageError(
            f"a policy with {type(embedding).__name__.lower()} has no attention to fields",
            hint="it is there with model_type distilbert",
        )
    if "segments" not in observation:
        raise UsageError(
            "its tokens are numbers of a vector, without names",
            hint='a distilbert with tokens = "fields" has names',
        )
    was = embedding.training
    embedding.eval()
    tensors = embedding.tensors(observation)
    weights, _ = attention_of(embedding.encoder, tensors)
    embedding.train(was)
    used = tensors.document[0] >= 0
    return weights[:, 0, :, 0, used], token_names(observation)


def token_names(observation: Observation) -> list[str]:
    """Return the names of a row's tokens; those of a loop have its number in front."""
    names = []
    for number, depth, there in zip(
        *(observation[name][0].tolist() for name in ("ids", "depths", "mask")), strict=True
    ):
        if there:
            name = re.sub(r"(bound|tile) ", r"\1 2^", NAMES[number])
            names.append(f"{depth}: {name}" if depth else name)
    return names
