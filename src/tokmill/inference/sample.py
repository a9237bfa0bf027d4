"""Continues prompts with a trained model; only the run's folder is needed."""

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.recipe import convert
from tokmill.inference.coders import load_coder, prompt_ids
from tokmill.inference.drawing import Drawing, Numbers
from tokmill.inference.vectors import Ids, Reading, reading, window
from tokmill.models.transformers.layers import product_for
from tokmill.tasks.next_token import ends_of
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.device import pick_device
from tokmill.training.runs.run import load_task, read_run

End = Literal["eot", "tokens"]
"""Why a row ended: the end of a document, or the largest number of ids."""
FEW_PRODUCTS = 1 << 17
"""With fewer multiplications of a matrix with all rows, a second thread costs more than it
saves."""
ROUNDING = 1e-9
"""Sums of shares that differ by less are equal: .8 of ten equal shares are eight."""


@dataclass
class Row:
    """Ids to continue, and the ids that follow."""

    prompt: int
    """Number of the prompt."""
    sample: int
    """Number of this continuation of the prompt."""
    ids: Ids
    new_ids: dict[str, list[int]] = field(default_factory=dict)
    end: End = "tokens"
    out_of_sight: int = 0
    """Number of first ids that the model no longer saw when it chose the last one."""

    @property
    def length(self) -> int:
        return len(next(iter(self.ids.values())))


@torch.inference_mode()
def continue_rows(
    task: Task,
    rows: Sequence[Row],
    tokens: int,
    how: Drawing,
    *,
    sizes: Mapping[str, int | None],
    ends: Mapping[str, Collection[int]],
) -> None:
    """Fill `new_ids`, `end` and `out_of_sight` of rows, with at most `tokens` ids of each column.

    Args:
        task: predicts every column that it reads.
        rows: prompts of any lengths from 1 on; their order makes no difference.
        tokens: largest number of new ids of a row.
        how: how an id is chosen.
        sizes: column → only ids below this are drawn, because a model may have more rows than its
            vocabulary has ids; None: all.
        ends: column → the ids that end a row and are not part of it.

    A recurrent model reads all ids; any other reads the last `window(task)`, as in training. Each
    column has its own head and is drawn independently. Raises `TokmillError` if logits are not
    numbers.
    """
    names = list(task.sizes)
    for row in rows:
        row.new_ids, row.end, row.out_of_sight = {name: [] for name in names}, "tokens", 0
    alive = sorted(rows, key=lambda row: (-row.length, row.prompt, row.sample)) if tokens else []
    if not alive:
        return
    task.eval()
    reader = reading(task)
    numbers = [how.numbers(row.prompt, row.sample) for row in alive]
    with threads_for(task, len(alive)):
        hidden = begin(reader, alive)
        for count in range(1, tokens + 1):
            chosen = {
                name: choose(logits_of(task, hidden, name)[:, : sizes[name]], how, numbers)
                for name in names
            }
            kept = append(alive, chosen, ends)
            if not kept or count == tokens:
                break
            if len(kept) < len(alive):
                which = torch.tensor(kept)
                reader.keep(which)
                alive = [alive[number] for number in kept]
                numbers = [numbers[number] for number in kept]
                here = which.to(hidden.device)
                chosen = {name: ids[here] for name, ids in chosen.items()}
            hidden = reader.next({name: ids[:, None] for name, ids in chosen.items()})
    if size := window(task):
        for row in rows:
            # The ids before the last choice, whether that id is kept or has ended the row.
            before = row.length + len(row.new_ids[names[0]]) - (row.end != "eot")
            row.out_of_sight = max(0, before - size)


def begin(reader: Reading, rows: Sequence[Row]) -> Tensor:
    """Read the prompts of rows; a prompt with several samples is read once."""
    first = {row.prompt: row for row in reversed(rows)}
    distinct = [row for row in rows if first[row.prompt] is row]
    place = {row.prompt: number for number, row in enumerate(distinct)}
    hidden = reader.begin([row.ids for row in distinct])
    if len(distinct) < len(rows):
        copies = torch.tensor([place[row.prompt] for row in rows])
        reader.keep(copies)
        hidden = hidden[copies.to(hidden.device)]
    return hidden


def append(
    rows: Sequence[Row],
    chosen: Mapping[str, Tensor],
    ends: Mapping[str, Collection[int]],
) -> list[int]:
    """Append the chosen ids to rows that they do not end; return the rows that can go on."""
    values = {name: ids.tolist() for name, ids in chosen.items()}
    kept = []
    for number, row in enumerate(rows):
        if any(ids[number] in ends[name] for name, ids in values.items()):
            row.end = "eot"
            continue
        for name, ids in values.items():
            row.new_ids[name].append(ids[number])
        kept.append(number)
    return kept


