"""`tokmill diff`: two programs, or two folders of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import make_folder, path_from_text, sha256_file, write_file
from tokmill.base.progress import human_count
from tokmill.builds.scan import FolderOptions
from tokmill.terminal.options import At, Json, Quiet
from tokmill.terminal.output import check_outputs, print_json
from tokmill.x86.commands.program_options import (
    MOST_LISTED,
    Glob,
    Suffix,
    Workers,
    choice,
    processes,
)

SAME, DIFFER = 0, 1
"""Exit codes, as of `diff`; what is refused is 2, as there is no answer then."""
KNOWN = "a program (ELF or PE for x86), a graph file of `tokmill cfg`, or two folders of them"


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help=f"{KNOWN}.", show_default=False)],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The same, of the new version.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="diff.json", help="Write all matches as JSON."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="page.html", help="Write a page that shows both, side by side."
        ),
    ] = None,
    names: Annotated[
        bool,
        typer.Option(
            "--names/--no-names",
            help="Whether functions of the same symbol name are taken for the same.",
        ),
    ] = True,
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Compare vectors by the model of this run, too."),
    ] = None,
    at: At = "last",
    device: Annotated[str, typer.Option(help="Of the run: cpu, cuda or auto.")] = "auto",
    workers: Workers = None,
    suffix: Suffix = None,
    glob: Glob = None,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Find which functions and blocks of two programs are the same, and which changed.

    Exit code 0: no function, and no data, import or export that was compared, differs; 1: some do;
    2 and above: the inputs cannot be compared.
    """
    try:
        if out is not None and out.suffix.lower() == ".bindiff":
            raise UsageError(
                "diff writes JSON",
                where=str(out),
                hint="for BinDiff, `tokmill cfg PROGRAM -o NAME.BinExport` of both programs",
            )
        if old.is_dir() and new.is_dir():
            named = {"--run": run, "--html": html}
            if option := next((name for name, value in named.items() if value), ""):
                raise UsageError(
                    f"{option} is for two programs, not for two folders",
                    hint=f"leave {option} out, or name one program of each folder",
                )
            return _folders(old, new, out, names, workers, choice(suffix, glob), quiet, json)
        if old.is_dir() or new.is_dir():
            raise UsageError(
                "one is a folder and the other is not",
                where=str(old if old.is_dir() else new),
                hint="compare two programs, or two folders",
            )
        check_outputs({"--out": out, "--html": html}, (old, new))
        return _programs(old, new, (out, html), names, (run, at, device, quiet), json)
    except TokmillError as error:
        if error.exit_code != DIFFER:
            raise
        raise UsageError(error.what, where=error.where, hint=error.hint) from None


def _programs(
    old: Path,
    new: Path,
    outs: tuple[Path | None, Path | None],
    names: bool,
    model: tuple[Path | None, str, str, bool],
    json: bool,
) -> int:
    from tokmill.x86.commands.diff_tables import print_programs
    from tokmill.x86.diff.output.diff_json import diff_file, write_diff
    from tokmill.x86.diff.output.summary import changed_most, counts_of
    from tokmill.x86.diff.program_diff import diff_graphs

    graphs = _read(old), _read(new)
    called = _told_apart((graphs[0].program, graphs[1].program), (old, new))
    vectors = None
    if model[0] is not None:
        from tokmill.x86.commands.diff_vectors import vectors_of

        vectors = vectors_of(graphs, model[0], at=model[1], device=model[2], quiet=model[3])
    found = diff_graphs(*graphs, names=names, vectors=vectors)
    digests = sha256_file(old), sha256_file(new)
    out, html = outs
    if out is not None:
        make_folder(out.parent)
        write_diff(out, diff_file(*graphs, found, digests))
    if html is not None:
        from tokmill.x86.diff.output.diff_page import diff_page

        diff_page(*graphs, found, html, called=called)
    counts = counts_of(*graphs, found)
    if json:
        most = changed_most(*graphs, found, MOST_LISTED)
        print_json(
            {
                "same": found.same,
                "same_bytes": digests[0] == digests[1],
                "counts": counts,
                "changed_most": [msgspec.to_builtins(change) for change in most],
                "other": msgspec.to_builtins(found.other),
                "left_out": found.left_out,
            }
        )
    else:
        print_programs(graphs, called, found, counts, digests[0] == digests[1])
        for path in filter(None, outs):
            print(f"{path}: written")
    return DIFFER if found.other.any or not found.same else SAME


def _told_apart(names: tuple[str, str], paths: tuple[Path, Path]) -> tuple[str, str]:
    """Return the names of two programs; of one name, the ends of their paths that differ."""
    parts = paths[0].parts, paths[1].parts
    if names[0] != names[1] or parts[0] == parts[1]:
        return names
    end = next(n for n in range(1, 1 + max(map(len, parts))) if parts[0][-n:] != parts[1][-n:])
    return str(Path(*parts[0][-end:])), str(Path(*parts[1][-end:]))


def _read(path: Path) -> Any:
    from tokmill.x86.diff.folders import one_graph
    from tokmill.x86.graphs.graph_inputs import find_inputs

    return one_graph(find_inputs([str(path)]).files[0])


def _folders(
    old: Path,
    new: Path,
    out: Path | None,
    names: bool,
    workers: int | None,
    options: FolderOptions,
    quiet: bool,
    json: bool,
) -> int:
    from tokmill.x86.commands.diff_tables import print_folders
    from tokmill.x86.diff.folders import diff_folders

    found = diff_folders(
        old, new, names=names, workers=processes(workers), choice=options, quiet=quiet
    )
    if not found.matched and not found.deleted and not found.inserted:
        raise UsageError("there are no programs", where=f"{old}, {new}", hint=KNOWN)
    if out is not None:
        check_outputs({"--out": out}, _programs_of(found))
        make_folder(out.parent)
        write_file(out, msgspec.json.encode(found) + b"\n")
    if json:
        print_json(found)
    else:
        print_folders(found)
        if out is not None:
            print(f"{out}: written")
    if refused := [pair for pair in found.matched if pair.refused]:
        raise UsageError(
            f"{human_count(len(refused), 'program')} could not be compared",
            where=refused[0].a,
            hint=f"the first: {refused[0].refused}; --glob leaves files out",
        )
    return SAME if found.same else DIFFER


def _programs_of(found: Any) -> Iterator[Path]:
    """Yield the files that were compared or have no partner in the other folder."""
    for folder, side, alone in ((found.a, "a", found.deleted), (found.b, "b", found.inserted)):
        for name in [*(getattr(pair, side) for pair in found.matched), *alone]:
            yield Path(folder, path_from_text(name))
