"""`tokmill sample`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from tokmill.base.errors import UsageError
from tokmill.base.progress import human_count
from tokmill.inference.drawing import Drawing
from tokmill.terminal.options import At, Device, RunFolder
from tokmill.terminal.output import print_text, say
from tokmill.terminal.structs import given, struct_parameters, with_parameters


def _sample(
    run: RunFolder,
    prompt: Annotated[
        str, typer.Option(help="Text to continue; of x86 code its bytes in hexadecimal.")
    ] = "",
    ids: Annotated[
        str,
        typer.Option(
            metavar="1,2,3", help="Ids to continue, in place of text; the result is ids too."
        ),
    ] = "",
    prompts: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Many prompts, one per line; - reads stdin. If the run has no tokenizer, lines "
            "are ids.",
        ),
    ] = "",
    chat: Annotated[
        str, typer.Option(help="Message of a user to answer, written with the chat template.")
    ] = "",
    messages: Annotated[
        str,
        typer.Option(metavar="FILE", help="JSON file with a list of messages to answer."),
    ] = "",
    chat_template: Annotated[
        str, typer.Option(help="Chat template in place of that of the run's store.")
    ] = "",
    samples: Annotated[int, typer.Option(help="Continuations of each prompt.")] = 1,
    tokens: Annotated[int, typer.Option(help="Largest number of new tokens of each.")] = 100,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text. May be repeated."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows in a batch.")] = 16,
    at: At = "last",
    device: Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON Lines: an object a continuation.")
    ] = False,
    **drawing: Any,
) -> None:
    how = Drawing(**given(drawing))
    if sum(map(bool, (prompt, ids, prompts, chat, messages))) > 1:
        raise UsageError(
            "--prompt, --ids, --prompts, --chat and --messages exclude each other",
            hint="put all prompts into one file for --prompts",
        )
    is_chat = bool(chat or messages)
    if chat_template and not is_chat:
        raise UsageError("--chat-template needs messages", hint="--chat TEXT, or --messages FILE")
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
    encoded, end_ids = single, []
    if is_chat:
        from tokmill.inference import chats

        writer = chats.load_chats(run, facts, chat_template)
        single = chats.read_messages(messages) if messages else [{"role": "user", "content": chat}]
        encoded, end_ids = writer.ids(single, messages or "--chat"), writer.ends()
    made = module.generate(
        run,
        file or [encoded],
        tokens,
        samples=samples,
        **msgspec.structs.asdict(how),
        stop=stop or (),
        end_ids=end_ids,
        batch=batch,
        device=device,
        at=at,
    )
    count = empty = sliding = 0
    several = file is not None or samples > 1
    for found in made:
        before = file.taken[found.number] if file else single
        as_ids = bare or not (is_chat or isinstance(before, str))
        if as_json:
            line = msgspec.json.encode(_line(found, before, as_ids, how.seed))
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()
        else:
            if several:
                print(f"{chr(10) if count else ''}--- {_name(found, samples)}")
            shown = found.text if is_chat else _shown(found, before, as_ids)
            if shown or several:
                print_text(f"{shown}\n")
        count += 1
        empty += tokens > 0 and not any(found.ids.values())
        sliding += bool(found.out_of_sight)
    if empty:
        say(
            f"note: {empty:,} of {human_count(count, 'continuation')} came out empty: "
            "the first token ended the text (another --seed or prompt may give more)"
        )
    if file is not None and file.blank:
        say(f"{file.path}: {human_count(file.blank, 'blank line')} left out")
    if file is not None and not count:
        say(f"{file.path}: no prompt, so nothing to continue")
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


def _line(found: Any, prompt: str | Sequence[int], as_ids: bool, seed: int) -> dict[str, Any]:
    """Return a line of JSON with the new text, or the new ids."""
    line: dict[str, Any] = {"prompt": prompt}
    line |= {"continuation": _ids(found) if as_ids else found.text, "seed": seed}
    made = len(next(iter(found.ids.values())))
    line |= {"number": found.number, "sample": found.sample, "tokens": made, "end": found.end}
    return line | ({"out_of_sight": found.out_of_sight} if found.out_of_sight else {})


def _name(found: Any, samples: int) -> str:
    number = str(found.number + 1)
    return f"{number}, sample {found.sample + 1}" if samples > 1 else number


def _shown(found: Any, prompt: str | Sequence[int], as_ids: bool) -> str:
    if not as_ids:
        return f"{prompt}{found.text}"
    before = [] if isinstance(prompt, str) else list(prompt)
    made = _ids(found)
    if isinstance(made, dict):
        return "\n".join(f"{name}: {','.join(map(str, values))}" for name, values in made.items())
    return ",".join(map(str, [*before, *made]))


def _ids(found: Any) -> list[int] | dict[str, list[int]]:
    """Return the ids of the only column, or of each column by its name."""
    ids: dict[str, list[int]] = found.ids
    return next(iter(ids.values())) if len(ids) == 1 else ids
