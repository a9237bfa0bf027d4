"""The plan of a build: identities, and the items of each shard."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import (
    address_of,
    machine_errors,
    open_file,
    path_to_text,
    place_of,
    read_file,
    write_file,
)
from tokmill.builds.scan import OWN
from tokmill.builds.source import Frozen, Item, Request, Resources, Source
from tokmill.store import manifest as layout
from tokmill.store.manifest import (
    CHOICE,
    Plan,
    PlannedItem,
    Reference,
    canonical_digest,
    item_line,
    with_checksum,
    with_paths,
)
from tokmill.store.references import written_in
from tokmill.store.schema import check_schema

SHARD_BYTES = 64 << 20
"""Average input bytes of a shard."""
MAX_SHARD_BYTES = 256 << 20


REFER = "refer"
"""Option with the paths of stores; in the recipe, their fingerprints stand in its place."""


def recipe_of(
    kind: str,
    source: Source,
    config: msgspec.Struct,
    frozen: Mapping[str, Frozen],
    references: Mapping[str, Reference],
) -> dict[str, Any]:
    """Return everything that decides a store's bytes except its inputs; recipe_id is its digest."""
    recipe = {
        "format": layout.FORMAT,
        "source": kind,
        "version": source.version,
        "config": {
            key: value
            for key, value in (msgspec.to_builtins(config) | source.identity()).items()
            # CHOICE selects files, and the plan lists these.
            if key not in CHOICE and key != REFER
        },
        "shard_bytes": SHARD_BYTES,
        "vocabularies": {
            name: {"sha256": item.vocabulary.sha256, "roles": item.vocabulary.roles}
            for name, item in sorted(frozen.items())
        },
    }
    if references:
        recipe["references"] = {name: one.fingerprint for name, one in sorted(references.items())}
    # With the types of JSON (lists, no tuples), so that it equals the one read back.
    value: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(recipe))
    return value


def make_plan(
    kind: str,
    source: Source,
    config: msgspec.Struct,
    frozen: Mapping[str, Frozen],
    roots: Sequence[str],
) -> tuple[Plan, list[PlannedItem]]:
    """Return the plan of a build, and its items with their shards.

    Paths of references in it are absolute.
    """
    check_schema(source.schema)
    references = source.references()
    missing = {c.ref for c in source.schema.values() if c.ref is not None} - references.keys()
    assert not missing, f"the source says nothing of the stores {missing} that its columns refer to"
    recipe = recipe_of(kind, source, config, frozen, references)
    recipe_id = canonical_digest(recipe)
    planned: list[PlannedItem] = []
    shards = 0
    for group in group_items(source.items()):
        name = shard_of(recipe_id, group)
        shards += 1
        for item in group:
            planned.append(item.planned(name))
    if not planned:
        raise TokmillError(
            "the inputs hold nothing to read",
            where=", ".join(roots),
            hint="`tokmill inspect INPUT` says what a file or folder holds",
        )
    plan = Plan(
        recipe_id=recipe_id,
        plan_id=layout.plan_digest(recipe_id, planned),
        recipe=recipe,
        schema=source.schema,
        vocabularies={name: item.vocabulary for name, item in frozen.items()},
        items=len(planned),
        input_bytes=sum(item.size for item in planned),
        shards=shards,
        options=msgspec.to_builtins(source.config),
        roots=[path_to_text(place_of(root)) for root in roots],
        left_out=dict(source.left_out) or msgspec.UNSET,
        not_text=sorted(map(path_to_text, source.not_text)) or msgspec.UNSET,
        overlay=source.overlay,
        command=source.command,
        references=references or msgspec.UNSET,
        places=source.places if source.places != "byte" else msgspec.UNSET,
        inputs_sha256=digest_of(_lines(planned)),
    )
    return plan, planned


