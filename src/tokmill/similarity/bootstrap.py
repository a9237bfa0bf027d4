"""Intervals of means by drawing units (functions, projects) again, all of a unit together."""

import numpy as np

from tokmill.store.schema import Array

RESAMPLES = 1000
CONFIDENCE = 0.95
CELLS = 1 << 22
"""Numbers that are drawn at a time."""


def bootstrap(
    values: Array,
    counted: Array,
    of: Array,
    unit: Array,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Array | None:
    """Return the means of as many resamples, (resamples, columns) f8.

    A resample draws as many units as there are, with repetition, and takes all values of each (the
    cluster bootstrap: Field and Welsh 2007). So functions at several compilers, and functions of a
    project, count as what they are: not independent. None where there is only one unit.

    Args:
        values: (n, columns) f8, 0 where not counted.
        counted: (n, kinds), whether a value counts.
        of: (columns,) the column of `counted` that says so.
        unit: (n,) number of the unit of each value.
        seed: of the draws; all columns share them, so differences of columns can be taken.
        resamples: how often units are drawn.
    """
    _, place = np.unique(unit, return_inverse=True)
    units = int(place.max()) + 1 if len(place) else 0
    if units < 2:
        return None
    of_unit = place.reshape(-1)
    columns = values.shape[1]
    sums = np.empty((units, columns + counted.shape[1]))
    for column in range(sums.shape[1]):
        one = values[:, column] if column < columns else counted[:, column - columns]
        sums[:, column] = np.bincount(of_unit, one, units)
    random = np.random.default_rng(seed)
    result = np.empty((resamples, columns))
    height = max(1, CELLS // units)
    for start in range(0, resamples, height):
        stop = min(start + height, resamples)
        drawn = random.integers(0, units, (stop - start, units))
        drawn += np.arange(stop - start)[:, None] * units
        times = np.bincount(drawn.reshape(-1), minlength=(stop - start) * units)
        total = times.reshape(stop - start, units) @ sums
        count = total[:, columns:][:, of]
        # A resample may have drawn none of the units that have a value.
        result[start:stop] = np.divide(
            total[:, :columns], count, out=np.full(count.shape, np.nan), where=count > 0
        )
    return result


def interval(means: Array) -> tuple[float, float] | None:
    """Return the middle 95 % of the means of resamples; None where none has a value."""
    means = means[np.isfinite(means)]
    if not len(means):
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
