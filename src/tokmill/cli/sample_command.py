"""`tokmill sample`."""

import sys
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from tokmill.base.errors import UsageError
from tokmill.base.progress import human_count
from tokmill.inference.drawing import Drawing
from tokmill.terminal.frame import At, Device, RunFolder, given, struct_parameters, with_parameters
from tokmill.terminal.output import print_text, say

Prompt = Annotated[str, typer.Option(help="Text to continue; for x86 code, bytes in hexadecimal.")]
Ids = Annotated[
    str,
    typer.Option(metavar="1,2,3", help="Ids to continue instead of text; prints ids."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON Lines: one object per continuation.")
]


def _sample(
    run: RunFolder,
    prompt: Prompt = "",
    ids: Ids = "",
    samples: Annotated[int, typer.Option(help="Number of continuations.")] = 1,
    tokens: Annotated[int, typer.Option(help="Most new tokens per continuation.")] = 100,
    at: At = "last",
    device: Device = "auto",
    as_json: AsJson = False,
    **drawing: Any,
) -> None:
    how = Drawing(**given(drawing))
    if prompt and ids:
        raise UsageError("--prompt and --ids exclude each other", hint="a text, or ids")
    from tokmill.inference import sample as module
    from tokmill.inference.coders import parse_ids
    from tokmill.training.runs import run as training

    reached = training.unfinished_at(run)
    if reached and at == "last":
        say(f"{run}: the run is not finished: samples from step {reached[0]:,} of {reached[1]:,}")
    facts = training.read_run(run)[1]
    bare = not all(facts.schema[name].vocab in facts.vocabularies for name in facts.columns)
    single: Any = parse_ids(ids) if ids else prompt
    continuations = module.generate(
        run,
        [single],
        tokens,
        samples=samples,
        **msgspec.structs.asdict(how),
        device=device,
        at=at,
    )
    shown = Shown(single, bool(ids) or bare, samples, tokens, how.seed if as_json else None)
    _print_all(continuations, shown)


class Shown(NamedTuple):
    """How continuations are printed."""

    prompt: str | list[int]
    as_ids: bool
    samples: int
    tokens: int
    seed: int | None
    """Seed of the draws, for JSON Lines; None: text."""


def _print_all(continuations: Iterable[Any], how: Shown) -> None:
    empty = sliding = 0
    for one in continuations:
        if how.seed is not None:
            sys.stdout.buffer.write(msgspec.json.encode(_line(one, how)) + b"\n")
            sys.stdout.buffer.flush()
        else:
            if how.samples > 1:
                print(f"{chr(10) if one.sample else ''}--- sample {one.sample + 1}")
            text = _shown(one, how)
            if text or how.samples > 1:
                print_text(f"{text}\n")
        empty += how.tokens > 0 and not any(one.ids.values())
        sliding += bool(one.out_of_sight)
    if empty:
        say(
            f"note: {empty:,} of {human_count(how.samples, 'continuation')} came out empty: "
            "the first token ended the text (another --seed or prompt may give more)"
        )
    if sliding:
        say(
            f"note: {sliding:,} of {human_count(how.samples, 'continuation')} became longer than "
            "the rows that the model was trained on (task.length): after that it read only the "
            "last tokens, and all of them again for each new one, which is slower"
        )


sample = with_parameters(
    _sample,
    struct_parameters(Drawing, panel="", prefix=None),
    "Continue prompts with a trained model.",
)


def _line(continuation: Any, how: Shown) -> dict[str, Any]:
    line: dict[str, Any] = {"prompt": how.prompt, "seed": how.seed}
    line["continuation"] = _ids(continuation) if how.as_ids else continuation.text
    length = len(next(iter(continuation.ids.values())))
    line |= {"sample": continuation.sample, "tokens": length, "end": continuation.end}
    return line | ({"out_of_sight": continuation.out_of_sight} if continuation.out_of_sight else {})


def _shown(continuation: Any, how: Shown) -> str:
    if not how.as_ids:
        return f"{how.prompt}{continuation.text}"
    before = [] if isinstance(how.prompt, str) else how.prompt
    ids = _ids(continuation)
    if isinstance(ids, dict):
        return "\n".join(f"{name}: {','.join(map(str, values))}" for name, values in ids.items())
    return ",".join(map(str, [*before, *ids]))


def _ids(continuation: Any) -> list[int] | dict[str, list[int]]:
    ids: dict[str, list[int]] = continuation.ids
    return next(iter(ids.values())) if len(ids) == 1 else ids
