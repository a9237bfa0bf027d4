"""`tokmill build KIND INPUT… -o STORE` and `tokmill build RECIPE.toml`."""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import UsageError
from tokmill.base.progress import human_bytes, parse_bytes, parse_seconds
from tokmill.base.remote import target_of
from tokmill.builds.build import run
from tokmill.builds.plan import Amount, BuildRecipe, How, prepare
from tokmill.builds.scan import in_words, with_lists
from tokmill.cli.build_report import report
from tokmill.store.receipts import read_receipts
from tokmill.store.store import Store
from tokmill.terminal.frame import (
    FilesFrom,
    Json,
    as_command,
    given,
    lazy_group,
    struct_parameters,
    with_parameters,
)
from tokmill.terminal.output import print_json, say

TEXT_KINDS = ("text", "jsonl", "parquet")
ENCODING_KINDS = (*TEXT_KINDS, "tsv", "corpus")
TRAINING = {"data", "model", "task", "optim", "run"}
"""Tables of the recipe of a training."""
RUNNING = "how it runs (changes no byte)"
TEXT = "tokenizer, parts, one record"

Inputs = Annotated[list[str] | None, typer.Argument(help="Files, folders or stores.")]
# readable=False: typer does not check the folder; the build does, with better errors.
Out = Annotated[
    Path | None, typer.Option("-o", "--out", readable=False, help="Folder of the store.")
]
Tokenizer = Annotated[
    str | None, typer.Option(help="tokenizer.json or its folder, or a vocab.txt.")
]
Role = Annotated[list[str] | None, typer.Option(help="ROLE=TOKEN, for unusual token names.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the recipe.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan; do not build.", rich_help_panel=RUNNING)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=RUNNING)]


class Running(msgspec.Struct, frozen=True):
    """How a build runs; nothing of it changes a byte of the store."""

    workers: int | None = None
    """Worker processes; 0: none."""
    preset: Literal["memory", "balanced", "speed"] = "balanced"
    """Block sizes and number of workers."""
    memory: str | None = None
    """Largest memory to use, such as 2GB."""
    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto"
    """The encoder of text."""
    part: str | None = None
    """i/n: this machine's part of a shared build; auto: from the task of a Slurm array."""
    push: str | None = None
    """Address, such as s3://BUCKET/NAME, where machines without a shared disk join their parts."""
    max_time: str | None = None
    """Stop after this time, such as 10m."""
    max_rejects: float = 0.01
    """Largest share of rejected records."""
    fresh: bool = False
    """Start over."""
    yes: bool = False
    """Accept changed or removed inputs."""

    def how(self, quiet: bool) -> How:
        amount = {name: getattr(self, name) for name in ("workers", "preset", "engine")}
        amount["memory"] = None if self.memory is None else parse_bytes(self.memory)
        return How(
            amount=recipe.convert(Amount, amount, "command line"),
            part=None if self.part is None else _part(self.part),
            push="" if self.push is None else target_of(self.push),
            limit_seconds=None if self.max_time is None else parse_seconds(self.max_time),
            max_rejects=self.max_rejects,
            fresh=self.fresh,
            yes=self.yes,
            quiet=quiet,
        )


RUNNING_FIELDS = Running.__struct_fields__


class TextOptions(msgspec.Struct, frozen=True):
    """What only builds of text have; `text.commands.build_text` carries it out."""

    vocab_size: int | None = None
    """First train a tokenizer with this many ids on the input (by default only with --train:
    50,257)."""
    special: tuple[str, ...] = ()
    """Special tokens of that tokenizer [<|endoftext|>]."""
    train: tuple[str, ...] = ()
    """Training text: makes OUT/train, OUT/val and OUT/tokenizer.json."""
    val: tuple[str, ...] = ()
    """Validation text."""
    bin: bool | None = None
    """With --train: also write OUT/train.bin and OUT/val.bin (uint16, uint32 above 65,536 ids; no
    header)."""
    train_bin: str = ""
    """Name of the .bin file of the training text, such as x_train.bin."""
    val_bin: str = ""
    """Name of the .bin file of the validation text."""
    explain: str = ""
    """FILE:LINE: show how one record is processed, build nothing."""


