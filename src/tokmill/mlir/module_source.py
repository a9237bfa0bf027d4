"""The source `mlir`: operations of modules and models as sequences of tokens, for pre-training."""

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import ChildDied, shared
from tokmill.base.errors import MissingExtraError, TokmillError, UsageError
from tokmill.base.files import path_to_text
from tokmill.builds.scan import FolderOptions, find_files
from tokmill.builds.source import Frozen, Item, Request, WholeFiles
from tokmill.mlir.modules import importing
from tokmill.mlir.tokens import field_tokens
from tokmill.store.schema import Column, Drop, Records, Schema, Strings, drops_of, id_dtype
from tokmill.store.vocab import Vocabulary, find_roles

RULES = "fields 1"
"""The rules of `field_tokens`, and their version."""
CHUNK = 16
"""Schedules that a child makes in one call."""
MOST = 10_000
LIMITS = Limits(seconds=300, memory=4 << 30, output=1 << 30)
DEPTHS = [str(depth) for depth in range(field_tokens.DEEPEST + 1)]


class MlirConfig(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of MLIR modules."""

    schedules: int = 0
    """Random schedules of each module; its operations are also written in the middle of each."""
    seed: int = 0
    """Seed of the schedules."""


class MlirSource(WholeFiles):
    """MLIR modules and ONNX models, one item each; a record is an operation as a policy sees it.

    Columns: `token`, `segment` (0 the operation, 1 its producer) and `depth` (the loop that a
    token is about) as `field_tokens` makes them; a record's `module`, `operation` (name and
    loops), `count` (how often it runs in the module, whatever its schedule), `schedule` (0: none)
    and `step` (actions taken). Equal sequences of an item are one record. A module that can be
    scheduled whole is not cut, so that its operations have their producers. One that cannot be read
    is rejected.
    """

    Config: ClassVar[type[msgspec.Struct]] = MlirConfig
    places = "record"
    version: ClassVar[int] = 3
    has_tokenizer: ClassVar[bool] = False
    rejects_items: ClassVar[bool] = True
    is_bounded = False
    config: MlirConfig

    def prepare(self) -> None:
        # Else it is the child that lacks them, and every module would be rejected.
        for package in ("torch_mlir.ir", "gymnasium"):
            plugins.require(package)
        if not 0 <= self.config.schedules <= MOST:
            raise UsageError(f"schedules = {self.config.schedules}", hint=f"0 to {MOST:,}")

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        if request.tokenizer is not None or request.roles:
            raise UsageError("MLIR modules have no tokenizer", hint="leave it out")
        return {
            "token": _frozen("token", list(field_tokens.VOCABULARY)),
            "depth": _frozen("depth", [*DEPTHS, "[PAD]", "[MASK]"]),
        }

    @cached_property
    def schema(self) -> Schema:
        return {
            "token": Column(id_dtype(len(field_tokens.VOCABULARY)), vocab="token"),
            "segment": Column("u1"),
            "depth": Column("u1", vocab="depth"),
            "module": Column("utf8", per="record"),
            "operation": Column("utf8", per="record"),
            "count": Column("u8", per="record"),
            "schedule": Column("u4", per="record"),
            "step": Column("u1", per="record"),
        }

    def identity(self) -> dict[str, Any]:
        rules = ", ".join([RULES, *_versions()])
        return {"rules": rules} | ({} if self.config.schedules else {"seed": None})

    def items(self) -> Iterator[Item]:
        listing = find_files(self.inputs, importing.SUFFIXES, choice=self.config)
        self.left_out = listing.left_out
        for file in listing.files:
            yield Item(
                file.name, str(file.path.absolute()), 0, file.size, file.digest,
                expands=1 + self.config.schedules,
            )  # fmt: skip

    def batches(self, item: Item) -> Iterator[Records]:
        seen: set[bytes] = set()
        request: dict[str, Any] = {"where": path_to_text(item.path), "seed": self.config.seed}
        records = 0
        try:
            request["text"] = importing.text_of(Path(item.path))
            for first in (0, *range(1, self.config.schedules + 1, CHUNK)):
                last = min(first + CHUNK, self.config.schedules + 1) if first else 1
                child = shared("tokmill.mlir.tokens.sequences:make", LIMITS)
                answer = child(request | {"first": first, "last": last})
                batch = self._records(item, answer, seen, records)
                if not first:
                    batch.skipped = answer["skipped"]
                batch.done = last / (self.config.schedules + 1)
                records += len(batch)
                yield batch
        except (MissingExtraError, UsageError):
            raise
        except ChildDied as died:
            yield self._nothing(f"its reader {died.ended.why() if died.ended else 'ended'}")
        except TokmillError as error:
            yield self._nothing(error.what)

    def _records(self, item: Item, answer: dict[str, Any], seen: set[bytes], first: int) -> Records:
        """Return what a child made, equal sequences once: their counts are equal too."""
        lengths = np.frombuffer(answer["lengths"], np.int64)
        offsets = np.append(0, np.cumsum(lengths))
        flat = [np.frombuffer(answer[name], np.uint8) for name in field_tokens.Tokens._fields]
        kept: list[int] = []
        for row, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            digest = hashlib.blake2b(
                b"".join(column[start:stop].tobytes() for column in flat), digest_size=16
            ).digest()
            if digest not in seen:
                seen.add(digest)
                kept.append(row)
        rows = np.array(kept, np.int64)
        chosen = np.repeat(np.isin(np.arange(len(lengths)), rows), lengths)
        columns: dict[str, Any] = dict(
            zip(("token", "segment", "depth"), (column[chosen] for column in flat), strict=True)
        )
        n = len(rows)
        columns |= {
            "module": Strings.constant(item.name, n),
            "operation": Strings.of([answer["names"][row] for row in kept]),
            "count": np.array([answer["counts"][row] for row in kept], "<u8"),
            "schedule": np.array([answer["schedules"][row] for row in kept], "<u4"),
            "step": np.array([answer["steps"][row] for row in kept], "u1"),
        }
        equal = len(lengths) - n
        return Records(
            np.append(0, np.cumsum(lengths[rows])).astype(np.int64),
            columns,
            np.arange(first, first + n),
            notes={"sequences equal to an earlier one": equal} if equal else {},
        )

    def _nothing(self, reason: str) -> Records:
        columns: dict[str, Any] = {
            name: Strings.of([]) if column.dtype == "utf8" else np.zeros(0, column.numpy())
            for name, column in self.schema.items()
        }
        nothing = np.zeros(0, np.int64)
        return Records(np.zeros(1, np.int64), columns, nothing, drops_of([Drop(0, reason, True)]))


def _versions() -> list[str]:
    """Return what reads modules and models, each with its version.

    Without the last two, which read ONNX models and modules of IREE, other modules are built too.
    """
    result = []
    for package in ("torch-mlir", "iree-base-compiler", "onnx"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result.append(f"{package} {importlib.metadata.version(package)}")
    return result


def _frozen(column: str, tokens: list[str]) -> Frozen:
    data = (
        json.dumps({"column": column, "rules": RULES, "tokens": tokens}, indent=0) + "\n"
    ).encode()
    roles = find_roles({token: number for number, token in enumerate(tokens)})
    file = f"{column}.json"
    return Frozen(Vocabulary(file, hashlib.sha256(data).hexdigest(), len(tokens), roles), data)
