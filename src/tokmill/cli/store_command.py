"""`tokmill store`: validate, rejects, push, pull, export."""

import shlex
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import UsageError
from tokmill.base.files import address_of
from tokmill.base.progress import Progress, human_bytes, human_count
from tokmill.formats.notes import Checked
from tokmill.store.schema import place_in_words
from tokmill.store.store import Store
from tokmill.terminal.frame import (
    Json,
    Quiet,
    as_command,
    given,
    group_of,
    lazy_group,
    struct_parameters,
    with_parameters,
)
from tokmill.terminal.output import print_json, print_line, say

SAME_BUILD = "the same `tokmill build` makes again what is damaged or missing"
StorePath = Annotated[Path, typer.Argument(readable=False, help="Folder of the store.")]


def validate(
    store: StorePath,
    deep: Annotated[
        int, typer.Option(metavar="N", min=0, help="Also build N shards again and compare.")
    ] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="For .npz files: check ids against its size.")
    ] = None,
    json: Json = False,
) -> int:
    """Check a store, an export, or .npz files of other programs; exit code 1 for a problem."""
    from tokmill.builds.remake import deep_check
    from tokmill.formats import notes
    from tokmill.store.checks import validate as checks
    from tokmill.store.marks import is_store

    if address_of(store):
        noted = windows = False
    else:
        noted = not is_store(store) and bool(notes.find_notes(store))
        windows = (store.is_file() and store.suffix == ".npz") or any(store.glob("*.npz"))
    if tokenizer and not windows:
        raise UsageError("--tokenizer is for .npz files", hint="leave it out")
    if deep and (noted or (windows and not is_store(store))):
        raise UsageError("--deep is for stores", hint="leave it out")
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
            print_line(f"{problem.where}: {problem.what}")
        state = "complete" if report.complete else "partial"
        verdict = "ok" if report.ok else human_count(len(problems), "problem")
        print_line(
            f"{opened.place}: {verdict}, {state}, "
            f"{human_count(report.records, 'record')}, {human_count(report.tokens, 'token')}, "
            f"{human_count(report.shards, 'shard')}, "
            f"{human_count(report.empty_records, 'empty record')}"
            + (f", {min(deep, report.shards)} made again" if deep and report.ok else "")
        )
    if not report.ok:
        if damaged := shlex.join(one.remove for one in problems if one.remove):
            say(f"hint: rm {damaged}")
        for hint in dict.fromkeys(one.hint or SAME_BUILD for one in problems):
            say(f"hint: {hint}")
    return 0 if report.ok else 1


def _report_files(checked: Checked, hint: str, json: bool) -> int:
    if json:
        print_json({**msgspec.to_builtins(checked), "ok": checked.ok})
    else:
        for problem in checked.problems:
            print_line(f"{problem.where}: {problem.what}")
        state = "ok" if checked.ok else human_count(len(checked.problems), "problem")
        kinds = ", ".join(dict.fromkeys(checked.exports)) or "unknown"
        print_line(
            f"{checked.path}: {state}, export ({kinds}), {human_count(checked.files, 'file')}, "
            f"{human_bytes(checked.bytes)}"
        )
    if not checked.ok:
        say(f"hint: {hint}")
    return 0 if checked.ok else 1