def load_kind(name: str) -> Any:
    """Return the command of a kind of source, made from its options, or that of a recipe file."""
    if name.endswith(".toml"):
        return _command(name, None, f"Build the recipe {name}.")
    if name not in plugins.SOURCES:
        return None
    kind = plugins.load(plugins.SOURCES, name)
    line = f"Build a store from {plugins.SOURCES[name].help}."
    if name in ENCODING_KINDS:
        tokenizer = "--vocab-size 8192" if name in TEXT_KINDS else "--tokenizer FILE"
        line += f" Such as `tokmill build {name} INPUT {tokenizer} -o STORE`."
    hidden = () if kind.has_tokenizer else ("tokenizer", "role")
    return _command(
        name, kind.Config, line, hidden if name in ENCODING_KINDS else (*hidden, "engine")
    )


def with_kind(words: list[str]) -> list[str]:
    """Put before a path the kind of build that `inspect` names for it, and say so."""
    if words[0].endswith(".toml"):
        return words
    from tokmill.report.describe.inspect import describe

    facts = describe(words[0])
    kind = re.match(r"tokmill build ([a-z0-9-]+) ", facts.get("next", ""))
    if kind is None:
        raise UsageError(
            f"no kind of build is known for it: {facts['what']}",
            where=words[0],
            hint=f"what can be done with it: {facts['next']}"
            if "next" in facts
            else facts.get(
                "hint", "name one: tokmill build KIND INPUT… (`tokmill build --help` lists them)"
            ),
        )
    say(f"note: {words[0]} is {facts['what']}: `tokmill build {kind[1]}`")
    return [kind[1], *words]


command = lazy_group(
    "build",
    "Turn inputs into a token store; the same command again resumes or extends it. "
    "`tokmill build KIND INPUT… -o STORE`, or `tokmill build RECIPE.toml`; without KIND, the one "
    "that `tokmill inspect INPUT` names.",
    lambda: {name: (None, f"From {part.help}.") for name, part in plugins.SOURCES.items()},
    load_kind,
    with_kind,
)


def _command(
    name: str, struct: type[msgspec.Struct] | None, line: str, hidden: Collection[str] = ()
) -> Any:
    def base(
        inputs: Inputs = None,
        files_from: FilesFrom = None,
        out: Out = None,
        tokenizer: Tokenizer = None,
        role: Role = None,
        set_: Set = None,
        dry_run: DryRun = False,
        quiet: Quiet = False,
        json: Json = False,
        **more: Any,
    ) -> int:
        options = given(more)
        running = {key: options.pop(key) for key in [*options] if key in RUNNING_FIELDS}
        before = {key: options.pop(key) for key in [*options] if key in text}
        how = recipe.convert(Running, running, "command line").how(quiet)
        named = with_lists(inputs, files_from)
        chosen = _recipe(name, named, out, tokenizer, role or [], set_ or [], options)
        if how.amount.engine != "auto" and chosen.source not in ENCODING_KINDS:
            raise UsageError(
                f"--engine chooses the encoder of text, but {chosen.source} encodes no text",
                hint="leave it out",
            )
        return _carry_out(chosen, how, before, dry_run=dry_run, json=json)

    text = TextOptions.__struct_fields__ if name in TEXT_KINDS else ()
    flags = [field for field in RUNNING_FIELDS if field not in hidden]
    parameters = struct_parameters(Running, RUNNING, only=flags, prefix=None)
    parameters += struct_parameters(struct) if struct else []
    if text:
        parameters = [*struct_parameters(TextOptions, TEXT, prefix=None), *parameters]
    return as_command(with_parameters(base, parameters, line, hidden), name)


def _carry_out(
    chosen: BuildRecipe, how: How, before: dict[str, Any], *, dry_run: bool, json: bool
) -> int:
    if chosen.source in TEXT_KINDS and chosen.options.get("strip"):
        what = "document" if chosen.source == "text" else "field"
        say(f"strip is on: white space around each {what} is removed")
    if before:
        from tokmill.text.commands import build_text

        finished = build_text.before(chosen, how, before, dry_run=dry_run, json=json)
        if finished is None:
            return 0
        chosen = finished
    if dry_run:
        _print_plan(chosen, json)
        return 0
    store = run(chosen, how)
    report(store, json=json)
    refused = _refused(store, chosen)
    for path, why in refused.items():
        say(f"{path}: refused, {why}")
    return 1 if refused else 0


