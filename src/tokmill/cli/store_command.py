"""`tokmill store`: validate, repair, refer, locate, duplicates, export, finish."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import UNSET

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.progress import human_bytes, human_count
from tokmill.formats.notes import Checked
from tokmill.store.schema import place_in_words
from tokmill.store.store import Store
from tokmill.terminal.lazy import as_command, group_of, lazy_group
from tokmill.terminal.options import Json
from tokmill.terminal.output import print_json, say
from tokmill.terminal.structs import given, settings, struct_parameters, with_parameters

StorePath = Annotated[Path, typer.Argument(readable=False, help="Folder of the store.")]


def validate(
    store: StorePath,
    deep: Annotated[int, typer.Option(help="Also make N shards again and compare.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Of .npz files of others: ids are compared with its size.")
    ] = None,
    json: Json = False,
) -> int:
    """Check a store, the files of an export, or .npz files of others; exit code 1 for a problem."""
    from tokmill.builds.repair.repair import deep_check
    from tokmill.formats import notes
    from tokmill.store.checks import validate as checks
    from tokmill.store.marks import is_store

    noted = not is_store(store) and notes.find_notes(store)
    windows = (store.is_file() and store.suffix == ".npz") or any(store.glob("*.npz"))
    if tokenizer and not windows:
        raise UsageError("--tokenizer is for .npz files", hint="leave it out")
    if windows and (tokenizer or not (noted or is_store(store))):
        from tokmill.formats.windows import npz

        return _report_files(npz.check(store, tokenizer), "make them again, or fetch them", json)
    if noted:
        return _report_files(notes.check(store), "the same `tokmill store export` again", json)
    opened = Store(store)
    report = checks.validate(opened, quiet=False)
    problems = list(report.problems)
    if deep and not problems:
        problems += deep_check(opened, deep)
    report = msgspec.structs.replace(report, problems=problems)
    if json:
        print_json({**msgspec.to_builtins(report), "ok": report.ok})
    else:
        for problem in problems:
            print(f"{problem.where}: {problem.what}")
        state = "complete" if report.complete else "partial"
        print(
            f"{store}: {'ok' if report.ok else human_count(len(problems), 'problem')}, {state}, "
            f"{human_count(report.records, 'record')}, {human_count(report.tokens, 'token')}, "
            f"{human_count(report.shards, 'shard')}, "
            f"{human_count(report.empty_records, 'empty record')}"
            + (f", {deep} made again" if deep and report.ok else "")
        )
    if not report.ok:
        for mend in dict.fromkeys(one.mend or f"tokmill store repair {store}" for one in problems):
            say(f"hint: {mend}")
    return 0 if report.ok else 1


def _report_files(found: Checked, hint: str, json: bool) -> int:
    """Print the result of a check of token files; return the exit code."""
    if json:
        print_json({**msgspec.to_builtins(found), "ok": found.ok})
    else:
        for problem in found.problems:
            print(f"{problem.where}: {problem.what}")
        state = "ok" if found.ok else human_count(len(found.problems), "problem")
        kinds = ", ".join(dict.fromkeys(found.exports)) or "unknown"
        print(
            f"{found.path}: {state}, export ({kinds}), {human_count(found.files, 'file')}, "
            f"{human_bytes(found.bytes)}"
        )
    if not found.ok:
        say(f"hint: {hint}")
    return 0 if found.ok else 1


def repair(
    store: StorePath,
    input_: Annotated[
        list[str] | None, typer.Option("--input", help="Make the shards of this input again.")
    ] = None,
    json: Json = False,
) -> int:
    """Make damaged shards again from their inputs."""
    from tokmill.builds.repair.repair import repair as mend

    done = mend(store, input_ or (), quiet=False)
    if json:
        print_json(done)
    else:
        made = human_count(len(done.shards), "shard")
        print(f"{store}: {made} made again {' '.join(done.shards)}".rstrip())
        if done.files:
            print(f"{store}: written again: {', '.join(done.files)}")
        for problem in done.remaining:
            print(f"{problem.where}: {problem.what}")
    return 1 if done.remaining else 0


def refer(
    store: StorePath,
    column: Annotated[str, typer.Argument(help="Column that refers to another store.")],
    new: Annotated[Path, typer.Argument(help="Where that store is now.")],
    json: Json = False,
) -> None:
    """Set the new place of a store to which a column refers; it must be the same store."""
    from tokmill.store.references import refer as move

    columns = move(store, column, new)
    if json:
        print_json({"store": str(store), "columns": columns, "refers_to": str(new.absolute())})
    else:
        print(f"{store}: {', '.join(columns)} → {new}")


def locate(
    store: StorePath,
    what: Annotated[str, typer.Argument(help="A record number, or COLUMN=VALUE.")],
    json: Json = False,
) -> None:
    """Show where a record is on disk, and from which input it came."""
    from tokmill.store.checks import locate as places

    opened = Store(store)
    if "=" in what:
        column, _, value = what.partition("=")
        numbers = list(places.find_records(opened, column, value))
        if not numbers:
            raise TokmillError(
                f"no record has {what}",
                where=str(store),
                hint="`tokmill inspect STORE` shows the first records",
            )
    elif what.isdecimal():
        numbers = [int(what)]
    else:
        raise UsageError(
            f"{what!r} is neither a number nor COLUMN=VALUE",
            hint="tokmill store locate STORE 17, or id=abc",
        )
    found = [places.locate(opened, number) for number in numbers]
    if json:
        print_json(found)
        return
    for place in found:
        where = place_in_words(place.byte, opened.manifest.unit)
        print(
            f"record {place.record}: {human_count(place.tokens, 'token')}; input {place.item} "
            f"({place.path}) at {where}; shard {place.shard}, record "
            f"{place.record_in_shard:,}, token {place.token_start:,}"
        )


def rejects(
    store: StorePath,
    skipped: Annotated[
        bool,
        typer.Option(
            "--skipped", help="Also records skipped by a rule; reads the inputs again, as --each."
        ),
    ] = False,
    each: Annotated[
        bool, typer.Option("--each", help="List each record; reads the inputs again.")
    ] = False,
    most: Annotated[int, typer.Option(help="How many to list.")] = 20,
    json: Json = False,
) -> None:
    """List the records that were left out: input, line, byte, reason.

    Successive records that were rejected for the same reason are one line.
    """
    from tokmill.builds.repair.repair import each_left_out
    from tokmill.store.checks.locate import left_out

    opened = Store(store)
    if each or skipped:
        found = list(islice(each_left_out(opened, rejected_only=not skipped), most))
    else:
        found = left_out(opened, most=most)
    if json:
        manifest = opened.manifest
        print_json({"rejected": manifest.rejected, "skipped": manifest.skipped, "first": found})
        return
    for one in found:
        line = f"line {one.line:,}, " if one.line else ""
        kind = "rejected" if one.rejected else "skipped"
        place = f"{line}{place_in_words(one.byte, opened.manifest.unit)}"
        # There is no code at address 0: it stands for the whole program.
        whole = one.byte == 0 and "address" in opened.schema
        more = ""
        if one.last is not UNSET:
            more = f" ({one.count:,} to {place_in_words(one.last, opened.manifest.unit)})"
        print(f"{one.path or one.item}: {'' if whole else f'{place}: '}{kind}, {one.reason}{more}")
    total = sum(opened.manifest.rejected.values())
    total += sum(opened.manifest.skipped.values()) if skipped else 0
    listed = sum(one.count for one in found)
    print(f"{store}: {total:,} left out, {listed:,} listed")
    if not skipped and (by_rule := sum(opened.manifest.skipped.values())):
        say(f"{by_rule:,} more were skipped by rule: --skipped lists them")
    # Builds of tables have no --explain.
    if found and found[0].line and not found[0].path.endswith(".tsv"):
        say(f"hint: --explain {found[0].path}:{found[0].line} with the build shows every stage")


def duplicates(
    store: StorePath,
    other: Annotated[
        Path | None, typer.Argument(help="Another store: report the records that both have.")
    ] = None,
    json: Json = False,
) -> int:
    """Find equal records in a store, or a leak between two; exit code 1 if there are some."""
    from tokmill.store.checks.duplicates import find_duplicates, find_leak

    result: Any
    if other is None:
        result = find_duplicates(Store(store))
        count, text = result.duplicates, "repeat"
    else:
        result = find_leak(Store(store), Store(other))
        count, text = result.shared, f"are in {other}"
    if json:
        print_json(result)
    else:
        print(f"{store}: {count:,} of {result.records:,} records {text}")
        for record, first in result.examples:
            print(f"  record {record:,} = {first:,}")
        if count:
            way = f"--not-in {other}" if other else "--unique"
            say(f"hint: tokmill build select {store} {way} -o NEW")
    return 1 if count else 0


def finish(
    store: StorePath,
    max_rejects: Annotated[float, typer.Option(help="Largest share of rejected records.")] = 0.01,
    json: Json = False,
) -> int:
    """Write the manifest of a store whose parts were built with --part."""
    from tokmill.builds.finish import finish_parts
    from tokmill.cli.print_facts import summary

    missing = finish_parts(store, max_rejects)
    facts = {**summary(Store(store)), "missing_shards": missing}
    if json:
        print_json(facts)
    elif missing:
        print(f"{store}: {human_count(missing, 'shard')} missing")
        say("hint: run the parts that have not ended again")
    else:
        print(
            f"{store}: complete, {human_count(facts['records'], 'record')}, "
            f"{human_count(facts['tokens'], 'token')}"
        )
    return 1 if missing else 0


def load_format(name: str) -> Any:
    """Return the command of a format, made from its options."""
    if name not in plugins.EXPORTS:
        return None
    line = f"Write a store as {plugins.EXPORTS[name].help}."
    kind = plugins.load(plugins.EXPORTS, name)

    def base(
        store: StorePath,
        out: Annotated[Path, typer.Option("-o", "--out", help="File or folder to write.")],
        set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE.")] = None,
        partial: Annotated[bool, typer.Option(help="Also write an unfinished store.")] = False,
        json: Json = False,
        **more: Any,
    ) -> None:
        opened = Store(store)
        if opened.partial and not partial:
            raise TokmillError(
                "the store is not complete", where=str(store), hint="finish it, or use --partial"
            )
        options = recipe.merge(given(more), settings(set_))
        config = recipe.convert(kind.Config, options, f"options of {name}")
        written = kind(config).write(opened, out)
        if json:
            print_json(written)
            return
        shown = ", ".join(
            f"{key} {human_bytes(value) if key == 'bytes' else f'{value:,}'}"
            for key, value in written.items()
            if isinstance(value, int)
        )
        print(f"{out}: {shown}")
        if "note" in written:
            say(f"note: {written['note']}")

    return as_command(with_parameters(base, struct_parameters(kind.Config), line), name)


export = lazy_group(
    "export",
    "Write a store in a foreign format.",
    lambda: {name: (None, part.help) for name, part in plugins.EXPORTS.items()},
    load_format,
)

app = group_of(
    "store",
    "Validate, repair, locate, export a store; see what was left out.",
    {
        "validate": validate,
        "repair": repair,
        "refer": refer,
        "locate": locate,
        "rejects": rejects,
        "duplicates": duplicates,
        "finish": finish,
    },
    {"export": export},
)
