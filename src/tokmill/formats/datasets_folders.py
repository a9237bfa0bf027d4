"""Folders of `datasets.save_to_disk`: find the files with the rows.

Format: Hugging Face datasets, `Dataset.save_to_disk` and `DatasetDict.save_to_disk`. A dataset is
`state.json`, which lists the Arrow files in order, and `dataset_info.json`; a dictionary of splits
is `dataset_dict.json` and a folder a split. Other Arrow files in such a folder are caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import inside, read_file
from tokmill.base.headers import loads_json, refused

T = TypeVar("T")
STATE, DICT = "state.json", "dataset_dict.json"
USUAL = "train"


class _Dict(msgspec.Struct):
    splits: list[str]


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    data_files: list[_File] = msgspec.field(name="_data_files")
    indices: list[Any] = msgspec.field(name="_indices_data_files", default_factory=list)


def expanded(inputs: Sequence[str], split: str) -> tuple[list[str], dict[str, int]]:
    """Return the inputs, with the files of datasets in place of their folders.

    Args:
        inputs: INPUT arguments.
        split: the split of a dictionary to read; empty: `train`, or the only one.

    Returns:
        (paths, splits that are not read → 1).

    Raises:
        UsageError: there is no such split, or several splits and none is called `train`.
        TokmillError: a file of the folder is invalid.
    """
    files: list[str] = []
    left: dict[str, int] = {}
    chosen = False
    for argument in inputs:
        folder = Path(argument)
        if (folder / DICT).is_file():
            name, others = _chosen(folder, split)
            chosen = True
            left |= {f"split that is not read: {other} (--split {other})": 1 for other in others}
            folder = inside(folder, name)
        if (folder / STATE).is_file():
            files += _files(folder)
        else:
            files.append(str(folder) if folder != Path(argument) else argument)
    if split and not chosen:
        raise UsageError(
            "no input is a folder with splits",
            where=", ".join(inputs),
            hint=f"leave out --split; it chooses in folders with {DICT}",
        )
    return files, left


def _chosen(folder: Path, split: str) -> tuple[str, list[str]]:
    splits = _read(folder / DICT, _Dict).splits
    if not splits:
        raise TokmillError(
            "the folder has no splits", where=str(folder / DICT), hint="copy the whole folder again"
        )
    if not split and USUAL not in splits and len(splits) > 1:
        raise UsageError(
            f"the folder has the splits {', '.join(splits)}",
            where=str(folder),
            hint=f"choose one: --split {splits[0]}",
        )
    name = split or (USUAL if USUAL in splits else splits[0])
    if name not in splits:
        raise UsageError(
            f"the folder has no split {name!r}", where=str(folder), hint=nearest(name, splits)
        )
    return name, [other for other in splits if other != name]


def _files(folder: Path) -> list[str]:
    state = _read(folder / STATE, _State)
    if state.indices:
        raise TokmillError(
            "the rows of the dataset are in another order (it has indices), which is not read",
            where=str(folder),
            hint="call dataset.flatten_indices() before save_to_disk",
        )
    paths = [inside(folder, file.filename) for file in state.data_files]
    for path in paths:
        if not path.is_file():
            raise TokmillError(
                f"the dataset names a file that is not there: {path.name}",
                where=str(folder),
                hint="its copy was cut off: copy the whole folder again",
            )
    if not paths:
        raise TokmillError("the dataset has no files", where=str(folder), hint="is it empty?")
    return [str(path) for path in paths]


def _read(path: Path, kind: type[T]) -> T:
    raw = read_file(path)
    with refused("this is not a file of `datasets`", path, hint="name the .arrow files themselves"):
        value: T = loads_json(raw, kind)
        return value
