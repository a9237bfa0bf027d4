"""The figure of what a policy looks at in an operation; `rl.attention` computes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.report.pages.figures import NAME, Figure, Series


def attention(paths: Sequence[Path], sample: int | None = None, column: str = "") -> Figure:
    """Return the attention of `[CLS]` of a policy, a row a head; `paths`: a run and a module.

    The module is a .mlir file or a line of sizes. It is seen as an environment shows it first: its
    last operation, before any action.
    """
    if len(paths) != 2:
        raise UsageError(
            "the figure attention is of a run and one module",
            hint="tokmill plot attention RUN 'matmul 64 64 64' -o attention.svg",
        )
    if sample or column:
        raise UsageError(
            f"the figure attention takes no {'sample' if sample else 'column'}",
            hint="leave out the option",
        )
    run, module = paths
    problems = plugins.require("tokmill.mlir.modules.problem")
    named: Any = problems.of_file(module) if module.suffix == ".mlir" else None
    problem = named or problems.of_line(str(module))
    found, names = plugins.require("tokmill.rl.embedding.policy_attention").first_seen(run, problem)
    rows = [
        Series(
            f"layer {layer}, head {head}",
            np.arange(len(names)),
            one.numpy(),
            0,
            more={NAME: np.array(names)},
        )
        for layer, heads in enumerate(found, 1)
        for head, one in enumerate(heads, 1)
    ]
    operation = problem.operations[-1]
    return Figure(
        f"Attention of [CLS] on {operation.name} of {problem.name}",
        "place",
        "attention",
        "map",
        rows,
        names=names,
    )
