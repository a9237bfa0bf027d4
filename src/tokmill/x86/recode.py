"""`build recode`: the same records with the ids of other vocabularies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import read_file, sampled_digest
from tokmill.builds.selection.minhash import batches
from tokmill.builds.selection.select import open_stores
from tokmill.builds.source import Frozen, Hash, Item, Request, Resources, Source
from tokmill.store.manifest import Reference
from tokmill.store.references import references_of
from tokmill.store.schema import PHRASE_BIT, Array, Phrases, Records, Schema, id_dtype
from tokmill.store.store import Store
from tokmill.x86.tokens.vocabularies.vocabulary import UNKNOWN, TokenList, Vocabularies
from tokmill.x86.tokens.vocabularies.vocabulary_changes import (
    counts_in,
    id_map,
    lists_to_keep,
    pruned,
    vocabularies_in,
)
from tokmill.x86.tokens.vocabularies.vocabulary_files import read_vocabularies


class RecodeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The vocabularies of the new store; without options, the tokens that occur in the stores."""

    vocab: str = ""
    """Folder with vocabularies of the same rules."""
    min_count: int = 1
    """Tokens that occur less often than this in the stores become [UNK]."""
    used_by: tuple[str, ...] = ()
    """Stores: tokens that occur in none of them become [UNK]."""
    keep: str = ""
    """A list of tokens, or a folder of lists: all other tokens of these columns become [UNK]."""


