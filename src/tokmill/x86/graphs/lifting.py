"""Graphs from any input with programs: programs, pickles of BinaryCorp, and graph files.

Which graphs of programs have to be made, making them in processes, and keeping them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from tokmill import plugins
from tokmill.base.bounds import bounded
from tokmill.base.errors import (
    MachineError,
    MissingExtraError,
    TokmillError,
    UsageError,
    check_name,
)
from tokmill.base.files import inside, make_folder, new_folder, remove_leftovers, sha256_file
from tokmill.base.headers import refused
from tokmill.base.progress import Progress, human_count
from tokmill.builds.processes import in_processes
from tokmill.builds.scan import NO_PROGRAM, FolderOptions, InputFile, Inputs, find_files
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import LINES, SUFFIX, About, read_about, read_graph, write_graph
from tokmill.x86.image import elf, pe
from tokmill.x86.image.program import producer_of

PICKLE = ".pkl"
PICKLES = "saved_index 3"


class Outcome(msgspec.Struct, frozen=True):
    """The result for one program."""

    program: str
    seconds: float = 0.0
    made: bool = False
    """False if its graph existed already, or the program was refused."""
    refused: str = ""
    """Why there is no graph."""
    hint: str = ""
    about: About | None = None


class Report(msgspec.Struct, frozen=True):
    """The result for all programs."""

    programs: int
    made: int
    kept: int
    functions: int
    blocks: int
    instructions: int
    edges: int
    unresolved: dict[str, int]
    """Reason → number of places at which control could not be followed."""
    refused: dict[str, int]
    """Reason → programs without a graph."""
    refusals: list[Outcome]
    left_out: dict[str, int]
    """Reason → files in folders that were not read."""
    seconds: float
    cut_short: dict[str, int] = {}
    """Reason why a search ended before it was complete → number of programs."""


class _Task(NamedTuple):
    file: InputFile
    out: Path
    """The graph file; for a pickle, which may hold several programs, the folder."""
    lifter: str
    version: str
    levels: tuple[str, ...] | None
    chosen: bool = True
    """Whether tokmill chose the name of the graph, and not the user."""


def lift_files(
    inputs: Sequence[str],
    out: Path,
    *,
    lifter: str = "native",
    levels: Sequence[str] | None = None,
    workers: int = 0,
    choice: FolderOptions | None = None,
    quiet: bool = True,
) -> Report:
    """Write the graph of each program below some paths.

    `out` is a folder, or for one program a file that ends in `SUFFIX` or `LINES`. An
    existing graph of the same bytes by the same lifter is kept. Raises `TokmillError` for paths
    that do not exist, `UsageError` for options that do not fit together and if `out` is another
    kind of file.
    """
    started = time.monotonic()
    check_name("no lifter is", lifter, plugins.LIFTERS)
    single = out.suffix in (SUFFIX, LINES)
    if out.is_file() and not single:
        raise UsageError(
            "is a file; graphs are written into a folder",
            where=str(out),
            hint="choose another path; for one program also -o GRAPH.parquet",
        )
    files, left_out = find_programs(inputs, choice=choice)
    if single and (len(files) != 1 or files[0].path.suffix == PICKLE):
        raise UsageError(
            f"{out} is one file, and there are {human_count(len(files), 'program')}"
            if len(files) != 1
            else f"{out} is one file, and {files[0].path} may hold several programs",
            hint="name a folder: it gets one file for each program",
        )
    check_levels(files, levels)
    tasks = _tasks(files, out, lifter, levels, single)
    read = {file.path.resolve() for file in files}
    if replaced := next((task.out for task in tasks if task.out.resolve() in read), None):
        raise UsageError(
            "the graph would replace the program", where=str(replaced), hint="choose another path"
        )
    folder = out.parent if single else out
    with new_folder(folder):
        # Graphs are written as a whole, so several processes may write into one folder.
        remove_leftovers(folder)
        hint = f"{MEMORY}; run the same command again and it continues"
        outcomes = _each(_make, tasks, workers, "lift", quiet, hint)
        done = sorted(outcomes, key=lambda outcome: outcome.program)
    return _report(done, left_out, time.monotonic() - started)


def _tasks(
    files: Sequence[InputFile], out: Path, lifter: str, levels: Sequence[str] | None, single: bool
) -> list[_Task]:
    version, chosen = lifter_version(lifter), None if levels is None else tuple(levels)
    places = {
        file: out
        if single or file.path.suffix == PICKLE
        else inside(out, f"{file.name}{SUFFIX}", deep=True)
        for file in files
    }
    return [
        _Task(file, place, lifter, version, chosen, not single) for file, place in places.items()
    ]


def find_programs(
    inputs: Sequence[str], graphs: tuple[str, ...] = (), choice: FolderOptions | None = None
) -> Inputs:
    """Return the programs and pickles below some paths, by name, and what was left out.

    A named file is always taken. Of a folder, files are taken that begin like a program (a file
    with several names once) or end in one of `graphs`, or those that `choice` names.
    """

    def fits(path: Path, head: bytes) -> str:
        taken = path.name.lower().endswith(graphs) if graphs else False
        if path.suffix == PICKLE:
            taken |= path.name.endswith(("saved_index.pkl", "_extract.pkl"))
        else:
            taken |= head[:4] == elf.MAGIC or head[:2] == pe.MAGIC
        return "" if taken else NO_PROGRAM

    return find_files(inputs, (), fits, choice, none_is_fine=True, once=True)


def check_levels(files: Sequence[InputFile], levels: Sequence[str] | None) -> None:
    """Refuse optimisation levels if there is no pickle among the inputs."""
    if levels is not None and not any(file.path.suffix == PICKLE for file in files):
        raise UsageError(
            "--levels are those of a saved_index.pkl, and none is among the inputs",
            hint="leave it out: the level of a program is read from its debug information",
        )


def lift_file(file: InputFile, lifter: str = "native", *, facts: bool = False) -> Graph:
    """Return the graph of a program with its name and compiler; raises what the lifter raises.

    With `facts` also imports, strings and constants, if the lifter is tokmill's own.
    """
    if lifter == "native":
        graph: Graph = plugins.require("tokmill.x86.lift.cfg").lift(file.path, facts=facts)
    else:
        graph = plugins.load(plugins.LIFTERS, lifter)(file.path)
        with refused(f"lifter {lifter} made a wrong graph", file.path, hint="update its package"):
            graph.check_entries()
    graph.program = file.name
    graph.compiler, graph.level = producer_of(file.path)
    return graph


def lifter_version(lifter: str) -> str:
    """Return name and versions of a lifter, which decide its graphs together with the program."""
    module = plugins.require(plugins.LIFTERS[lifter].target.partition(":")[0])
    return ", ".join([f"{lifter} {module.VERSION}", *module.packages()])


T = TypeVar("T", "_Task", "_Looked")
MEMORY = "most often memory ran out: try fewer --workers"


def _each(
    make: Callable[[T], list[Any]],
    tasks: Iterable[T],
    workers: int,
    title: str,
    quiet: bool,
    hint: str = MEMORY,
) -> Iterator[Any]:
    """Yield what a function makes of tasks, in the order in which they are done, in processes."""
    # Large programs first, so that no large one is left alone at the end.
    order = sorted(tasks, key=lambda task: (-task.file.size, task.file.name))
    done: Iterable[tuple[T, list[Any]]] = ((task, make(task)) for task in order)
    if workers > 0 and len(order) > 1:
        done = in_processes(make, order, min(workers, len(order)), hint=hint)
    with Progress(title, sum(task.file.size for task in order), quiet=quiet) as progress:
        for task, outcomes in done:
            yield from outcomes
            progress.advance(task.file.size)


def _make(task: _Task) -> list[Outcome]:
    started = time.monotonic()
    name, path = task.file.name, task.file.path
    try:
        digest = sha256_file(path)
        if path.suffix == PICKLE:
            return list(_make_pickled(task, digest))
        about = read_about(task.out)
        if about is not None and about.is_current(name, digest, task.version):
            return [Outcome(name, about=about)]
        if about is None and task.chosen and task.out.exists():
            what = "there is a file with the name of its graph that is not a graph"
            hint = "remove it if it is a damaged graph, or choose another folder"
            return [Outcome(name, refused=what, hint=hint)]
        with bounded(path):
            graph = lift_file(task.file, task.lifter, facts=True)
        make_folder(task.out.parent)
        about = write_graph(graph, task.out, digest, task.version)
        return [Outcome(name, time.monotonic() - started, True, about=about)]
    except (MachineError, MissingExtraError, UsageError):
        raise
    except TokmillError as error:
        return [Outcome(name, time.monotonic() - started, refused=error.what, hint=error.hint)]


def _make_pickled(task: _Task, digest: str) -> Iterator[Outcome]:
    """Write the graphs of a pickle of BinaryCorp; most of the time goes into reading it."""
    pickles = plugins.require("tokmill.x86.graphs.saved_index")
    for graph in pickles.graphs_of(task.file.path, task.levels):
        started = time.monotonic()
        graph.level = pickles.level_of(graph.program)
        out = inside(task.out, f"{graph.program}{SUFFIX}", deep=True)
        about = read_about(out)
        is_new = about is None or not about.is_current(graph.program, digest, PICKLES)
        if is_new:
            about = write_graph(graph, out, digest, PICKLES)
        yield Outcome(graph.program, time.monotonic() - started, is_new, about=about)


def _report(done: Sequence[Outcome], left_out: dict[str, int], seconds: float) -> Report:
    unresolved = Counter[str]()
    facts = [outcome.about for outcome in done if outcome.about is not None]
    for about in facts:
        unresolved.update({reason: len(places) for reason, places in about.unresolved.items()})
    cut_short = Counter(reason for about in facts for reason in about.cut_short)
    refused = Counter(outcome.refused for outcome in done if outcome.refused)
    return Report(
        programs=len(done),
        made=sum(outcome.made for outcome in done),
        kept=sum(outcome.about is not None and not outcome.made for outcome in done),
        functions=sum(about.functions for about in facts),
        blocks=sum(about.blocks for about in facts),
        instructions=sum(about.instructions for about in facts),
        edges=sum(about.edges for about in facts),
        unresolved=dict(sorted(unresolved.items())),
        refused=dict(sorted(refused.items())),
        refusals=[outcome for outcome in done if outcome.refused],
        left_out=left_out,
        seconds=seconds,
        cut_short=dict(sorted(cut_short.items())),
    )


def find_inputs(inputs: Sequence[str], choice: FolderOptions | None = None) -> Inputs:
    """Return programs, pickles and graph files below some paths, and what was left out.

    Like `find_programs`, but takes graph files in folders too.
    """
    return find_programs(inputs, graphs=(SUFFIX,), choice=choice)


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
    elif file.path.suffix == SUFFIX:
        yield read_graph(file.path)
    else:
        yield lift_file(file, lifter, facts=facts)


def graphs_of_path(path: Path | str) -> Iterator[Graph]:
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


def map_graphs(
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
    chosen = None if levels is None else tuple(levels)
    yield from _each(_look, (_Looked(look, file, chosen) for file in files), workers, title, quiet)


class _Looked(NamedTuple):
    look: Callable[[Graph], Any]
    file: InputFile
    levels: tuple[str, ...] | None


def _look(task: _Looked) -> list[Seen]:
    seen = []
    try:
        for graph in graphs_in(task.file, task.levels):
            seen.append(Seen(graph.program, task.look(graph)))
    except (MachineError, MissingExtraError, UsageError):
        raise
    except TokmillError as error:
        seen.append(Seen(task.file.name, refused=error.what, hint=error.hint))
    return seen
