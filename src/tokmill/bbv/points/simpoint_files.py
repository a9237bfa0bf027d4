"""`.simpoints` and `.weights`, the files in which simulators find simulation points.

As SimPoint 3.2 writes them: `.simpoints` has a line `INTERVAL CLUSTER` a point, `.weights` a line
`WEIGHT CLUSTER`. Intervals count from 0. `.labels` (its `-saveLabels`) has a line
`CLUSTER DISTANCE` an interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokmill.base.errors import TokmillError
from tokmill.base.files import machine_errors

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LONGEST = 1 << 12
"""Bytes of a line: two numbers."""
WHOLE = 0.01
"""How far from 1 a sum of weights may be: SimPoint's six digits, and clusters it leaves out."""


def written(intervals: Ints, weights: Floats) -> dict[str, str]:
    """Return the text of `.simpoints` and `.weights`, by suffix."""
    pairs = list(zip(intervals.tolist(), weights.tolist(), strict=True))
    return {
        ".simpoints": "".join(f"{interval} {k}\n" for k, (interval, _) in enumerate(pairs)),
        ".weights": "".join(f"{weight:.9g} {k}\n" for k, (_, weight) in enumerate(pairs)),
    }


def labels_text(labels: Ints, distances: Floats) -> Iterator[bytes]:
    """Yield `.labels`, a line an interval, in pieces."""
    for start in range(0, len(labels), 1 << 16):
        part = slice(start, start + (1 << 16))
        rows = zip(labels[part].tolist(), distances[part].tolist(), strict=True)
        yield "".join(f"{label} {distance:.6g}\n" for label, distance in rows).encode()


def read(simpoints: Path, weights: Path) -> tuple[Ints, Floats]:
    """Read points: their intervals and weights, in rising order of clusters.

    Weights are scaled to a sum of 1.

    Raises:
        TokmillError: a line is not two numbers, a cluster stands twice or in one of the files
            only, an interval is negative, or the weights are none: negative, not finite, or of a
            sum that is not about 1.
    """
    intervals = _table(simpoints, whole=True)
    shares = _table(weights, whole=False)
    if alone := sorted(intervals.keys() ^ shares.keys()):
        holder, other = (simpoints, weights) if alone[0] in intervals else (weights, simpoints)
        raise TokmillError(
            f"cluster {alone[0]} is not in {other}" + _and_more(len(alone)),
            where=str(holder),
            hint="are the two files from the same run?",
        )
    if not intervals:
        raise TokmillError(
            "there is no point", where=str(simpoints), hint="a line is `INTERVAL CLUSTER`"
        )
    order = sorted(intervals)
    found = np.asarray([shares[cluster] for cluster in order])
    if abs(found.sum() - 1) > WHOLE:
        raise TokmillError(
            f"the weights sum to {found.sum():.4g}, not to 1",
            where=str(weights),
            hint="was the file cut short? `-coveragePct` leaves clusters out: give all of them",
        )
    return np.asarray([int(intervals[c]) for c in order], np.int64), found / found.sum()


def _and_more(count: int) -> str:
    return f", nor are {count - 1:,} more" if count > 1 else ""


def _table(path: Path, *, whole: bool) -> dict[int, float]:
    """Return cluster → the number before it; `whole`: an interval, else a weight."""
    found: dict[int, float] = {}
    with machine_errors("read", path), open(path, "rb") as handle:
        number = 0
        while line := handle.readline(LONGEST):
            number += 1
            cells = line.split()
            if not cells or cells[0].startswith(b"#"):
                continue
            where = f"{path}:{number}"
            try:
                first = int(cells[0]) if whole else float(cells[0])
                (cluster,) = map(int, cells[1:])
            except ValueError:
                raise TokmillError(
                    f"{line[:40]!r} is not two numbers",
                    where=where,
                    hint=f"a line is `{'INTERVAL' if whole else 'WEIGHT'} CLUSTER`",
                ) from None
            if not 0 <= first <= (2**62 if whole else 1 + WHOLE) or not 0 <= cluster < 2**62:
                raise TokmillError(
                    f"{'interval' if whole else 'weight'} {first} of cluster {cluster}",
                    where=where,
                    hint="intervals and clusters count from 0; weights are from 0 to 1",
                )
            if cluster in found:
                raise TokmillError(
                    f"cluster {cluster} stands twice",
                    where=where,
                    hint="one point a cluster: was the file written twice?",
                )
            found[cluster] = first
    return found