def group_items(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the items of each shard.

    An item ends its shard if hash(name, start) / 2^64 < size / 64 MiB. So a border depends only on
    the item before it, and a new file changes one shard. The size is that of the content; it is
    estimated for compressed files.
    """
    group: list[Item] = []
    size = 0
    for item in items:
        weight = item.size * item.expands
        if group and size + weight > MAX_SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += weight
        digest = hashlib.sha256(f"{item.name}\0{item.start}".encode()).digest()
        drawn = int.from_bytes(digest[:8], "little") / 2**64 < weight / SHARD_BYTES
        if drawn or item.alone:
            yield group
            group, size = [], 0
    if group:
        yield group


def shard_of(recipe_id: str, group: Sequence[Item]) -> str:
    digest = hashlib.sha256(recipe_id.encode())
    for item in group:
        digest.update(layout.item_identity(item))
    return digest.hexdigest()[:24]


def write_plan(store: Path, plan: Plan, planned: Sequence[PlannedItem]) -> None:
    write_file(store / "inputs.jsonl", _lines(planned), sync=False)
    write_file(store / layout.PLAN, with_checksum(plan))


def digest_of(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def plan_is_current(store: Path, plan: Plan, planned: Sequence[PlannedItem]) -> bool:
    """Say whether `write_plan` would write the same files.

    It would not if they are damaged, or if the same inputs were moved.
    """
    with machine_errors("read", store):
        if not all((store / name).exists() for name in (layout.PLAN, "inputs.jsonl")):
            return False
        if read_file(store / layout.PLAN) != with_checksum(plan):
            return False
        with open_file(store / "inputs.jsonl") as handle:
            same = all(handle.read(len(lines)) == lines for lines in _lines(planned))
            return same and not handle.read(1)


def _lines(planned: Sequence[PlannedItem]) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    for start in range(0, len(planned), 4096):
        items = planned[start : start + 4096]
        try:
            yield encoder.encode_lines(map(item_line, items))
        except UnicodeEncodeError:
            encoded = (item_line(with_paths(item, path_to_text)) for item in items)
            yield encoder.encode_lines(encoded)


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the differences of two recipes as lines `key: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in sorted({*old, *new}):
            inner = f"{path}.{key}" if path else key
            if key not in old:
                lines.append(f"{inner}: (absent) → {_show(new[key])}")
            elif key not in new:
                lines.append(f"{inner}: {_show(old[key])} → (absent)")
            else:
                lines += difference(old[key], new[key], inner)
        return lines
    return [] if old == new else [f"{path}: {_show(old)} → {_show(new)}"]


def _show(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class BuildRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to build: source, inputs, options."""

    source: str
    inputs: tuple[str, ...] = ()
    out: str = ""
    tokenizer: str | None = None
    """Tokenizer of text sources; for imported token files, the one that made them, if known."""
    roles: dict[str, str] = {}
    """Role → special token, if the names of the tokens do not show it."""
    options: dict[str, Any] = {}
    """The source's own keys (`tokmill recipe schema KIND`)."""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the machine that a build may use."""

    workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of processes; 0: only this one; None: chosen by the preset."""
    preset: Literal["memory", "balanced", "speed"] = "balanced"
    memory: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Bytes that the build and its workers may use together."""
    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto"


BLOCK_BYTES = {"memory": 1 << 20, "balanced": 2 << 20, "speed": 8 << 20}
PARENT_BYTES = 120 << 20
WORKER_BYTES = 260 << 20
"""Memory of the parent and of one worker for text, measured (benchmarks/RESULTS.md), rounded up."""


def choose(amount: Amount, shards: int) -> tuple[int, Resources]:
    """Return (workers, resources) for a number of shards; 0 workers: in this process."""
    resources = Resources(engine=amount.engine, block_bytes=BLOCK_BYTES[amount.preset])
    cores = len(os.sched_getaffinity(0))
    workers = amount.workers
    if workers is None:
        workers = 0 if amount.preset == "memory" or min(cores, shards) < 2 else cores
    workers = min(workers, shards)
    if amount.memory is not None:
        if amount.memory < PARENT_BYTES + WORKER_BYTES:
            raise UsageError(
                f"--memory {amount.memory >> 20} MiB is too little",
                hint=f"one worker needs {(PARENT_BYTES + WORKER_BYTES) >> 20} MiB",
            )
        fitting = (amount.memory - PARENT_BYTES) // WORKER_BYTES
        workers = min(workers, fitting) if fitting > 1 else 0
        resources = msgspec.structs.replace(resources, block_bytes=1 << 20)
    # Several workers use all cores anyway; without workers the encoder may use threads.
    return workers, msgspec.structs.replace(resources, threads=workers == 0)


class How(msgspec.Struct, frozen=True, kw_only=True):
    """How to build; no field changes a byte of the store."""

    amount: Amount = Amount()
    part: tuple[int, int] | None = None
    push: str = ""
    """Address at which the parts of several machines meet; "": in their folder."""
    limit_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    max_rejects: float = 0.01
    fresh: bool = False
    yes: bool = False
    quiet: bool = False


class Prepared(msgspec.Struct, frozen=True):
    """A planned build that has not begun."""

    recipe: BuildRecipe
    config: msgspec.Struct
    frozen: dict[str, Frozen]
    plan: Plan
    planned: list[PlannedItem]

    @property
    def kind(self) -> type[Source]:
        return plugins.load(plugins.SOURCES, self.recipe.source)

    def source(self) -> Source:
        return self.kind(self.config, self.recipe.inputs, self.frozen, Resources())


def folder_of(chosen: BuildRecipe) -> Path:
    """Return the folder of a build: the named one, or for an overlay a folder in its store."""
    kind = plugins.load(plugins.SOURCES, chosen.source)
    if "" in chosen.inputs:
        raise UsageError("an input has no name", hint="is a variable empty?")
    address = next(filter(None, map(address_of, chosen.inputs)), "")
    if address and not kind.reads_addresses:
        raise UsageError(
            f"`build {chosen.source}` reads whole files or stores, which must be on a disk",
            where=address,
            hint="copy them first; `tokmill store pull ADDRESS -o STORE` copies a store",
        )
    if not kind.is_overlay:
        if not chosen.out:
            raise UsageError("no folder for the store was named", hint="-o STORE")
        return Path(chosen.out)
    if chosen.out:
        raise UsageError("an overlay is in its store", hint="leave -o out; --name chooses its name")
    config = recipe.convert(kind.Config, chosen.options, f"options of {chosen.source}")
    folder: Path = kind.folder(config, chosen.inputs)
    return folder


def prepare(chosen: BuildRecipe) -> Prepared:
    """Check the options, make the vocabularies and the plan; nothing is written."""
    kind = plugins.load(plugins.SOURCES, chosen.source)
    config = recipe.convert(kind.Config, chosen.options, f"options of {chosen.source}")
    request = Request(inputs=chosen.inputs, tokenizer=chosen.tokenizer, roles=chosen.roles)
    own = OWN.set(os.path.abspath(chosen.out) if chosen.out else "")
    try:
        config = kind.resolve(config, request)
        frozen = kind.freeze(config, request)
        source: Source = kind(config, chosen.inputs, frozen, Resources())
        plan, planned = make_plan(chosen.source, source, config, frozen, chosen.inputs)
    finally:
        OWN.reset(own)
    if isinstance(plan.references, dict):
        placed = written_in(folder_of(chosen), plan.references)
        plan = msgspec.structs.replace(plan, references=placed)
    if chosen.tokenizer is not None:
        plan = msgspec.structs.replace(
            plan, tokenizer=path_to_text(str(Path(chosen.tokenizer).absolute()))
        )
    if chosen.roles:
        plan = msgspec.structs.replace(plan, roles=chosen.roles)
    return Prepared(chosen, config, frozen, plan, planned)
