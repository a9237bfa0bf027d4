"""Translates lines of a source file to lines of another version of it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from tokmill.base.errors import MachineError, TokmillError
from tokmill.store.schema import Array

HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
GIT = (
    "git", "diff", "--no-index", "--unified=0", "--text", "--no-color", "--no-ext-diff",
    "--no-textconv", "--diff-algorithm=histogram", "--inter-hunk-context=0", "--",
)  # fmt: skip
SECONDS = 120.0


@dataclass(slots=True)
class _Hunks:
    """Where two files differ; H hunks, ascending."""

    start: Array
    """(H,) i8: the first line of A after which lines are moved."""
    stop: Array
    """(H,) i8: the end, exclusive, of the lines that only A has."""
    shift: Array
    """(H,) i8: added to the number of a line after the hunk."""


@dataclass(slots=True)
class SourceLines:
    """Files and lines of the debug information of A, in that of B."""

    partner: Array
    """(S,) i4: the file of B for each file of A; -1 if there is none."""
    hunks: dict[int, _Hunks]
    """File of A → the differences to its partner; no entry if they are the same."""
    not_found: int = 0
    """Files that are in neither folder of source, such as the system's headers: they are the same
    if they have the same path."""

    def lines(self, file: Array, line: Array) -> tuple[Array, Array]:
        """Return file and line in B of lines of A (i8 both); -1 where B does not have the line."""
        to_file = np.where(file >= 0, self.partner[file], -1).astype(np.int64)
        to_line = line.copy()
        for number, hunks in self.hunks.items():
            mine = np.flatnonzero(file == number)
            at = np.searchsorted(hunks.start, line[mine], side="right") - 1
            behind = at >= 0
            gone = behind & (line[mine] < hunks.stop[at])
            to_line[mine] += np.where(behind, hunks.shift[at], 0)
            to_line[mine[gone]] = -1
        to_line[to_file < 0] = -1
        to_file[to_line < 0] = -1
        return to_file, to_line


def same_source(a: Sequence[str], b: Sequence[str]) -> SourceLines:
    """Return the lines of two programs from the same source, in whatever folder it was."""
    exact = {path: number for number, path in enumerate(b)}
    partner = np.asarray([exact.get(path, -1) for path in a], np.int32).reshape(-1)
    taken = set(partner.tolist())
    tree = _Tree([path for number, path in enumerate(b) if number not in taken])
    for number in np.flatnonzero(partner < 0).tolist():
        partner[number] = exact.get(tree.find(a[number]) or "", -1)
    return SourceLines(partner, {})


def two_versions(a: Sequence[str], b: Sequence[str], old: Path, new: Path) -> SourceLines:
    """Return the lines of two programs by the difference of the folders of their source.

    Files are found below the folders by the end of their paths, and are partners where they lie at
    the same place, or where one file of each side has the name. Lines are compared by `git diff`.

    Raises `TokmillError` where no file of a program is below its folder, `MachineError` where git
    is not installed.
    """
    places_a, places_b = _places(a, old), _places(b, new)
    by_place = {place: number for number, place in enumerate(places_b) if place}
    exact = {path: number for number, path in enumerate(b) if not places_b[number]}
    partner = np.full(len(a), -1, np.int32)
    not_found = 0
    for number, place in enumerate(places_a):
        if place:
            partner[number] = by_place.get(place, -1)
        else:
            not_found += 1
            partner[number] = exact.get(a[number], -1)
    _moved(places_a, places_b, partner)
    hunks = {}
    for number, place in enumerate(places_a):
        if place and partner[number] >= 0:
            found = _difference(old / place, new / places_b[partner[number]])
            if len(found.start):
                hunks[number] = found
    return SourceLines(partner, hunks, not_found)


def _places(paths: Sequence[str], folder: Path) -> list[str]:
    """Return where below a folder each file lies, "" for one that is not there."""
    if not folder.is_dir():
        raise TokmillError("no folder", where=str(folder), hint="give the folders of the source")
    found = []
    for root, _, names in os.walk(folder):
        inside = os.path.relpath(root, folder)
        found += [os.path.normpath(os.path.join(inside, name)) for name in names]
    tree = _Tree(found)
    places = [tree.find(path) or "" for path in paths]
    if not any(places):
        raise TokmillError(
            "none of the program's source files is below this folder",
            where=str(folder),
            hint="give the folder that was compiled, the older program's first",
        )
    return places


def _moved(places_a: list[str], places_b: list[str], partner: Array) -> None:
    """Make partners of files that alone have their name among those without a partner."""
    taken = set(partner.tolist())
    free_a = [i for i, place in enumerate(places_a) if place and partner[i] < 0]
    free_b = [i for i, place in enumerate(places_b) if place and i not in taken]
    names_a, names_b = _by_name(places_a, free_a), _by_name(places_b, free_b)
    for name, mine in names_a.items():
        if len(mine) == len(names_b.get(name, ())) == 1:
            partner[mine[0]] = names_b[name][0]


def _by_name(places: list[str], numbers: list[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number in numbers:
        found.setdefault(os.path.basename(places[number]), []).append(number)
    return found


class _Tree:
    """Paths, found by the end of other paths."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.by_name: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        for path in paths:
            self.by_name.setdefault(os.path.basename(path), []).append((path, _parts(path)))

    def find(self, path: str) -> str | None:
        """Return the path with which another ends, or which shares the longest end with it."""
        parts = _parts(path)
        best: tuple[int, int] = (0, 0)
        found: list[str] = []
        for one, ending in self.by_name.get(os.path.basename(path), ()):
            same = 0
            while same < min(len(parts), len(ending)) and parts[-1 - same] == ending[-1 - same]:
                same += 1
            # A path that is the whole end is better than one that shares an end of equal length.
            grade = same, int(same == len(ending))
            if grade > best:
                best, found = grade, [one]
            elif grade == best:
                found.append(one)
        return found[0] if len(found) == 1 else None


def _parts(path: str) -> tuple[str, ...]:
    return PurePosixPath(path).parts


def _difference(a: Path, b: Path) -> _Hunks:
    """Return where two files differ, by `git diff`."""
    rows = []
    shift = 0
    if a.read_bytes() != b.read_bytes():
        # No settings may change what is the truth, or name a program to run: not those of the
        # user, nor of a repository in the working directory, which may be part of the input.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        try:
            done = subprocess.run(
                [*GIT, str(a.absolute()), str(b.absolute())],
                capture_output=True,
                check=False,
                env=environment,
                cwd=os.sep,
                timeout=SECONDS,
            )
        except FileNotFoundError:
            raise MachineError("git is not installed", hint="it compares the source") from None
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"git took more than {SECONDS:.0f} seconds to compare it with {b}",
                where=str(a),
                hint="leave --source away where both programs are of the same version",
            ) from None
        if done.returncode not in (0, 1):
            said = done.stderr.decode("utf-8", "replace").strip()
            raise MachineError(f"git could not compare: {said}", where=str(a), hint="is it read?")
        for match in HUNK.finditer(done.stdout):
            start, count, _, other = (1 if one is None else int(one) for one in match.groups())
            # Where nothing is removed, git names the line before.
            start += 0 if count else 1
            shift += other - count
            rows.append((start, start + count, shift))
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    return _Hunks(table[:, 0], table[:, 1], table[:, 2])
