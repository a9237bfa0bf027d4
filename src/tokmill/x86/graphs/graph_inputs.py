"""Graphs from any input with programs: programs, pickles of BinaryCorp, and graph files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokmill import plugins
from tokmill.base.errors import MachineError, MissingExtraError, TokmillError, UsageError
from tokmill.base.progress import Progress
from tokmill.builds.execution.processes import in_processes
from tokmill.builds.scan import FolderOptions, InputFile, Inputs, find_files
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import SUFFIX, read_graph
from tokmill.x86.graphs.lifting import PICKLE, check_levels, find_programs, lift_file

GRAPH = SUFFIX


def find_inputs(inputs: Sequence[str], choice: FolderOptions | None = None) -> Inputs:
    """Return programs, pickles and graph files below some paths, and what was left out.

    Like `find_programs`, but takes graph files in folders too.
    """
    return find_programs(inputs, graphs=(GRAPH,), choice=choice)


def graphs_in(
    file: InputFile,
    levels: Sequence[str] | None = None,
    lifter: str = "native",
    *,
    facts: bool = False,
) -> Iterator[Graph]:
    """Yield the graphs of one input: one for each program of a pickle, else one.

    A program is lifted here, by `lifter`, with `facts` also searched for imports, strings and
    constants. Raises `TokmillError` for a file that is not a program, a
    pickle or a graph.
    """
    if file.path.suffix == PICKLE:
        yield from plugins.require("tokmill.x86.graphs.saved_index").graphs_of(file.path, levels)
    elif file.path.suffix == GRAPH:
        yield read_graph(file.path)
    else:
        yield lift_file(file, lifter, facts=facts)


def graphs_of_path(path: Path | str) -> Iterator[Graph]:
    """Yield the graphs of one file, like `graphs_in`."""
    if Path(path).is_dir():
        raise TokmillError("this is a folder", where=str(path), hint="name one file in it")
    for file in find_files([str(path)], ()).files:
        yield from graphs_in(file)


class Seen(NamedTuple):
    """What was made from one program, or why nothing was made."""

    program: str
    value: Any = None
    refused: str = ""
    hint: str = ""


def look_at(
    look: Callable[[Graph], Any],
    files: Sequence[InputFile],
    *,
    levels: Sequence[str] | None = None,
    workers: int = 0,
    title: str = "look",
    quiet: bool = True,
) -> Iterator[Seen]:
    """Yield the result of a function for the graph of each program, in the order they are done.

    `look` must be importable by name, because `workers` processes call it; with 0 this process
    does. Programs that cannot be read or lifted are yielded as refused. Raises `UsageError` for
    `levels` without a pickle.
    """
    check_levels(files, levels)
    # Large programs first, so that no large one is left alone at the end.
    order = sorted(files, key=lambda file: (-file.size, file.name))
    tasks = [_Task(look, file, None if levels is None else tuple(levels)) for file in order]
    done: Iterable[tuple[_Task, list[Seen]]]
    if workers > 0 and len(tasks) > 1:
        done = in_processes(
            _look,
            tasks,
            min(workers, len(tasks)),
            hint="most often memory ran out: try fewer --workers",
        )
    else:
        done = ((task, _look(task)) for task in tasks)
    with Progress(title, sum(file.size for file in files), quiet=quiet) as progress:
        for task, found in done:
            yield from found
            progress.advance(task.file.size)


class _Task(NamedTuple):
    look: Callable[[Graph], Any]
    file: InputFile
    levels: tuple[str, ...] | None


def _look(task: _Task) -> list[Seen]:
    seen = []
    try:
        for graph in graphs_in(task.file, task.levels):
            seen.append(Seen(graph.program, task.look(graph)))
    except (MachineError, MissingExtraError, UsageError):
        raise
    except TokmillError as error:
        seen.append(Seen(task.file.name, refused=error.what, hint=error.hint))
    return seen