def rejects(
    store: StorePath,
    skipped: Annotated[
        bool,
        typer.Option("--skipped", help="Also records skipped by a rule; reads the inputs again."),
    ] = False,
    most: Annotated[int, typer.Option(metavar="N", min=0, help="How many to list.")] = 20,
    json: Json = False,
) -> None:
    """List rejected records: input, line, byte, reason."""
    from tokmill.builds.remake import each_left_out, left_out

    opened = Store(store)
    if skipped:
        first = list(islice(each_left_out(opened), most))
    else:
        first = left_out(opened, most=most)
    if json:
        manifest = opened.manifest
        counts = {"rejected": manifest.rejected, "skipped": manifest.skipped}
        print_json({**counts, "unit": manifest.unit, "first": first})
        return
    for one in first:
        line = f"line {one.line:,}, " if one.line else ""
        kind = "rejected" if one.rejected else "skipped"
        place = f"{line}{place_in_words(one.byte, opened.manifest.unit)}"
        # There is no code at address 0: it stands for the whole program.
        whole = one.byte == 0 and "address" in opened.schema
        print_line(f"{one.path or one.item}: {'' if whole else f'{place}: '}{kind}, {one.reason}")
    total = sum(opened.manifest.rejected.values())
    total += sum(opened.manifest.skipped.values()) if skipped else 0
    print_line(f"{store}: {total:,} left out, {len(first):,} listed")
    if not skipped and (by_rule := sum(opened.manifest.skipped.values())):
        say(f"{by_rule:,} more were skipped by rule: --skipped lists them")
    # Builds of tables have no --explain.
    if first and first[0].line and not first[0].path.endswith(".tsv"):
        say(f"hint: --explain {first[0].path}:{first[0].line} with the build shows its steps")


def push(
    store: StorePath,
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Such as s3://BUCKET/NAME.")],
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Publish a finished store in a bucket; the same command resumes."""
    from tokmill.store import publish

    size = Store(store).manifest.bytes
    with Progress("push", size, quiet=quiet) as bar:
        done = publish.push(store, address, bar.advance)
    if json:
        print_json(done)
    else:
        sent = f"{human_count(done.sent, 'file')} sent ({human_bytes(done.bytes)})"
        print_line(f"{done.address}: {sent}, {done.there:,} were there")
    if done.left_out:
        say(f"note: not sent: unfinished or outdated overlays {', '.join(done.left_out)}")
    if not done.conditional:
        say("warning: this server ignores If-None-Match: of two pushes to one address at a time,")
        say("one could replace files of the other. The manifest was read back and compared.")


def pull(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Such as s3://BUCKET/NAME.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the store.")],
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Copy a store from an address into a folder, and verify it; the same command resumes."""
    from tokmill.store import publish
    from tokmill.store.remote_store import read_manifest

    size = read_manifest(address_of(address))[1].bytes if address_of(address) else 0
    with Progress("pull", size, quiet=quiet) as bar:
        store = publish.pull(address, out, bar.advance)
    if json:
        print_json({"store": str(out), "records": store.records, "tokens": store.tokens})
    else:
        counts = human_count(store.records, "record"), human_count(store.tokens, "token")
        print_line(f"{out}: {', '.join(counts)}")


def load_format(name: str) -> Any:
    if name not in plugins.EXPORTS:
        return None
    line = f"Write a store as {plugins.EXPORTS[name].help}."
    kind = plugins.load(plugins.EXPORTS, name)

    def base(
        store: StorePath,
        out: Annotated[Path, typer.Option("-o", "--out", help="File or folder to write.")],
        partial: Annotated[bool, typer.Option(help="Also write an unfinished store.")] = False,
        json: Json = False,
        **more: Any,
    ) -> None:
        opened = Store(store)
        if not partial:
            opened.whole("finish it, or use --partial")
        config = recipe.convert(kind.Config, given(more), f"options of {name}")
        written = kind(config).write(opened, out)
        if json:
            print_json(written)
            return
        shown = ", ".join(
            f"{key} {human_bytes(value) if key == 'bytes' else f'{value:,}'}"
            for key, value in written.items()
            if isinstance(value, int)
        )
        print_line(f"{out}: {shown}")
        if "note" in written:
            say(f"note: {written['note']}")

    return as_command(with_parameters(base, struct_parameters(kind.Config), line), name)


export = lazy_group(
    "export",
    "Write a store in the format of another program.",
    lambda: {name: (None, part.help) for name, part in plugins.EXPORTS.items()},
    load_format,
)

app = group_of(
    "store",
    "Validate, publish or export a store; list rejected records.",
    {"validate": validate, "rejects": rejects, "push": push, "pull": pull},
    {"export": export},
)
