"""Continue prompts with a trained model; everything needed lies in the run's folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from tokmill.errors import TokmillError, UsageError
from tokmill.inference.coders import Stops, load_coder, prompt_ids
from tokmill.inference.draw import Drawing
from tokmill.inference.generate import End, Row, continue_rows
from tokmill.inference.reading import Ids
from tokmill.training.engines.device import pick_device
from tokmill.training.runs.run import load_task, read_run

Prompt = str | Sequence[int] | Ids
"""Text, ids of a run's one column, or column → ids."""
BATCHES = 8
"""Batches whose rows are put in order of length together, so that like goes with like."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """What followed a prompt."""

    number: int
    """Number of the prompt, from 0."""
    sample: int
    """Number of this continuation of it, from 0."""
    text: str
    """What followed; empty where the run has no tokenizer. A stop and what is behind it are cut."""
    ids: dict[str, list[int]]
    """Column → ids of what followed, without the end of the document."""
    end: End
    """eot: the document ended; stop: a text of `stop` came; tokens: there were enough."""
    out_of_sight: int
    """Ids at the front that the model no longer saw when it chose the last one."""


def generate(
    run: Path | str,
    prompts: Iterable[Prompt],
    tokens: int = 100,
    *,
    samples: int = 1,
    temperature: float = Drawing().temperature,
    top_k: int = Drawing().top_k,
    top_p: float = Drawing().top_p,
    min_p: float = Drawing().min_p,
    repetition_penalty: float = Drawing().repetition_penalty,
    seed: int = 0,
    stop: Sequence[str] = (),
    end_ids: Sequence[int] = (),
    batch: int = 16,
    device: str = "auto",
    at: str = "",
) -> Iterator[Continuation]:
    """Yield how the model of a run continues prompts, in their order, `samples` of each.

    Rows are read side by side, and each is what it would be alone: a row's draws follow from the
    seed and the numbers of its prompt and sample. (Products of several rows are rounded otherwise
    than those of one, by about 1e-6; where two ids are that close, the choice may differ.)

    A decoder keeps keys and values of what it has read. It sees the last `task.length` ids; where a
    row grows longer, that window slides, and is read anew for each id. RWKV-7 sees all, at the same
    cost an id.

    Args:
        run: folder of a run of the task `next_token`, on text, on x86 code or on bare ids.
        prompts: each a text, in which names of special tokens are text like any other (of x86 code:
            64-bit instructions in hexadecimal); or ids; or, for several columns, column → ids. An
            empty text is the token that begins a text. They are taken as they are needed.
        tokens: most ids to make for each; the end of a document ends earlier.
        samples: continuations of each prompt.
        temperature, top_k, top_p, min_p, repetition_penalty, seed: how an id is drawn (`Drawing`).
        stop: texts that end a continuation too; only for text.
        end_ids: ids that end a continuation as the end of the document does.
        batch: rows that are read side by side.
        device: cpu, cuda, or auto: cuda where there is one.
        at: the weights: "best", "average", a step, or "last".

    Raises:
        UsageError: an option is out of its range, or a prompt cannot be read.
        TokmillError: the run cannot be sampled, or its logits are no numbers.
    """
    how = Drawing(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    how.check()
    for name, number, least in (
        ("tokens", tokens, 0),
        ("samples", samples, 1),
        ("batch", batch, 1),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise UsageError(
                f"{name} is a whole number from {least}, not {number}",
                where=f"--{name}",
                hint=f"such as {max(least, 1)}",
            )
    if isinstance(prompts, str):
        raise UsageError("prompts are a list", hint=f"such as [{prompts[:20]!r}]")
    run = Path(run)
    task = load_task(run, at)
    if not task.continues:
        raise TokmillError(
            "only runs that predict the next token of each column that they read can be sampled",
            where=str(run),
            hint="train on the task `next_token`, without task.column where several are read",
        )
    task.to(pick_device(device))
    vocabularies, coder = load_coder(run, read_run(run)[1], list(task.sizes))
    stops = Stops(stop, coder)
    known = {name: vocabulary.size for name, vocabulary in vocabularies.items()}
    sizes = {name: min(size, known.get(name, size)) for name, size in task.sizes.items()}
    ends = {
        name: {*end_ids, *(found.roles[role] for role in ("eot",) if role in found.roles)}
        for name, found in vocabularies.items()
    }

    def rows() -> Iterator[Row]:
        for number, prompt in enumerate(prompts):
            ids = prompt_ids(prompt, coder, vocabularies, sizes, f"prompt {number + 1}")
            yield from (Row(number, sample, ids) for sample in range(samples))

    def made() -> Iterator[Continuation]:
        for block in pieces(rows(), BATCHES * batch):
            ordered = sorted(block, key=lambda row: (-row.length, row.prompt))
            for some in pieces(ordered, batch):
                continue_rows(
                    task,
                    some,
                    tokens,
                    how,
                    sizes=sizes,
                    ends={name: ends.get(name) for name in sizes},
                    stopped=stops.reached if stop else None,
                )
            for row in block:
                text = coder.decode if coder else lambda ids: ""
                yield Continuation(
                    number=row.prompt,
                    sample=row.sample,
                    text=stops.cut(row.made) if stop else text(row.made),
                    ids=row.made,
                    end=row.end,
                    out_of_sight=row.out_of_sight,
                )

    return made()


def sample(
    run: Path | str,
    prompt: str = "",
    tokens: int = 100,
    *,
    temperature: float = Drawing().temperature,
    top_k: int = Drawing().top_k,
    top_p: float = Drawing().top_p,
    seed: int = 0,
    device: str = "auto",
    at: str = "",
) -> str:
    """Return the text with which the model of a run continues a prompt; see `generate`."""
    (made,) = generate(
        run,
        [prompt],
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        device=device,
        at=at,
    )
    return made.text


def pieces(things: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Yield so many at a time; the last ones may be fewer."""
    rest = iter(things)
    while piece := list(itertools.islice(rest, size)):
        yield piece
