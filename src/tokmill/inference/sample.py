"""Continue a prompt with a trained model; everything needed lies in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokmill import plugins
from tokmill.errors import TokmillError, UsageError
from tokmill.files import inside
from tokmill.models.model import Recurrent, Tensors
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
        run: folder of a run of the task `next_token`, on text or on x86 code.
        prompt: text, in which names of special tokens are text like any other; of x86 code 64-bit
            instructions in hexadecimal. What follows is then tokens, an instruction a line.
        tokens: most tokens to make; the end of a document ends earlier.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from so many likeliest tokens; 0: from all.
        top_p: of these, draw from the fewest that are this likely together.
        seed: of the draws; equal seeds give equal texts.
        device: cpu, cuda, or auto.
        at: the weights: "best", a step, or "last".
    """
    task = load_task(run, at)
    if not isinstance(task, NextToken) or list(task.columns) != list(task.sizes):
        raise TokmillError(
            "only runs that predict the next token of each column that they read can be sampled",
            where=str(run),
            hint="train on the task `next_token`, without task.column where several are read",
        )
    vocabularies, coder = load_coder(Path(run), list(task.columns))
    ids = coder.encode(prompt)
    if not all(ids.values()):
        starts = {
            name: vocabulary.roles.get("bos", vocabulary.roles.get("eot"))
            for name, vocabulary in vocabularies.items()
        }
        if None in starts.values():
            raise UsageError(
                "the vocabulary has no token that begins a text", hint="give a --prompt"
            )
        ids = {name: [start] for name, start in starts.items()}
    made = continue_columns(
        task.to(pick_device(device)),
        ids,
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        sizes={name: vocabulary.size for name, vocabulary in vocabularies.items()},
        stops={name: vocabulary.roles.get("eot") for name, vocabulary in vocabularies.items()},
    )
    return str(coder.decode(made))


class Text:
    """A tokenizer of text as what sampling asks for: one column."""

    def __init__(self, tokenizer: Any, column: str) -> None:
        self.tokenizer, self.column = tokenizer, column

    def encode(self, text: str) -> dict[str, list[int]]:
        """Return column → ids; names of special tokens are text like any other."""
        return {self.column: self.tokenizer.encode(text, specials="plain")}

    def decode(self, ids: Mapping[str, Sequence[int]]) -> str:
        """Return the text of ids."""
        return str(self.tokenizer.decode(ids[self.column]))


def load_coder(run: Path, columns: Sequence[str]) -> tuple[dict[str, Vocabulary], Any]:
    """Return the vocabularies of a run's columns, and what makes ids of text and text of ids."""
    facts: Facts = read_json(run / FACTS, Facts)
    found: dict[str, Vocabulary] = {}
    for column in columns:
        name = facts.schema[column].vocab
        if name not in facts.vocabularies:
            raise TokmillError(
                f"the run knows no vocabulary for the column {column!r}",
                where=str(run),
                hint="its store or its checkpoint was imported without a tokenizer",
            )
        found[column] = facts.vocabularies[name]
    files = {column: inside(run / VOCAB, vocabulary.file) for column, vocabulary in found.items()}
    kind = "tokenizer" if files[columns[0]].name.startswith("tokenizer") else "x86"
    coder = plugins.load(plugins.CODERS, kind)
    if kind == "tokenizer":
        return found, Text(coder.from_file(files[columns[0]]), columns[0])
    return found, coder.from_files(files)


@torch.no_grad()
def continue_columns(
    task: NextToken,
    ids: Mapping[str, Sequence[int]],
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    sizes: Mapping[str, int | None],
    stops: Mapping[str, int | None],
) -> dict[str, list[int]]:
    """Return at most so many ids of each column that follow `ids`, up to and without a stop.

    A recurrent model reads all of them, each once; any other sees the last `task.length` at a time:
    as far back as it was trained. Only ids below `sizes` are drawn: a model may have more rows than
    its vocabulary has ids. Columns are drawn on their own, as each has a head of its own.
    """
    if temperature < 0 or top_k < 0 or tokens < 0:
        raise UsageError(
            "temperature, top-k and tokens cannot be negative",
            hint="--temperature 0 takes the likeliest token, --top-k 0 draws from all",
        )
    if not 0 < top_p <= 1:
        raise UsageError(
            f"top-p is a share above 0 and up to 1, not {top_p}", hint="--top-p 1 draws from all"
        )
    task.eval()
    device = next(task.parameters()).device
    # Draws are made on the CPU, so that every device makes the same ones.
    generator = torch.Generator().manual_seed(seed)
    read = Carried(task) if isinstance(task.model, Recurrent) else Reread(task)
    made: dict[str, list[int]] = {name: [] for name in ids}
    new = {name: list(before) for name, before in ids.items()}
    for _ in range(tokens):
        hidden = read({name: torch.tensor([values], device=device) for name, values in new.items()})
        chosen = {}
        for name in new:
            logits = task.logits(hidden, name)[0, : sizes[name]].float().cpu()
            chosen[name] = draw(logits, temperature, top_k, top_p, generator)
        if any(chosen[name] == stops[name] for name in chosen):
            break
        for name, number in chosen.items():
            made[name].append(number)
        new = {name: [number] for name, number in chosen.items()}
    return made


class Carried:
    """Reads with a state: in the same time and memory for each id, however many were before."""

    def __init__(self, task: NextToken) -> None:
        assert isinstance(task.model, Recurrent)
        self.model, self.piece = task.model, task.length
        self.state = task.model.start(1)

    def __call__(self, columns: dict[str, Tensor]) -> Tensor:
        """Return the hidden state (1, D) after the ids (1, n) that come next."""
        pieces = zip(
            *(torch.split(ids, self.piece, dim=1) for ids in columns.values()), strict=True
        )
        for piece in pieces:
            hidden, self.state = self.model.run(dict(zip(columns, piece, strict=True)), self.state)
        last: Tensor = hidden[:, -1]
        return last


class Reread:
    """Reads the last `task.length` ids anew each time."""

    def __init__(self, task: NextToken) -> None:
        self.model, self.length = task.model, task.length
        self.seen: dict[str, Tensor] = {}

    def __call__(self, columns: dict[str, Tensor]) -> Tensor:
        """Return the hidden state (1, D) after the ids (1, n) that come next."""
        self.seen = {
            name: torch.cat([self.seen.get(name, ids[:, :0]), ids], 1)[:, -self.length :]
            for name, ids in columns.items()
        }
        first = next(iter(self.seen.values()))
        place = torch.arange(first.shape[1], device=first.device)[None]
        last: Tensor = self.model(Tensors(self.seen, torch.zeros_like(first), place, whole=True))[
            :, -1
        ]
        return last


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
