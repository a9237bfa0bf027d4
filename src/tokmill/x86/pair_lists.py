"""Which programs are pairs: graph files by their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.builds.scan import NO_PROGRAM, FolderOptions, InputFile, find_files, in_order
from tokmill.x86.graphs.graph_files import read_facts
from tokmill.x86.graphs.lifting import GRAPH


class GraphFile(NamedTuple):
    """A graph file, and the name of its program."""

    file: InputFile
    program: str


def find_graphs(
    inputs: Sequence[str], choice: FolderOptions | None = None
) -> tuple[list[GraphFile], dict[str, int]]:
    """Return the graph files below some paths, and what was left out.

    A Parquet file in a folder that holds something else is left out. Raises `TokmillError` if there
    is no graph, for a named file that is not a graph, and for a graph that is damaged or of a later
    version, because the name of its program cannot be read.
    """
    make_them = "make them first, once for all pairs: tokmill cfg FOLDER -o GRAPHS"
    files, left_out = find_files(inputs, (GRAPH,), choice=choice, instead=make_them)
    named = {Path(argument).absolute() for argument in inputs}
    found = []
    for file in files:
        about = read_facts(file.path) if file.path.suffix == GRAPH else None
        if about is not None:
            found.append(GraphFile(file, about.program))
        elif file.path.absolute() in named:
            raise TokmillError(
                "this is not a graph of a program",
                where=str(file.path),
                hint=f"make one, once for all its pairs: tokmill cfg {file.path} -o GRAPHS",
            )
        else:
            left_out[NO_PROGRAM] = left_out.get(NO_PROGRAM, 0) + 1
    if not found:
        raise TokmillError(
            "there are no graphs of programs",
            where=", ".join(inputs),
            hint=make_them,
        )
    return found, in_order(left_out)


class Names:
    """Finds graphs by the name of the program, or by the name or path of the graph file."""

    def __init__(self, graphs: Sequence[GraphFile]) -> None:
        self.graphs: dict[str, list[GraphFile]] = {}
        for graph in graphs:
            file = graph.file
            names = {file.name, file.name.removesuffix(GRAPH), str(file.path.absolute())}
            for name in {*names, graph.program, str(file.path)}:
                self.graphs.setdefault(name, []).append(graph)

    def find(self, name: str) -> GraphFile:
        """Return the graph of a name; raises `UsageError` if there is none, or several."""
        found = self.graphs.get(name, [])
        if len(found) == 1:
            return found[0]
        if not found:
            programs = [graph.program for graphs in self.graphs.values() for graph in graphs]
            raise UsageError(
                f"there is no graph of a program called {name!r}",
                hint=nearest(name, list(dict.fromkeys(programs))),
            )
        files = ", ".join(str(graph.file.path) for graph in found)
        raise UsageError(f"several graphs are called {name!r}: {files}", hint="name the files")

    def split(self, text: str) -> tuple[GraphFile, GraphFile]:
        """Return the two programs of `A:B`; A and B may contain colons."""
        parts = text.split(":")
        cuts = [(":".join(parts[:i]), ":".join(parts[i:])) for i in range(1, len(parts))]
        if not cuts:
            raise UsageError(f"--pair {text!r} does not name two programs", hint="--pair A:B")
        readings = [cut for cut in cuts if cut[0] in self.graphs and cut[1] in self.graphs]
        if len(readings) > 1:
            raise UsageError(f"--pair {text!r} can be read in two ways", hint="name the files")
        first, second = readings[0] if readings else cuts[0]
        return self.find(first), self.find(second)
