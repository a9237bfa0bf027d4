"""Finds the TensorFlow checkpoint that a user names."""

from __future__ import annotations

import re
from pathlib import Path

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors
from tokmill.training.runs.tensorflow.sstable import is_table

INDEX, META, CONFIG = ".index", ".meta", "config.json"
DATA = re.compile(r"\.data-\d{5,}-of-\d{5,}$")


def is_tensorflow(place: Path) -> bool:
    """Say whether a folder or a file looks like a checkpoint of TensorFlow, of any format."""
    with machine_errors("read", place):
        if place.is_dir():
            names = [path.name for path in place.iterdir()]
            of_bert = any(name.endswith((INDEX, META)) or DATA.search(name) for name in names)
            return CONFIG not in names and (of_bert or "bert_config.json" in names)
        if place.name.endswith((INDEX, META)) or DATA.search(place.name):
            return True
        beside = place.with_name(place.name + INDEX) if place.name else place
        return beside.is_file() or (place.is_file() and is_table(place))


def find_bundle(place: Path) -> Path:
    """Return the prefix of a checkpoint; `place`: its folder, its prefix, or one of its files.

    Raises `TokmillError` if there is no checkpoint, several, or one in another format.
    """
    with machine_errors("read", place):
        return _found(place)


def _found(place: Path) -> Path:
    if place.is_dir():
        files = sorted(path for path in place.iterdir() if path.is_file())
        found = [path for path in files if path.name.endswith(INDEX)]
        if len(found) > 1:
            names = ", ".join(path.name.removesuffix(INDEX) for path in found[:4])
            raise TokmillError(
                f"the folder has {len(found)} checkpoints: {names}{', …' * (len(found) > 4)}",
                where=str(place),
                hint=f"name one: {found[-1]}",
            )
        for other in [] if found else files:
            refuse_other(other)
        place = found[0] if found else place / "NAME"
    name = DATA.sub("", place.name).removesuffix(INDEX)
    if name and place.with_name(name + INDEX).is_file():
        return place.with_name(name)
    refuse_other(place)
    raise TokmillError(
        f"there is no checkpoint of TensorFlow: no file {name}{INDEX}",
        where=str(place.parent),
        hint=f"a checkpoint is NAME{INDEX} and NAME.data-00000-of-00001: name the folder of both",
    )


def refuse_other(path: Path) -> None:
    """Refuse files of TensorFlow without tensors, or in the older format."""
    if path.name.endswith(META):
        raise TokmillError(
            "the file is a meta-graph, which holds no values of tensors",
            where=str(path),
            hint=f"name the checkpoint beside it, {path.name.removesuffix(META)}{INDEX}",
        )
    if path.is_file() and is_table(path):
        raise TokmillError(
            "the checkpoint is of TensorFlow's format V1, which is not read",
            where=str(path),
            hint="let TensorFlow load it and save it again: tf.compat.v1.train.Saver writes V2",
        )