def _recipe(
    name: str,
    inputs: list[str],
    out: Path | None,
    tokenizer: str | None,
    roles: list[str],
    values: list[str],
    options: dict[str, Any],
) -> BuildRecipe:
    stated: dict[str, Any] = {}
    over: dict[str, Any] = {"options": options} if options else {}
    where = "command line"
    if not name.endswith(".toml"):
        over["source"] = name
    else:
        stated, where = recipe.read_toml(name), name
        if "source" not in stated and stated.keys() & TRAINING:
            raise UsageError(
                "this is a recipe of a training, not of a build",
                where=where,
                hint=f"tokmill build KIND INPUT… -o STORE, then tokmill train {name} --data STORE "
                "-o RUN",
            )
    if inputs:
        over["inputs"] = inputs
    if out is not None:
        over["out"] = str(out)
    if tokenizer is not None:
        over["tokenizer"] = tokenizer
    for role in roles:
        key, _, token = role.partition("=")
        over = recipe.merge(over, {"roles": {key: token}}, once="")
    names = set(BuildRecipe.__struct_fields__)
    for key, value in recipe.overrides(values).items():
        # `--set fields=…` is short for `--set options.fields=…`, an option of the source.
        one = {key: value} if key in names else {"options": {key: value}}
        over = recipe.merge(over, one, once="")
    return recipe.convert(BuildRecipe, recipe.merge(stated, over), where)


ARRAY = tuple(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT", "STEP"))
NUMBER = re.compile(r"\d{1,9}", re.ASCII).fullmatch


def array_part(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the part of a task of a Slurm array, whose numbers need not begin with 1.

    Raises `UsageError` outside of an array, and in one whose numbers are no regular row: their
    places are not known to a task.
    """
    given = [environment.get(name, "") for name in ARRAY]
    lacking = [name for name, value in zip(ARRAY, given, strict=True) if not NUMBER(value)]
    if lacking:
        value = environment.get(lacking[0], "not set")
        raise UsageError(
            f"--part auto: {lacking[0]} is {value!r}, so this is not a task of a Slurm array",
            hint="sbatch --array=1-4 makes one; --part 1/4 … 4/4 name the parts elsewhere",
        )
    task, first, last, count, step = map(int, given)
    place, off = divmod(task - first, max(step, 1))
    if off or not 0 <= place < count or last - first != (count - 1) * max(step, 1):
        raise UsageError(
            f"--part auto: the array's {count} tasks from {first} to {last} in steps of {step} "
            f"are no regular row with the number {task}",
            hint="--array=1-N, without gaps; tasks that are done end at once when submitted again",
        )
    return place + 1, count


def _part(text: str) -> tuple[int, int]:
    if text == "auto":
        return array_part(os.environ)
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--part {text!r} is not i/n", hint="such as 1/4 … 4/4, or auto")
    return int(match[1]), int(match[2])


def _print_plan(chosen: BuildRecipe, json: bool) -> None:
    prepared = prepare(chosen)
    plan = prepared.plan
    if json:
        print_json(msgspec.to_builtins(plan))
        return
    print(f"source      {plan.recipe['source']}")
    print(f"items       {plan.items:,} ({human_bytes(plan.input_bytes)})")
    if isinstance(plan.left_out, dict):
        print(f"left out    {in_words(plan.left_out)}")
    print(f"shards      {plan.shards:,}")
    for column, spec in plan.schema.items():
        print(f"column      {column}: {spec.dtype} per {spec.per}")
    for name, vocabulary in plan.vocabularies.items():
        print(f"vocabulary  {name}: {vocabulary.size:,} ids, roles {vocabulary.roles}")
    for key, value in plan.recipe["config"].items():
        print(f"option      {key} = {msgspec.json.encode(value).decode()}")
    print(f"recipe_id   {plan.recipe_id}")
    print(f"plan_id     {plan.plan_id}")


def _refused(store: Store, chosen: BuildRecipe) -> dict[str, str]:
    if not plugins.load(plugins.SOURCES, chosen.source).rejects_items:
        return {}
    named = {Path(path).name: path for path in chosen.inputs if not Path(path).is_dir()}
    refused = {}
    for receipt in read_receipts(store.path):
        for rejects in receipt.rejects:
            item = receipt.items[rejects.item]
            if not item.records and item.name in named:
                refused[named[item.name]] = rejects.reason
    return refused
