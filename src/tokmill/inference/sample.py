"""Continue a prompt with a trained model; everything needed lies in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokmill import plugins
from tokmill.errors import TokmillError, UsageError
from tokmill.models.model import Tensors
from tokmill.store.manifest import read_json
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.next_token import NextToken
from tokmill.train.engine import pick_device
from tokmill.train.run import FACTS, VOCAB, Facts, load_task


def sample(
    run: Path | str,
    prompt: str = "",
    tokens: int = 100,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    at: str = "",
) -> str:
    """Return how the model of a run continues a prompt (without the prompt).

    Args:
        run: folder of a run of the task `next_token` on text.
        prompt: text; names of special tokens in it are text like any other.
        tokens: most tokens to make; the end of a document ends earlier.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from so many likeliest tokens; 0: from all.
        top_p: of these, draw from the fewest that are this likely together.
        seed: of the draws; equal seeds give equal texts.
        device: cpu, cuda, or auto.
        at: the weights: "best", a step, or "last".
    """
    task = load_task(run, at)
    if not isinstance(task, NextToken) or len(task.sizes) > 1:
        raise TokmillError(
            "only runs that predict the next token of one column can be sampled", where=str(run)
        )
    vocabulary, tokenizer = load_tokenizer(Path(run), task.column)
    ids = tokenizer.encode(prompt, specials="plain")
    if not ids:
        start = vocabulary.roles.get("bos", vocabulary.roles.get("eot"))
        if start is None:
            raise UsageError(
                "the vocabulary has no token that begins a text", hint="give a --prompt"
            )
        ids = [start]
    made = continue_ids(
        task.to(pick_device(device)),
        ids,
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        size=vocabulary.size,
        stop=vocabulary.roles.get("eot"),
    )
    return str(tokenizer.decode(made))


def load_tokenizer(run: Path, column: str) -> tuple[Vocabulary, Any]:
    """Return the vocabulary of a run's column and the tokenizer that its file holds."""
    facts: Facts = read_json(run / FACTS, Facts)
    name = facts.schema[column].vocab
    if name not in facts.vocabularies:
        raise TokmillError(
            f"the run knows no vocabulary for the column {column!r}",
            where=str(run),
            hint="its store or its checkpoint was imported without a tokenizer",
        )
    vocabulary = facts.vocabularies[name]
    tokenizers = plugins.require("tokmill.text.tokenizer")
    return vocabulary, tokenizers.Tokenizer.from_file(run / VOCAB / vocabulary.file)


@torch.no_grad()
def continue_ids(
    task: NextToken,
    ids: Sequence[int],
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    size: int | None = None,
    stop: int | None = None,
) -> list[int]:
    """Return at most so many ids that follow `ids`, up to and without `stop`.

    The model sees the last `task.length` ids: as far back as it was trained. Only ids below `size`
    are drawn: a model may have more rows than its vocabulary has ids.
    """
    if temperature < 0 or top_k < 0 or tokens < 0:
        raise UsageError("temperature, top-k and tokens cannot be negative")
    if not 0 < top_p <= 1:
        raise UsageError(f"top-p is a share above 0 and up to 1, not {top_p}")
    task.eval()
    device = next(task.parameters()).device
    # Draws are made on the CPU, so that every device makes the same ones.
    generator = torch.Generator().manual_seed(seed)
    made: list[int] = []
    while len(made) < tokens:
        seen = torch.tensor([[*ids, *made][-task.length :]], device=device)
        place = torch.arange(seen.shape[1], device=device)[None]
        batch = Tensors({task.column: seen}, torch.zeros_like(seen), place, whole=True)
        logits = task.logits(task.model(batch)[:, -1])[0, :size].float().cpu()
        chosen = draw(logits, temperature, top_k, top_p, generator)
        if chosen == stop:
            break
        made.append(chosen)
    return made


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Return one id from logits (V,): the likeliest, or drawn from the best by their softmax.

    The best are the `top_k` likeliest, and of these the fewest whose likelihoods add up to `top_p`
    (Holtzman et al. 2020).
    """
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    weights = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p < 1:
        ordered, order = weights.sort(descending=True, stable=True)
        weights[order[ordered.cumsum(0) - ordered >= top_p]] = 0
    return int(torch.multinomial(weights, 1, generator=generator))
