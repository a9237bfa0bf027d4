"""`tokmill sample`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from tokmill.base.errors import UsageError
from tokmill.base.progress import human_count
from tokmill.inference.drawing import Drawing
from tokmill.terminal.options import At, Device, RunFolder
from tokmill.terminal.output import print_text, say
from tokmill.terminal.structs import given, struct_parameters, with_parameters

Prompt = Annotated[
    str, typer.Option(help="Text to continue; of x86 code its bytes in hexadecimal.")
]
Ids = Annotated[
    str,
    typer.Option(metavar="1,2,3", help="Ids to continue, in place of text; the result is ids too."),
]
Prompts = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="Many prompts, one per line; - reads stdin. If the run has no tokenizer, lines "
        "are ids.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End before this text. May be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON Lines: an object a continuation.")]


def _sample(
    run: RunFolder,
    prompt: Prompt = "",
    ids: Ids = "",
    prompts: Prompts = "",
    samples: Annotated[int, typer.Option(help="Continuations of each prompt.")] = 1,
    tokens: Annotated[int, typer.Option(help="Largest number of new tokens of each.")] = 100,
    stop: Stop = None,
    batch: Annotated[int, typer.Option(help="Rows in a batch.")] = 16,
    at: At = "last",
    device: Device = "auto",
    as_json: AsJson = False,
    **drawing: Any,
) -> None:
    how = Drawing(**given(drawing))
    if sum(map(bool, (prompt, ids, prompts))) > 1:
        raise UsageError(
            "--prompt, --ids and --prompts exclude each other",
            hint="put all prompts into one file for --prompts",
        )
    from tokmill.inference import sample as module
    from tokmill.training.runs import run as training

    reached = training.unfinished_at(run)
    if reached and at == "last":
        say(f"{run}: the run is not finished: samples from step {reached[0]:,} of {reached[1]:,}")
    facts = training.read_run(run)[1]
    bare = not all(facts.schema[name].vocab in facts.vocabularies for name in facts.columns)
    from tokmill.inference import prompts as reading

    file: Any = reading.Prompts(prompts, as_ids=bare) if prompts else None
    from tokmill.inference.coders import parse_ids

    single: Any = parse_ids(ids) if ids else prompt
    continuations = module.generate(
        run,
        file or [single],
        tokens,
        samples=samples,
        **msgspec.structs.asdict(how),
        stop=stop or (),
        batch=batch,
        device=device,
        at=at,
    )
    several = file is not None or samples > 1
    shown = Shown(file, single, bare, several, samples)
    _print_all(continuations, shown, how.seed if as_json else None, tokens)


class Shown(NamedTuple):
    """How continuations are printed."""

    file: Any
    """`Prompts`; None for a single prompt."""
    single: Any
    """The single prompt: a text, or ids."""
    bare: bool
    """Whether the run has no tokenizer."""
    several: bool
    """Whether a line names each continuation."""
    samples: int


def _print_all(continuations: Iterable[Any], how: Shown, seed: int | None, tokens: int) -> None:
    """Print continuations, and notes on them; with a `seed` as JSON Lines."""
    count = empty = sliding = 0
    for one in continuations:
        before = how.file.taken[one.number] if how.file else how.single
        as_ids = how.bare or not isinstance(before, str)
        if seed is not None:
            sys.stdout.buffer.write(msgspec.json.encode(_line(one, before, as_ids, seed)) + b"\n")
            sys.stdout.buffer.flush()
        else:
            if how.several:
                print(f"{chr(10) if count else ''}--- {_name(one, how.samples)}")
            text = _shown(one, before, as_ids)
            if text or how.several:
                print_text(f"{text}\n")
        count += 1
        empty += tokens > 0 and not any(one.ids.values())
        sliding += bool(one.out_of_sight)
    if empty:
        say(
            f"note: {empty:,} of {human_count(count, 'continuation')} came out empty: "
            "the first token ended the text (another --seed or prompt may give more)"
        )
    if how.file is not None and how.file.blank:
        say(f"{how.file.path}: {human_count(how.file.blank, 'blank line')} left out")
    if how.file is not None and not count:
        say(f"{how.file.path}: no prompt, so nothing to continue")
    if sliding:
        say(
            f"note: {sliding:,} of {human_count(count, 'continuation')} became longer than the "
            "rows that the model was trained on (task.length): after that it read only the last "
            "tokens, and all of them again for each new one, which is slower"
        )


sample = with_parameters(
    _sample,
    struct_parameters(Drawing, panel="", prefix=None),
    "Continue prompts with a trained model.",
)


def _line(
    continuation: Any, prompt: str | Sequence[int], as_ids: bool, seed: int
) -> dict[str, Any]:
    """Return a line of JSON with the new text, or the new ids."""
    line: dict[str, Any] = {"prompt": prompt}
    line |= {"continuation": _ids(continuation) if as_ids else continuation.text, "seed": seed}
    length = len(next(iter(continuation.ids.values())))
    line |= {
        "number": continuation.number,
        "sample": continuation.sample,
        "tokens": length,
        "end": continuation.end,
    }
    return line | ({"out_of_sight": continuation.out_of_sight} if continuation.out_of_sight else {})


def _name(continuation: Any, samples: int) -> str:
    number = str(continuation.number + 1)
    return f"{number}, sample {continuation.sample + 1}" if samples > 1 else number


def _shown(continuation: Any, prompt: str | Sequence[int], as_ids: bool) -> str:
    if not as_ids:
        return f"{prompt}{continuation.text}"
    before = [] if isinstance(prompt, str) else list(prompt)
    ids = _ids(continuation)
    if isinstance(ids, dict):
        return "\n".join(f"{name}: {','.join(map(str, values))}" for name, values in ids.items())
    return ",".join(map(str, [*before, *ids]))


def _ids(continuation: Any) -> list[int] | dict[str, list[int]]:
    """Return the ids of the only column, or of each column by its name."""
    ids: dict[str, list[int]] = continuation.ids
    return next(iter(ids.values())) if len(ids) == 1 else ids