class RecodeSource(Source):
    """Records of stores of x86 code, whose tokens get the ids of other vocabularies.

    Tokens that these do not have become `[UNK]`, and are counted among the notes. Several stores
    of one schema are merged.
    """

    Config: ClassVar[type[msgspec.Struct]] = RecodeOptions
    places = "record"
    version: ClassVar[int] = 2
    has_tokenizer: ClassVar[bool] = False
    is_bounded = False

    def __init__(
        self,
        config: Any,
        inputs: Sequence[str],
        vocabularies: Mapping[str, Frozen],
        resources: Resources,
    ) -> None:
        self.config = msgspec.structs.replace(
            config,
            vocab=_absolute(config.vocab),
            used_by=tuple(map(_absolute, config.used_by)),
            keep=_absolute(config.keep),
        )
        self.stores = open_stores(inputs)
        self.frozen = vocabularies
        self._shard: tuple[int, int] | None = None
        self._coded: _Coded | None = None

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the new vocabularies, and those of other columns as they are.

        Raises `UsageError` if options exclude each other, `TokmillError` if a vocabulary is for
        other rules.
        """
        if request.tokenizer is not None or request.roles:
            raise UsageError("x86 code has no tokenizer", hint="--vocab names vocabularies")
        stores = open_stores(request.inputs)
        old = vocabularies_in(stores[0])
        frozen = {
            name: Frozen(vocabulary, read_file(stores[0].vocabulary_file(name)))
            for name, vocabulary in stores[0].vocabularies.items()
        }
        for column, tokens in _chosen(config, stores, old).items():
            if column in old:
                frozen[stores[0].schema[column].vocab or column] = Frozen(*tokens.vocabulary())
        return frozen

    @cached_property
    def schema(self) -> Schema:
        """The schema of the stores, with ids as wide as the new vocabularies need."""
        return {
            name: msgspec.structs.replace(
                column, dtype=id_dtype(self.frozen[column.vocab].vocabulary.size)
            )
            if name in self.maps and column.vocab
            else column
            for name, column in self.stores[0].schema.items()
        }

    @cached_property
    def maps(self) -> dict[str, Array]:
        """Column → old id → new id."""
        found = {}
        for column, tokens in vocabularies_in(self.stores[0]).items():
            data = self.frozen[self.stores[0].schema[column].vocab or column].data
            new = TokenList.from_json(data, column)
            found[column] = np.array(id_map(tokens, new), id_dtype(len(new)))
        return found

    def identity(self) -> dict[str, Any]:
        """Return nothing: the options only choose vocabularies, and these are in the plan."""
        return dict.fromkeys(("vocab", "min_count", "used_by", "keep"))

    def references(self) -> dict[str, Reference]:
        """Return the stores that the inputs refer to; they are the same for all inputs."""
        return references_of(self.stores[0])

    def items(self) -> Iterator[Item]:
        for number, store in enumerate(self.stores):
            for place, entry in enumerate(store.shards):
                path = store.shard_file(place).absolute()
                digest = sampled_digest(path, entry.bytes)
                name = f"{number:05d}/{place:08d}/{entry.name}"
                yield Item(name, str(path), 0, entry.bytes, digest)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        number, place = (int(part) for part in item.name.split("/")[:2])
        store = self.stores[number]
        digest.update(f"{store.fingerprint} {store.shards[place].sha256}".encode())
        for start, batch in batches(store, place):
            batch.starts = np.arange(start, start + len(batch))
            batch.done = (start + len(batch)) / store.shards[place].records
            for column, ids in self.maps.items():
                value = batch.columns.get(column)
                if isinstance(value, np.ndarray):
                    batch.columns[column] = ids[value]
                    _note(batch, column, int(_lost(ids)[value].sum()))
            if batch.phrases is not None:
                self._recode_phrases(batch, batch.phrases, (number, place))
            yield batch

    def _recode_phrases(self, batch: Records, phrases: Phrases, shard: tuple[int, int]) -> None:
        if self._coded is None or self._shard != shard:
            # Every batch of a shard has the whole table of the shard.
            self._shard, self._coded = shard, _Coded(phrases, self.maps)
        phrases.table = self._coded.table
        uses = np.bincount(phrases.ids & ~PHRASE_BIT, minlength=len(phrases.table_offsets) - 1)
        for column, lost in self._coded.lost.items():
            _note(batch, column, int(lost @ uses))


class _Coded:
    """The phrase table of a shard with new ids."""

    def __init__(self, phrases: Phrases, maps: Mapping[str, Array]) -> None:
        self.table = dict(phrases.table)
        self.lost: dict[str, Array] = {}
        """Column → tokens of each row that become `[UNK]`."""
        for column, ids in maps.items():
            if column in self.table:
                old = self.table[column]
                if len(old) and int(old.max()) >= len(ids):
                    raise TokmillError(
                        f"column {column!r} holds the id {old.max()}; ids are 0 to {len(ids) - 1}",
                        hint="the shard is damaged: `tokmill store validate STORE` finds it",
                    )
                sums = np.append(0, np.cumsum(_lost(ids)[old]))
                self.lost[column] = np.diff(sums[phrases.table_offsets])
                self.table[column] = ids[old]


def _lost(ids: Array) -> Array:
    """Return whether each old id becomes `[UNK]` and was not before."""
    lost: Array = ids == UNKNOWN
    lost[UNKNOWN] = False
    return lost


def _note(batch: Records, column: str, count: int) -> None:
    if count:
        note = f"tokens of {column} replaced by unk"
        batch.notes[note] = batch.notes.get(note, 0) + count


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _chosen(config: RecodeOptions, stores: Sequence[Store], old: Vocabularies) -> Vocabularies:
    """Return the new vocabularies of the x86 columns."""
    if config.vocab:
        if config.min_count > 1 or config.used_by or config.keep:
            raise UsageError(
                "vocab names whole vocabularies; min_count, used_by and keep prune old ones",
                hint="`tokmill vocab prune` first",
            )
        rules = next(iter(old.values())).rules
        return read_vocabularies(Path(config.vocab), rules)
    keep = lists_to_keep(config.keep) if config.keep else None
    used = [counts_in(Store(path)) for path in config.used_by]
    if config.min_count > 1 or not (used or keep):
        found = [counts_in(store) for store in stores]
        if used:
            old = pruned(old, used=used)
        used = found
    return pruned(old, min_count=config.min_count, used=used, keep=keep)
