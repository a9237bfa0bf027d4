"""Which programs are pairs: graph files by their names, and lists of pairs."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import machine_errors
from tokmill.base.headers import loads_toml
from tokmill.builds.scan import NO_PROGRAM, FolderOptions, InputFile, find_files, in_order
from tokmill.x86.graphs.graph_files import read_facts
from tokmill.x86.graphs.graph_inputs import GRAPH

LARGEST = 256 << 20
"""Largest size of a list of pairs, in bytes."""


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
        known = [cut for cut in cuts if cut[0] in self.graphs and cut[1] in self.graphs]
        if len(known) > 1:
            raise UsageError(
                f"--pair {text!r} can be read in two ways", hint="list it in a file: --pairs"
            )
        first, second = known[0] if known else cuts[0]
        return self.find(first), self.find(second)


def read_pairs(path: str) -> list[tuple[str, str]]:
    """Return the pairs of a TOML file; raises `UsageError` if it holds something else."""
    example = 'pairs = [["gcc-O0/ls", "gcc-O2/ls"]]'
    with machine_errors("read", path):
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode) or state.st_size > LARGEST:
            raise UsageError(
                "this is not a list of pairs: it is not a file, or larger than 256 MiB",
                where=path,
                hint=f"a file in TOML, such as {example}",
            )
        raw = Path(path).read_bytes()
    try:
        table = loads_toml(raw.decode())
    except ValueError as error:
        raise UsageError(f"the file is not TOML: {error}", where=path, hint=example) from None
    try:
        pairs = msgspec.convert(table.pop("pairs", None), list[tuple[str, str]])
    except msgspec.ValidationError as error:
        raise UsageError(f"pairs: {error}", where=path, hint=f"such as {example}") from None
    if table:
        raise UsageError(f"the key {min(table)!r} is not known", where=path, hint=example)
    if not pairs:
        raise UsageError("the file lists no pairs", where=path, hint=f"such as {example}")
    return pairs


def placed(name: str) -> str:
    """Return the absolute path of a file; another name is not changed."""
    return os.path.abspath(name) if os.path.isfile(name) else name