def logits_of(task: Task, hidden: Tensor, name: str) -> Tensor:
    """Return the logits (B, V) of a column from hidden states (B, D)."""
    weight = task.head(name)
    return product_for(hidden, weight)(hidden, weight)


@contextlib.contextmanager
def threads_for(task: Task, rows: int) -> Iterator[None]:
    """Compute in a single thread if matrix products are small."""
    before = torch.get_num_threads()
    largest = max(weight.numel() for weight in task.model.parameters() if weight.ndim == 2)
    blocks = [p.numel() for name, p in task.model.named_parameters() if "blocks" in name]
    if max(blocks, default=largest) * rows < FEW_PRODUCTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose(logits: Tensor, how: Drawing, numbers: Sequence[Numbers]) -> Tensor:
    """Return an id for each row, int64 (B,), from logits (B, V).

    Raises `TokmillError` if a logit is not a number.
    """
    # The first of equal logits; NaN counts as the highest.
    likeliest = first_highest(logits)
    highest = logits.gather(-1, likeliest)
    if not bool(highest.isfinite().all()):
        raise TokmillError(
            "the model's logits are not numbers: the training diverged, or weights are damaged",
            hint="sample from other weights, with --at best or --at STEP",
        )
    if how.greedy:
        return likeliest[:, 0]
    # Random ids are drawn on the CPU in float64, so that they are the same on every device.
    values, ids = best(logits.float().cpu(), how.top_k, ordered=how.top_p < 1)
    weights = values.double().sub_(highest.double().cpu()).div_(float(how.temperature)).exp_()
    if how.top_p < 1:
        shares = weights / weights.sum(-1, keepdim=True)
        before = shares.cumsum(-1) - shares
        weights[before >= max(how.top_p - ROUNDING, ROUNDING)] = 0
    sums = weights.cumsum(-1)
    at = torch.tensor([[row.take()] for row in numbers], dtype=torch.float64) * sums[:, -1:]
    # After the last possible id the sums stay equal; rounding must not select an id there.
    most = torch.searchsorted(sums, sums[:, -1:].contiguous())
    place = torch.searchsorted(sums, at, right=True).minimum(most)
    if ids is not None:
        place = ids.gather(-1, place)
    return place[:, 0].to(logits.device)


def first_highest(logits: Tensor) -> Tensor:
    """Return the lowest id (B, 1) with the highest logit; NaN counts as the highest."""
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:
        return logits.argmax(-1, keepdim=True)
    # numpy takes a tenth of the time.
    return torch.from_numpy(logits.numpy().argmax(-1, keepdims=True))


def best(logits: Tensor, k: int, ordered: bool) -> tuple[Tensor, Tensor | None]:
    """Return the k highest of logits (B, V) and their ids, (B, K) each; k = 0: all.

    Logits are in falling order, equal ones in the order of their ids; of equal ones at the border
    the lowest ids are taken. If all logits are returned and need not be `ordered`, they stay in the
    order of ids, and the ids are None.
    """
    size = logits.shape[-1]
    if not 0 < k < size:
        return logits.sort(dim=-1, descending=True, stable=True) if ordered else (logits, None)
    least = logits.topk(k).values[:, -1:]
    above, level = logits > least, logits == least
    places = k - above.sum(-1, keepdim=True)
    if bool((level.sum(-1, keepdim=True) > places).any()):
        level &= level.cumsum(-1) <= places
    ids = (above | level).nonzero()[:, 1].view(len(logits), k)
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


Prompt = str | Sequence[int] | Ids
"""Text, ids of a run's one column, or column → ids."""
HINTS = {
    "next_token": "with several columns, train without task.column",
    "masked": "it fills in hidden tokens and continues nothing: `tokmill eval RUN STORE` shows how "
    "many it finds, `tokmill embed RUN STORE` makes vectors of records",
    "classify": "it predicts classes of records: `tokmill predict RUN INPUT`",
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
    try:
        how = convert(Drawing, given)
    except UsageError as error:
        what = f"--{error.what.replace('_', '-')}"
        raise UsageError(what, hint="`tokmill sample --help` has what each means") from None
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
                    text=self.coder.decode(row.new_ids) if self.coder else "",
                    ids=row.new_ids,
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
    if "samples" in options:
        raise UsageError("`sample` returns one text", hint="tokmill.generate(run, [prompt], …)")
    (continuation,) = generate(run, [prompt], tokens, **options)
    return continuation.text


def pieces(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Yield lists of `size` rows; the last one may be shorter."""
    rest = iter(rows)
    while piece := list(itertools.islice(rest, size)):
        yield piece
