"""`tokmill sample`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tokmill import plugins
from tokmill.cli.output import print_text, say
from tokmill.errors import UsageError
from tokmill.progress import human_count


def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    prompt: Annotated[
        str, typer.Option(help="Text to continue; of x86 code its bytes in hexadecimal.")
    ] = "",
    ids: Annotated[
        str,
        typer.Option(
            metavar="1,2,3", help="Ids to continue, in place of text; what follows is ids too."
        ),
    ] = "",
    prompts: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Many prompts: one a line, or JSON Lines (.jsonl); - reads stdin. Where the run "
            "has no tokenizer, lines are ids.",
        ),
    ] = "",
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Read --prompts as JSON Lines, whatever its name.")
    ] = False,
    field: Annotated[str, typer.Option(help="Key of the prompt in JSON Lines.")] = "prompt",
    chat: Annotated[
        str, typer.Option(help="Message of a user to answer, written with the chat template.")
    ] = "",
    messages: Annotated[
        str,
        typer.Option(metavar="FILE", help="JSON file with a list of messages to answer."),
    ] = "",
    chat_template: Annotated[
        str, typer.Option(help="Another chat template than that of the run's store.")
    ] = "",
    samples: Annotated[int, typer.Option(help="Continuations of each prompt.")] = 1,
    tokens: Annotated[int, typer.Option(help="Most tokens to make for each.")] = 100,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text. May be repeated."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Below 1: surer; 0: always the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(help="Draw from so many likeliest tokens; 0: from all.")
    ] = 50,
    top_p: Annotated[
        float, typer.Option(help="Of these, draw from the fewest that are this likely together.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Of these, from those at least this times as likely as the first.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens that came before are less likely.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal texts.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows that are read side by side.")] = 16,
    at: Annotated[
        str, typer.Option(metavar="best|last|average|STEP", help="Which weights of the run.")
    ] = "last",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON Lines: an object a continuation.")
    ] = False,
) -> None:
    """Continue prompts with a trained model."""
    if sum(map(bool, (prompt, ids, prompts, chat, messages))) > 1:
        raise UsageError(
            "--prompt, --ids, --prompts, --chat and --messages exclude each other",
            hint="put all prompts into one file for --prompts",
        )
    asked = bool(chat or messages)
    if chat_template and not asked:
        raise UsageError(
            "--chat-template says how messages are written", hint="--chat TEXT, or --messages FILE"
        )
    if jsonl and not prompts:
        raise UsageError("--jsonl says how to read --prompts FILE", hint="name a file, or -")
    module = plugins.require("tokmill.inference.sample")
    training = plugins.require("tokmill.training.runs.run")
    reached = training.unfinished_at(run)
    if reached and at == "last":
        say(f"{run}: the run is not finished: samples from step {reached[0]:,} of {reached[1]:,}")
    facts = training.read_run(run)[1]
    bare = not all(facts.schema[name].vocab in facts.vocabularies for name in facts.columns)
    reading = plugins.require("tokmill.inference.prompts")
    given: Any = reading.Prompts(prompts, jsonl, as_ids=bare, key=field) if prompts else None
    one: Any = plugins.require("tokmill.inference.coders").parse_ids(ids) if ids else prompt
    end_ids: list[int] = []
    if asked:
        chats = plugins.require("tokmill.inference.chats")
        writer = chats.load_chats(run, facts, chat_template)
        one = chats.read_messages(messages) if messages else [{"role": "user", "content": chat}]
        written, end_ids = writer.ids(one, messages or "--chat"), writer.ends()
    made = module.generate(
        run,
        given or [written if asked else one],
        tokens,
        samples=samples,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or (),
        end_ids=end_ids,
        batch=batch,
        device=device,
        at=at,
    )
    said: dict[str, int] = {}
    several = given is not None or samples > 1
    for count, found in enumerate(made):
        before = given.taken[found.number] if given else one
        as_ids = bare or not (asked or isinstance(before, str))
        if as_json:
            sys.stdout.buffer.write(msgspec.json.encode(_line(found, before, as_ids, seed)) + b"\n")
            sys.stdout.buffer.flush()
        else:
            if several:
                print(f"{chr(10) if count else ''}--- {_name(found, samples)}")
            shown = found.text if asked else _shown(found, before, as_ids)
            if shown or several:
                print_text(f"{shown}\n")
        said["none"] = said.get("none", 0) + (tokens > 0 and not any(found.ids.values()))
        said["sliding"] = said.get("sliding", 0) + bool(found.out_of_sight)
        said["all"] = count + 1
    if said.get("none"):
        say(
            f"note: {said['none']:,} of {human_count(said['all'], 'continuation')} came out empty: "
            "the first token ended the text (another --seed or prompt may give more)"
        )
    if given is not None and given.blank:
        say(f"{given.path}: {human_count(given.blank, 'blank line')} left out")
    if given is not None and not said:
        say(f"{given.path}: no prompt, so nothing to continue")
    if said.get("sliding"):
        say(
            f"note: {said['sliding']:,} of {human_count(said['all'], 'continuation')} outgrew what "
            "the model was trained to see (task.length): from there on it saw the last tokens "
            "alone, read anew for each, which is slower"
        )


def _line(found: Any, prompt: str | Sequence[int], as_ids: bool, seed: int) -> dict[str, Any]:
    """Return a line of JSON: of text its continuation, else ids."""
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
    """Return the ids of the one column, or of each by its name."""
    ids: dict[str, list[int]] = found.ids
    return next(iter(ids.values())) if len(ids) == 1 else ids
