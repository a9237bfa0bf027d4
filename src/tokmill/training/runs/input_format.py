"""How a run's store was built, kept in the run, to read prompts and inputs in the same way."""

import contextlib
from pathlib import Path

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.base.files import write_file
from tokmill.builds.scan import CHOICE
from tokmill.store.manifest import PLAN, Made, encode, read_json, read_plan
from tokmill.store.store import Store
from tokmill.tasks.task_inputs import SEGMENT

INPUT_FORMAT = "input_format.json"


class InputFormat(Made, frozen=True, kw_only=True):
    """Source and options of the store that a run has learned from."""

    roles: dict[str, str] = {}
    """Role → special token, if roles were named."""
    segments: int = 1
    """Sentences of a record: 2 of pairs."""


def keep_input_format(store: Store, out: Path) -> None:
    if made := input_format_of(store.path):
        write_file(
            out / INPUT_FORMAT, encode(msgspec.structs.replace(made, segments=segments_of(store)))
        )


def segments_of(store: Store) -> int:
    return 1 + int(store.manifest.ranges.get(SEGMENT, (0, 0))[1])


def input_format_of(store: Path) -> InputFormat | None:
    """Return source and options of a store; of a selection those of its inputs."""
    if not (store / PLAN).exists():
        return None
    plan = read_plan(store)
    source = plan.recipe["source"]
    if source != "select":
        options = {key: value for key, value in plan.options.items() if key not in CHOICE}
        roles = plan.roles if isinstance(plan.roles, dict) else {}
        return InputFormat(source=source, options=options, roles=roles)
    with contextlib.suppress(TokmillError):
        first, *rest = map(input_format_of, map(Path, plan.inputs()))
        return first if all(one == first for one in rest) else None
    return None


def read_input_format(run: Path) -> InputFormat | None:
    path = run / INPUT_FORMAT
    return read_json(path, InputFormat) if path.exists() else None
