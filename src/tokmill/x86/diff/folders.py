"""Two folders of programs, such as releases or unpacked packages: which programs are the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tokmill.base.errors import MachineError, MissingExtraError, TokmillError, UsageError
from tokmill.base.files import sha256_file
from tokmill.base.progress import Progress
from tokmill.builds.execution.processes import in_processes
from tokmill.builds.scan import DEBUG_ALONE, FolderOptions, InputFile, Inputs, in_order
from tokmill.x86.diff.output.summary import Changed, Counts, changed_most, counts_of
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.diff.result import ProgramChanges
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_inputs import find_inputs, graphs_in
from tokmill.x86.image.elf import MAGIC, Elf
from tokmill.x86.image.program import mapped

FORMAT = "tokmill.diff.folders"
VERSION = 3
"""1: `changed` was lists without names; 2: without references and `other`."""
MOST_CHANGED = 10
"""Most functions that are named for one program."""
VERSIONS = re.compile(r"\d+(\.\d+)*")
"""The part of a name that may differ between releases."""


class ProgramPair(msgspec.Struct, frozen=True, kw_only=True):
    """A program of both folders."""

    a: str
    """Path below the folder."""
    b: str
    matched_by: str
    """name, content, or name without version."""
    same_bytes: bool = False
    counts: Counts | None = None
    """None if the bytes are the same, or the program was refused."""
    changed: list[Changed] = []
    """The functions that changed most."""
    other: ProgramChanges = ProgramChanges()
    """What changed outside of functions."""
    left_out: dict[str, int] = {}
    refused: str = ""
    """Why the two were not compared."""


class FolderDiff(msgspec.Struct, frozen=True, kw_only=True):
    """The result for the programs of two folders."""

    format: str = FORMAT
    version: int = VERSION
    a: str
    b: str
    matched: list[ProgramPair]
    """Refused programs first, then the least similar ones."""
    deleted: list[str]
    inserted: list[str]
    left_out: dict[str, int]
    """Files that are no program, and others that were not read → how many, of both folders."""

    @property
    def same(self) -> bool:
        same = all(one.same_bytes or _same(one) for one in self.matched)
        return same and not self.deleted and not self.inserted


def _same(pair: ProgramPair) -> bool:
    counts = pair.counts
    if counts is None or pair.other.any:
        return False
    return not (counts.changed or counts.deleted or counts.inserted)


def diff_folders(
    a: Path,
    b: Path,
    *,
    names: bool = True,
    workers: int = 0,
    choice: FolderOptions | None = None,
    quiet: bool = True,
) -> FolderDiff:
    """Compare the programs, and graph files, of two folders.

    Programs are paired by their path, then by content (the sha256 of the file), then by their path
    without numbers of versions. Raises `TokmillError` for a folder that is not there.
    """
    sides = [_with_code(find_inputs([str(folder)], choice)) for folder in (a, b)]
    pairs, left_a, left_b = pair_files(sides[0].files, sides[1].files)
    tasks = [_Task(one, other, how, names) for one, other, how in pairs]
    tasks.sort(key=lambda task: (-task.a.size - task.b.size, task.a.name))
    with Progress("diff", sum(task.a.size + task.b.size for task in tasks), quiet=quiet) as bar:
        found = []
        for task, pair in _carry_out(tasks, workers):
            found.append(pair)
            bar.advance(task.a.size + task.b.size)
    left_out = Counter(sides[0].left_out) + Counter(sides[1].left_out)
    return FolderDiff(
        a=str(a),
        b=str(b),
        matched=sorted(found, key=_order),
        deleted=[file.name for file in left_a],
        inserted=[file.name for file in left_b],
        left_out=in_order(left_out),
    )


def _with_code(found: Inputs) -> Inputs:
    """Return the inputs without files of debug information alone, which are counted."""
    kept = [file for file in found.files if not _debug_alone(file.path)]
    left_out = Counter(found.left_out)
    left_out[DEBUG_ALONE] += len(found.files) - len(kept)
    return Inputs(kept, in_order(+left_out))


def _debug_alone(path: Path) -> bool:
    try:
        data = mapped(path)
        return data[: len(MAGIC)].tobytes() == MAGIC and Elf(data, str(path)).without_code
    except TokmillError:
        return False  # The error is raised where the file is read.


def pair_files(
    a: Sequence[InputFile], b: Sequence[InputFile]
) -> tuple[list[tuple[InputFile, InputFile, str]], list[InputFile], list[InputFile]]:
    """Return the files that belong together, with why, and those of A and of B that are alone."""
    ways: list[tuple[str, Callable[[InputFile], str]]] = [
        ("name", lambda file: file.name),
        # Read whole only where a sample of the two is the same.
        ("content", lambda file: f"{file.size} {file.digest}"),
        ("name without version", lambda file: VERSIONS.sub("#", file.name)),
        ("name without version", lambda file: VERSIONS.sub("#", Path(file.name).name)),
    ]
    found: list[tuple[InputFile, InputFile, str]] = []
    left_a, left_b = list(a), list(b)
    for how, key in ways:
        known = _once(left_a, key), _once(left_b, key)
        both = [name for name in known[0] if name in known[1]]
        for name in both:
            one, other = known[0][name], known[1][name]
            if how != "content" or sha256_file(one.path) == sha256_file(other.path):
                found.append((one, other, how))
        taken = {id(file) for pair in found for file in pair[:2]}
        left_a = [file for file in left_a if id(file) not in taken]
        left_b = [file for file in left_b if id(file) not in taken]
    return found, left_a, left_b


def _once(files: Sequence[InputFile], key: Callable[[InputFile], str]) -> dict[str, InputFile]:
    counts = Counter(key(file) for file in files)
    return {key(file): file for file in files if counts[key(file)] == 1}


def _order(pair: ProgramPair) -> tuple[bool, float, str]:
    similarity = 1.0 if pair.counts is None else pair.counts.similarity
    return not pair.refused, similarity, pair.a


class _Task(NamedTuple):
    a: InputFile
    b: InputFile
    how: str
    names: bool


def _carry_out(tasks: Sequence[_Task], workers: int) -> Iterator[tuple[_Task, ProgramPair]]:
    if workers > 0 and len(tasks) > 1:
        hint = "most often memory ran out: try fewer --workers"
        yield from in_processes(_diff, tasks, min(workers, len(tasks)), hint=hint)
    else:
        for task in tasks:
            yield task, _diff(task)


def _diff(task: _Task) -> ProgramPair:
    pair = ProgramPair(a=task.a.name, b=task.b.name, matched_by=task.how)
    try:
        alike = task.a.size == task.b.size and task.a.digest == task.b.digest
        if alike and sha256_file(task.a.path) == sha256_file(task.b.path):
            return replace(pair, same_bytes=True)
        a, b = (one_graph(file) for file in (task.a, task.b))
        diff = diff_graphs(a, b, names=task.names)
        return replace(
            pair,
            counts=counts_of(a, b, diff),
            changed=changed_most(a, b, diff, MOST_CHANGED),
            other=diff.other,
            left_out=diff.left_out,
        )
    except (MachineError, MissingExtraError, UsageError):
        raise
    except TokmillError as error:
        return replace(pair, refused=str(error).partition("\n")[0])


def one_graph(file: InputFile) -> Graph:
    """Return the graph of a program or of a graph file; raises `TokmillError` for several."""
    graphs = graphs_in(file, facts=True)
    graph = next(graphs, None)
    if graph is None or next(graphs, None) is not None:
        raise TokmillError(
            "it holds no program" if graph is None else "it holds several programs",
            where=str(file.path),
            hint="`tokmill cfg` writes a graph file of each, which can be compared",
        )
    return graph
