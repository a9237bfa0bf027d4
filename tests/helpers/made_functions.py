"""Functions by a few columns, for tests of what is paired and measured."""

from typing import Any

import numpy as np

from tokmill.similarity.functions import NAMES, Functions, coded

One = dict[str, Any]


def functions(*ones: One) -> Functions:
    """Functions by their columns; what is not said is the same for all, and codes all differ."""
    plain = {"project": "p", "program": "a", "version": "1", "compiler": "gcc-12", "level": "O0"}
    names = {column: coded([str({**plain, **one}[column]) for one in ones]) for column in NAMES}
    return Functions(
        "here",
        names,
        np.asarray([one.get("blocks", 9) for one in ones], np.int64),
        np.asarray([one.get("code", 1000 + i) for i, one in enumerate(ones)], np.uint64),
        np.asarray([one.get("named", True) for one in ones], bool),
        None,
    )


def f(function: str, level: str = "O0", **more: Any) -> One:
    return {"function": function, "level": level, **more}
