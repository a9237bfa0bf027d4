"""`tokmill trace`."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from tokmill.base.errors import UsageError, one_line
from tokmill.base.progress import human_count, human_metric
from tokmill.terminal.frame import AsJson, RunFolder
from tokmill.terminal.output import print_json, print_table, say

HEAD = 40
MOST = 100_000
"""Lines about records at most: a run may have been given more steps than it will do."""
DOCUMENTS = 3
"""Documents of a step that are shown, and of a jump."""


Step = Annotated[
    int | None, typer.Option(metavar="N", help="Show the documents of a step, from 1.")
]
Record = Annotated[
    int | None, typer.Option(metavar="I", help="Show the steps that read this record.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="'COLUMN OP VALUE'",
        help="Show the steps that read records whose value fits, as in `inspect`. May be repeated: "
        "all must hold.",
    ),
]
Spike = Annotated[
    bool, typer.Option("--spike", help="Show logged steps with a spike of loss or gradient.")
]
OfStore = Annotated[
    Path | None,
    typer.Option("--store", help="With --record or --where: only this store of the run."),
]
Head = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, help="Show the first N documents or steps.", show_default="40, 3"
    ),
]


def trace(
    run: RunFolder,
    step: Step = None,
    record: Record = None,
    where: Where = None,
    spike: Spike = False,
    store: OfStore = None,
    head: Head = None,
    as_json: AsJson = False,
) -> None:
    """Show which documents a step of a run reads, or which steps read a document."""
    from tokmill.report.comparison.run_summaries import read_run
    from tokmill.report.describe import traced_steps as traced
    from tokmill.training.trace import Trace

    asked = [step is not None, record is not None, bool(where), spike]
    if sum(asked) != 1 or (store and not (record is not None or where)):
        raise UsageError(
            "a trace is of a step, of records, or of jumps",
            hint="one of --step N, --record I, --where 'COLUMN OP VALUE', --spike; --store goes "
            "with --record and --where",
        )
    steps = Trace(run)
    last = read_run(run).step
    if not steps.sessions:
        say("note: there is no sessions.jsonl, so positions are those of one process")
    if step is not None:
        seen, shows = steps.step(step), traced.Documents(steps)
        most = head if head is not None else len(seen) if as_json else HEAD
        facts = {
            "run": str(run),
            "step": step,
            "steps": steps.steps,
            "done": step <= last,
            "processes": steps.processes_of(step),
            "rows": len({(one.process, one.micro_batch, one.row) for one in seen}),
            "documents_in_all": len(seen),
            "documents": [shows.show(one) for one in seen[:most]],
        }
        print_json(facts) if as_json else _print_step(facts, shows)
    elif spike:
        jumps = read_run(run).jumps
        rows = list(traced.of_jumps(steps, jumps, DOCUMENTS if head is None else head))
        print_json({"run": str(run), "jumps": rows}) if as_json else _print_jumps(rows, steps)
    else:
        _holding(steps, traced.wanted(steps, record, where or [], store), last, head, as_json)


def _holding(steps: Any, wanted: Mapping[int, Any], last: int, head: int | None, js: bool) -> None:
    rows = [
        {**one._asdict(), "store": str(one.store.path), "done": one.step <= last}
        for one in islice(steps.holding(wanted), MOST)
    ]
    records = sum(map(len, wanted.values()))
    if len(rows) == MOST:
        say(f"note: only the first {MOST:,} lines: run.steps are {steps.steps:,}")
    if js:
        print_json({"run": str(steps.path), "records": records, "lines": len(rows),
                    "all": len(rows) < MOST, "read": rows[:head]})  # fmt: skip
        return
    most = HEAD if head is None else head
    several = len(steps.stores) > 1
    print_table(
        ["step", "", "epoch", "record", "tokens", *(["store"] if several else [])],
        [
            [row["step"], "done" if row["done"] else "to come", row["epoch"], row["record"],
             f"{row['start']:,} to {row['stop'] - 1:,}", *([row["store"]] if several else [])]
            for row in rows[:most]
        ],
    )  # fmt: skip
    steps_of = len({row["step"] for row in rows})
    say(f"{human_count(records, 'record')}, in {steps_of:,} of {steps.steps:,} steps")
    if len(rows) > most:
        say(f"{most:,} of {len(rows):,} lines shown; --head {len(rows)} shows all")


def _print_step(facts: Mapping[str, Any], shows: Any) -> None:
    from tokmill.report.describe.traced_steps import origin, preview

    for talk in {reader.talk for reader in shows.readers.values()} - {""}:
        say(*talk.splitlines())
    state = "done" if facts["done"] else "to come"
    processes = human_count(facts["processes"], "process", "processes")
    print(
        f"step {facts['step']:,} of {facts['steps']:,}, {state}: "
        f"{human_count(facts['rows'], 'row')}, {processes}\n"
    )
    headers = "process micro-batch row position record tokens from columns text"
    print_table(
        headers.split(),
        [
            [one["process"], one["micro_batch"], one["row"], one["position"], one["record"],
             f"{one['start']:,} to {one['stop'] - 1:,} of {one['length']:,}", origin(one),
             one_line(", ".join(f"{n} {v}" for n, v in one["columns"].items())), preview(one)]
            for one in facts["documents"]
        ],
    )  # fmt: skip
    shown, every = len(facts["documents"]), facts["documents_in_all"]
    if shown < every:
        say(f"{shown:,} of {every:,} shown; --head {every} shows all")


def _print_jumps(jumps: list[dict[str, Any]], steps: Any) -> None:
    from tokmill.report.describe.traced_steps import origin, preview

    if not jumps:
        every = steps.config.run.log_every
        print(f"no logged step jumps (metrics are of every {every}. step: run.log_every)")
    for jump in jumps:
        print(
            f"step {jump['step']:,}: {jump['metric']} {human_metric(jump['value'])}, usual "
            f"{human_metric(jump['usual'])}; {human_count(jump['documents_in_all'], 'document')}"
        )
        for one in jump["documents"]:
            print(f"    record {one['record']:,}, {origin(one)}: {preview(one)}")
    if jumps:
        say(f"next: tokmill trace {steps.path} --step {jumps[0]['step']}")
