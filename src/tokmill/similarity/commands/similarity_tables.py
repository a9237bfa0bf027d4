"""How an evaluation of similarity is printed."""

from collections.abc import Sequence

from tokmill.base.progress import human_count
from tokmill.similarity.evaluation import Evaluation
from tokmill.similarity.pool_measures import METRICS, SHOWN, Compared, Row, Value
from tokmill.terminal.output import print_line, print_table, say

SAME = "same code on both sides"


def print_evaluation(evaluation: Evaluation) -> None:
    """Print what was left out, a table of all rows at one pool, and the tables of the first row."""
    metric, at = METRICS[0], _pool_of(evaluation)
    functions = human_count(evaluation.functions, "function")
    print_line(f"{evaluation.where}: {functions}, {evaluation.compared:,} to compare")
    for why, count in evaluation.left_out.items():
        print(f"left out: {count:,} {why}")
    print()
    _print_counts(evaluation.rows)
    if at is not None and len(evaluation.rows) > 1:
        for kind in dict.fromkeys(_kind(row) for row in evaluation.rows):
            print()
            _print_summary([row for row in evaluation.rows if _kind(row) == kind], kind, metric, at)
    print()
    _print_row(evaluation.rows[0], metric)
    if at is not None and any(one.pool == at and one.queries for one in evaluation.rows[0].results):
        print()
        _print_pool(evaluation.rows[0], at)
    _say_remarks(evaluation, at)


def _pool_of(evaluation: Evaluation) -> int | None:
    """Return the pool of tables of one pool: the largest up to `SHOWN` that all rows have.

    None where no row has one.
    """
    each = [{one.pool for one in row.results if one.queries} for row in evaluation.rows]
    there = set.union(*each)
    shared = {size for size in there if all(size in pools for pools in each if pools)} or there
    fitting = [size for size in shared if size <= SHOWN]
    return max(fitting) if fitting else min(there, default=None)


def _kind(row: Row) -> str:
    return row.row.rpartition(" ")[0]


def _print_counts(rows: Sequence[Row]) -> None:
    reasons = list(
        dict.fromkeys(why for row in rows for one in row.settings for why in one.left_out)
    )
    more_targets = any(one.pairs > one.queries for row in rows for one in row.settings)
    targets = ["targets"] * more_targets
    lines = []
    for row in rows:
        line = [row.row, row.queries, row.functions, row.projects]
        line += [sum(one.pairs for one in row.settings)] * more_targets
        line.append(sum(one.same_code for one in row.settings))
        line += (sum(one.left_out.get(why, 0) for one in row.settings) for why in reasons)
        lines.append(line)
    print_table(["row", "queries", "functions", "projects", *targets, SAME, *reasons], lines)


def _print_summary(rows: Sequence[Row], kind: str, metric: str, pool: int) -> None:
    methods = list(dict.fromkeys(one.method for row in rows for one in row.results))
    cells = {
        (one.method, row.row): _short(one.values[metric].mean)
        for row in rows
        for one in row.results
        if one.pool == pool and one.queries
    }
    print_table(
        [f"{kind} {metric}, pool {pool:,}".strip(), *(row.row.removeprefix(kind) for row in rows)],
        [[name, *(cells.get((name, row.row), "-") for row in rows)] for name in methods],
    )


def _print_row(row: Row, metric: str) -> None:
    pools = list(dict.fromkeys(one.pool for one in row.results))
    methods = list(dict.fromkeys(one.method for one in row.results))
    cells = {
        (one.method, one.pool): _short(one.values[metric].mean) if one.queries else "-"
        for one in row.results
    }
    sizes = sorted({*pools, *row.too_large})
    print_table(
        [f"{row.row}, {metric}", *(f"{pool:,}" for pool in sizes)],
        [[name, *(cells.get((name, pool), "-") for pool in sizes)] for name in methods],
    )


def _print_pool(row: Row, pool: int) -> None:
    here = [one for one in row.results if one.pool == pool]
    print_table(
        [f"{row.row}, pool {pool:,}", *(part for name in METRICS for part in (name, "95 %"))],
        [[one.method, *(c for name in METRICS for c in _cells(one.values[name]))] for one in here],
    )
    first = here[0].values[METRICS[0]]
    if first.projects:
        print("95 %: bootstrap over functions and over projects, the wider ends")
    elif first.functions:
        print("95 %: bootstrap over functions")


def _say_remarks(evaluation: Evaluation, pool: int | None) -> None:
    too_large = dict.fromkeys(tuple(row.too_large) for row in evaluation.rows if row.too_large)
    for sizes in too_large:
        rows = [row for row in evaluation.rows if tuple(row.too_large) == sizes]
        most = max(one.pairs for row in rows for one in row.settings)
        named = f"{rows[0].row} to {rows[-1].row}" if len(rows) > 2 else ", ".join(
            row.row for row in rows
        )  # fmt: skip
        text = ", ".join(f"{size:,}" for size in sizes)
        say(f"note: no pools of {text} for {named}: {human_count(most, 'pair')} at most")
    for row in evaluation.rows:
        for one in row.compared:
            if one.pool == pool:
                say(f"{row.row}, pool of {pool:,}: {_verdict(one)}")
    for method in evaluation.methods:
        if method.zeros:
            some = human_count(method.zeros, "function")
            say(
                f"note: {method.name}: {some} of {evaluation.functions:,} with a vector of zeros, "
                "whose scores are all 0"
            )


def _verdict(one: Compared) -> str:
    """Return whether a method is better than the best baseline, in words."""
    ends = one.difference.ends
    against = f"{one.baseline}, the best baseline: recall@1 {one.difference.mean:+.3f}"
    if ends is None:
        return f"{one.method} against {against}"
    what = "better" if ends[0] > 0 else "worse" if ends[1] < 0 else "not shown to be better"
    return f"{one.method} is {what} than {against} (95 %: {ends[0]:+.3f} to {ends[1]:+.3f})"


def _cells(value: Value) -> list[str]:
    ends = value.ends
    return [_short(value.mean), f"{_short(ends[0])} {_short(ends[1])}" if ends else "-"]


def _short(value: float) -> str:
    text = f"{value:.3f}"
    return "1.00" if text == "1.000" else text.replace("0.", ".", 1)
