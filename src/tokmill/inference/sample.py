"""Continues prompts with a trained model; only the run's folder is needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.recipe import convert
from tokmill.inference.coders import load_coder, prompt_ids
from tokmill.inference.drawing import Drawing
from tokmill.inference.generate import End, Row, continue_rows
from tokmill.inference.vectors import Ids
from tokmill.tasks.next_token import ends_of
from tokmill.training.engines.devices.device import pick_device
from tokmill.training.runs.run import load_task, read_run

Prompt = str | Sequence[int] | Ids
"""Text, ids of a run's one column, or column → ids."""
HINTS = {
    "next_token": "with several columns, train without task.column",
    "masked": "it fills in hidden tokens and continues nothing: `tokmill eval RUN STORE` shows how "
    "many it finds, `tokmill embed RUN STORE` makes vectors of records",
    "classify": "it tells classes of records: `tokmill predict RUN INPUT`",
}
"""Task of a run that cannot be sampled → what can be done with it."""
HINTS["sentence_pair"] = HINTS["masked"]
OTHERWISE = "train on the task `next_token`"
DEFAULT = Drawing()
BATCHES = 8
"""Rows of this many batches are sorted by length together, so that a batch has similar lengths."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """A continuation of a prompt."""

    number: int
    """Number of the prompt, from 0."""
    sample: int
    """Number of this continuation of the prompt, from 0."""
    text: str
    """The new text; "" if the run has no tokenizer."""
    ids: dict[str, list[int]]
    """Column → new ids, without the end of the document."""
    end: End
    """eot: the document ended; tokens: the limit was reached."""
    out_of_sight: int
    """Number of first ids that the model no longer saw when it chose the last one."""


def generate(
    run: Path | str,
    prompts: Iterable[Prompt],
    tokens: int = 100,
    *,
    samples: int = 1,
    temperature: float = DEFAULT.temperature,
    top_k: int = DEFAULT.top_k,
    top_p: float = DEFAULT.top_p,
    seed: int = DEFAULT.seed,
    batch: int = 16,
    device: str = "auto",
    at: str = "",
) -> Iterator[Continuation]:
    """Yield continuations of prompts in their order, `samples` of each.

    The result of a row is as if it were alone: its random numbers depend on the seed and the
    numbers of prompt and sample. (Products of several rows round differently, by about 1e-6.)

    A decoder caches keys and values. It reads the last `task.length` ids; in a longer row this
    window slides, and is read again for each id. RWKV-7 reads all ids, at a constant cost for each.

    Args:
        run: folder of a run of the task `next_token`, on text, on x86 code or on bare ids.
        prompts: texts, lists of ids, or for several columns dicts of column → ids. Names of special
            tokens in a text are plain text; a text of x86 code is 64-bit instructions in
            hexadecimal; before a text stand the special tokens with which the run has learned
            records; an empty text is what begins a record. An iterator is read lazily.
        tokens: largest number of new ids of each; the end of a document ends it earlier.
        samples: continuations of each prompt.
        temperature, top_k, top_p, seed: how an id is drawn (`Drawing`).
        batch: rows in a batch.
        device: cpu, cuda, or auto: cuda where there is one.
        at: the weights: "best", a step, or "last".

    Raises:
        UsageError: an option is out of its range, or a prompt cannot be read.
        TokmillError: the run cannot be sampled, or its logits are not numbers.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    how = convert(Drawing, given)
    for name, number, least in [
        ("tokens", tokens, 0),
        ("samples", samples, 1),
        ("batch", batch, 1),
    ]:
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise UsageError(
                f"{name} is a whole number from {least}, not {number}",
                where=f"--{name}",
                hint=f"such as {max(least, 1)}",
            )
    if isinstance(prompts, str):
        raise UsageError("prompts are a list", hint=f"such as [{prompts[:20]!r}]")
    sampler = Sampler(Path(run), at, device)
    return sampler.generate(prompts, tokens, samples, batch, how)


class Sampler:
    """A run that continues prompts: its task, its coder, and the ids that end a text."""

    def __init__(self, run: Path, at: str, device: str) -> None:
        self.task = load_task(run, at)
        if not self.task.continues:
            raise TokmillError(
                "only a run that predicts the next token of all its columns can be sampled",
                where=str(run),
                hint=HINTS.get(self.task.config.kind, OTHERWISE),
            )
        self.task.to(pick_device(device))
        self.facts = read_run(run)[1]
        columns = self.task.sizes
        self.vocabularies, self.coder = load_coder(run, self.facts, list(columns))
        sizes = {name: vocabulary.size for name, vocabulary in self.vocabularies.items()}
        self.sizes = {name: min(size, sizes.get(name, size)) for name, size in columns.items()}
        roles = {name: vocabulary.roles for name, vocabulary in self.vocabularies.items()}
        usual = {name: ends_of({name: roles.get(name, {})}).values() for name in columns}
        self.ends = {name: {*self.facts.ends.get(name, ids)} for name, ids in usual.items()}

    def generate(
        self, prompts: Iterable[Prompt], tokens: int, samples: int, batch: int, how: Drawing
    ) -> Iterator[Continuation]:
        """Yield the continuations of prompts; arguments as of the function `generate`."""
        for block in pieces(self.rows(prompts, samples), BATCHES * batch):
            ordered = sorted(block, key=lambda row: (-row.length, row.prompt))
            for some in pieces(ordered, batch):
                continue_rows(self.task, some, tokens, how, sizes=self.sizes, ends=self.ends)
            for row in block:
                yield Continuation(
                    number=row.prompt,
                    sample=row.sample,
                    text=self.coder.decode(row.made) if self.coder else "",
                    ids=row.made,
                    end=row.end,
                    out_of_sight=row.out_of_sight,
                )

    def rows(self, prompts: Iterable[Prompt], samples: int) -> Iterator[Row]:
        for number, prompt in enumerate(prompts):
            where = f"prompt {number + 1}"
            ids = prompt_ids(prompt, self.coder, self.vocabularies, self.sizes, self.facts, where)
            yield from (Row(number, sample, ids) for sample in range(samples))


def sample(run: Path | str, prompt: str = "", tokens: int = 100, **options: Any) -> str:
    """Return the text that follows a prompt; `options` as for `generate`, but `samples`."""
    (continuation,) = generate(run, [prompt], tokens, **options)
    return continuation.text


def pieces(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Yield lists of `size` rows; the last one may be shorter."""
    rest = iter(rows)
    while piece := list(itertools.islice(rest, size)):
        yield piece
