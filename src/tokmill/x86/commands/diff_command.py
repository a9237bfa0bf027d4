"""`tokmill diff`: what changed between two programs."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import make_folder
from tokmill.terminal.frame import Json, Quiet
from tokmill.terminal.output import check_outputs, print_json, print_line
from tokmill.x86.commands.program_options import MOST_LISTED

SAME, DIFFER = 0, 1
"""Exit codes, as of `diff`; what is refused is 2, as there is no answer then."""


def diff(
    old: Annotated[
        Path,
        typer.Argument(
            metavar="OLD", help="A program (ELF or PE for x86), or a graph file of `tokmill cfg`."
        ),
    ],
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
            help="Match functions with the same symbol name.",
        ),
    ] = True,
    quiet: Quiet = False,
    json: Json = False,
) -> int:
    """Find which functions and blocks of two programs are the same, and which changed.

    Exit code 0: no function, and no data, import or export that was compared, differs; 1: some do;
    2 and above: the inputs cannot be compared.
    """
    try:
        check_outputs({"--out": out, "--html": html}, (old, new))
        if out is not None and out.suffix.lower() != ".json":
            raise UsageError("diff writes JSON", where=str(out), hint="such as -o diff.json")
        return _programs(old, new, (out, html), names, json)
    except TokmillError as error:
        if error.exit_code != DIFFER:
            raise
        raise UsageError(error.what, where=error.where, hint=error.hint) from None


def _programs(
    old: Path, new: Path, outs: tuple[Path | None, Path | None], names: bool, json: bool
) -> int:
    from tokmill.x86.commands.diff_tables import print_programs
    from tokmill.x86.diff.output.diff_json import diff_file, write_diff
    from tokmill.x86.diff.output.summary import changed_most, counts_of
    from tokmill.x86.diff.program_diff import diff_graphs, digest_of, graph_of

    graphs = graph_of(old), graph_of(new)
    called = _distinct_names((graphs[0].program, graphs[1].program), (old, new))
    result = diff_graphs(*graphs, names=names)
    digests = digest_of(old), digest_of(new)
    out, html = outs
    if out is not None:
        make_folder(out.parent)
        write_diff(out, diff_file(*graphs, result, digests))
    if html is not None:
        from tokmill.x86.diff.output.diff_page import diff_page

        diff_page(*graphs, result, html, called=called)
    counts = counts_of(*graphs, result)
    if json:
        most = changed_most(*graphs, result, MOST_LISTED)
        print_json(
            {
                "same": result.same,
                "same_bytes": digests[0] == digests[1],
                "counts": counts,
                "changed_most": [msgspec.to_builtins(change) for change in most],
                "other": msgspec.to_builtins(result.other),
                "left_out": result.left_out,
            }
        )
    else:
        print_programs(graphs, called, result, counts, digests[0] == digests[1])
        for path in filter(None, outs):
            print_line(f"{path}: written")
    return DIFFER if result.other.any or not result.same else SAME


def _distinct_names(names: tuple[str, str], paths: tuple[Path, Path]) -> tuple[str, str]:
    """Return the names of two programs; of one name, the ends of their paths that differ."""
    parts = paths[0].parts, paths[1].parts
    if names[0] != names[1] or parts[0] == parts[1]:
        return names
    end = next(n for n in range(1, 1 + max(map(len, parts))) if parts[0][-n:] != parts[1][-n:])
    return str(Path(*parts[0][-end:])), str(Path(*parts[1][-end:]))
