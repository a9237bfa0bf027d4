"""Small stores and inputs for tests, and plain-Python twins of what tokmill does in columns."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import tokmill
from tokmill.base.errors import TokmillError
from tokmill.base.files import make_folder, write_file
from tokmill.builds.plan import How
from tokmill.store.checks.validate import validate
from tokmill.store.manifest import (
    ItemReceipt,
    Plan,
    PlannedItem,
    Receipt,
    Reference,
    canonical_digest,
    plan_digest,
    with_checksum,
)
from tokmill.store.receipts import make_manifest
from tokmill.store.schema import Column, Phrases, Records, Schema, Strings, phrase_columns
from tokmill.store.shards.shard import SUFFIX, ShardWriter
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary

TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizer.json"
"""300 ids; 0 is `<|endoftext|>`, 1 is `<|pad|>`."""
EOT = 0

Phrase = tuple[int, bool]
"""(row of the table, a block begins here)."""


def remove_damaged(store: Path) -> None:
    """Remove the shards that `store validate` says to remove, so that a build makes them again."""
    with contextlib.suppress(TokmillError):
        for problem in validate(Store(store)).problems:
            if problem.remove:
                Path(problem.remove).unlink(missing_ok=True)


def rec(tokens: Sequence[int] = (), **values: Any) -> dict[str, Any]:
    """One record: column → value (lists for token columns)."""
    return {"token": list(tokens), **values}


def batch_of(
    schema: Schema,
    rows: Sequence[Mapping[str, Any]],
    *,
    starts: Sequence[int] | None = None,
    table: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Records:
    """Records from rows; a row of a schema with phrases has `phrases`: a list of `Phrase`."""
    n = len(rows)
    plain = next((name for name, c in schema.items() if c.per == "token" and not c.phrase), None)
    if table is not None:
        coded = phrase_columns(schema)
        sizes = [len(row) for row in table[coded[0]]]
        lengths = [sum(sizes[i] for i, _ in row["phrases"]) for row in rows]
        phrases = Phrases(
            ids=np.asarray(
                [i | (int(top) << 31) for row in rows for i, top in row["phrases"]], np.uint32
            ),
            offsets=np.cumsum([0, *(len(row["phrases"]) for row in rows)]),
            table_offsets=np.cumsum([0, *sizes]),
            table={
                name: np.asarray([v for row in table[name] for v in row], np.int64)
                for name in coded
            },
        )
    else:
        assert plain is not None
        lengths, phrases = [len(row[plain]) for row in rows], None
    columns: dict[str, Any] = {}
    for name, column in schema.items():
        if column.phrase:
            continue
        if column.dtype == "utf8":
            columns[name] = Strings.of([row[name] for row in rows])
            continue
        values = [row[name] for row in rows]
        if column.per == "token":
            values = [value for row in values for value in row]
        shape = (-1, column.width) if column.width else (-1,)
        columns[name] = np.asarray(values, column.numpy()).reshape(shape)
    places = range(n) if starts is None else starts
    return Records(
        np.cumsum([0, *lengths]), columns, np.asarray(list(places), np.int64), phrases=phrases
    )


def write_store(
    path: Path,
    schema: Schema,
    shards: Sequence[Sequence[Mapping[str, Any]]],
    *,
    table: Mapping[str, Sequence[Sequence[int]]] | None = None,
    vocabularies: Mapping[str, Vocabulary] | None = None,
    references: Mapping[str, Reference] | None = None,
) -> Store:
    """Write a store of given records, without a source."""
    make_folder(path / "shards")
    make_folder(path / "vocab")
    vocabularies = dict(vocabularies or {})
    limits = {
        name: vocabularies[column.vocab].size
        for name, column in schema.items()
        if column.vocab in vocabularies
    }
    receipts, planned = [], []
    for number, rows in enumerate(shards):
        name = hashlib.sha256(str(number).encode()).hexdigest()[:24]
        writer = ShardWriter(schema, limits)
        writer.add(batch_of(schema, rows, table=table), 0)
        size, digest = writer.write(path / f"shards/{name}{SUFFIX}")
        item = ItemReceipt(
            f"input-{number}", 0, len(rows), len(rows), digest, len(rows), writer.tokens, 0, 0
        )
        receipt = Receipt(
            name, 0, True, len(rows), writer.tokens, size, digest, writer.ranges, [item], []
        )
        write_file(path / f"shards/{name}.json", with_checksum(receipt))
        receipts.append(receipt)
        planned.append(PlannedItem(f"input-{number}", f"/{number}", 0, len(rows), "", name))
    lines = (json.dumps([p.name, p.path, p.start, p.stop, p.digest, p.shard]) for p in planned)
    listed = "".join(line + "\n" for line in lines).encode()
    plan = Plan(
        recipe_id=canonical_digest({"source": "made"}),
        plan_id=plan_digest(canonical_digest({"source": "made"}), planned),
        recipe={"source": "made"},
        schema=schema,
        vocabularies=vocabularies,
        items=len(shards),
        input_bytes=0,
        shards=len(shards),
        options={},
        roots=[],
        references=dict(references) if references else msgspec.UNSET,
        inputs_sha256=hashlib.sha256(listed).hexdigest(),
    )
    write_file(path / "inputs.jsonl", listed)
    write_file(path / "plan.json", with_checksum(plan))
    write_file(path / "manifest.json", with_checksum(make_manifest(plan, receipts, complete=True)))
    return Store(path)


def change_sealed(path: Path, **changes: Any) -> None:
    """Write a manifest, plan or receipt again with other values, with the digest of these."""
    value = json.loads(path.read_bytes()) | changes
    del value["digest"]
    path.write_bytes(with_checksum(value))


TOKENS: Schema = {"token": Column("u2")}


def token_store(path: Path, shards: Sequence[Sequence[Sequence[int]]]) -> Store:
    """A store of one token column."""
    return write_store(path, TOKENS, [[rec(tokens) for tokens in shard] for shard in shards])


def ids_of(store: Store) -> list[list[int]]:
    """All records as lists of ids."""
    return [record["token"].tolist() for record in store]


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write objects, one per line; strings and bytes as they are."""
    with path.open("wb") as handle:
        for row in rows:
            if isinstance(row, str):
                row = row.encode()
            if not isinstance(row, bytes):
                row = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
            handle.write(row + b"\n")
    return path


def quick_build(kind: str, inputs: Any, out: Path | str, **options: Any) -> Store:
    """Build in this process with the small tokenizer; `how` takes the keys of `How`."""
    inputs = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    how = options.pop("how", None) or How(quiet=True, amount=here())
    if kind in ("text", "jsonl", "parquet"):
        options.setdefault("tokenizer", TOKENIZER)
    return tokmill.build(kind, inputs, out, how=how, **options)


def here(**keys: Any) -> Any:
    """An `Amount` that uses no other process."""
    from tokmill.builds.plan import Amount

    return Amount(**{"workers": 0, **keys})


def files_of(store: Path, *, manifest: bool = True) -> dict[str, bytes]:
    """Every file of a store that equal builds have in common: name → bytes."""
    found = {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.parent.name in ("shards", "vocab")
    }
    if manifest:
        found["manifest.json"] = (store / "manifest.json").read_bytes()
    return found


def mixed_lines(folder: Path, count: int = 8) -> Path:
    """JSON Lines files with all kinds of outcomes, in an order that tells blocks apart."""
    folder.mkdir()
    for number in range(count):
        rows: list[Any] = []
        for i in range(30):
            rows.append({"id": i, "text": f"file {number} text {i} " + "word " * (i % 7)})
            if i % 10 == 3:
                rows += ["", {"text": "[removed]"}, b'{"text": 5}', "{", {"text": "\ud800"}]
        jsonl(folder / f"{number}.jsonl", rows)
    return folder
