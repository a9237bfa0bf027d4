"""`build select`: filter, sample, split and merge stores, as one mechanism."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import read_file, sampled
from tokmill.builds.plan import difference
from tokmill.builds.selection.conditions import each_value, parse_condition, take
from tokmill.builds.selection.minhash import REPEATS, batches, find_repeats, rows_of_a_band
from tokmill.builds.shared import shared
from tokmill.builds.source import Frozen, Hash, Item, Request, Source
from tokmill.store.checks.background_check import same_engine
from tokmill.store.checks.hashes import digested, mix, row_digests, store_digests, token_names
from tokmill.store.checks.probe import Probe, read_probe
from tokmill.store.manifest import Manifest, Reference
from tokmill.store.references import references_of
from tokmill.store.schema import ROLE, Array, Records, Schema, as_entries, id_dtype
from tokmill.store.store import Store
from tokmill.store.vocab import Vocabulary

BY_CONTENT = "function-hash"
SHINGLE = 5
OFF = 0.25
"""Error of a drawn share that is told: this part of the smaller side of a split, and of records
that are drawn one by one also three standard deviations."""


class SelectConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Conditions on the records of the new store; all must hold."""

    min_length: int = 0
    """Fewest tokens of a record."""
    max_length: int | None = None
    """Most tokens of a record."""
    where: tuple[str, ...] = ()
    """COLUMN OP VALUE with == != < <= > >= or ~ (a regular expression found in a string). A number
    is compared as a number, in quotes as text."""
    ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share to keep, drawn by hash: equal on every machine, stable when records are added. About N
    of M records: N / M."""
    rest: bool = False
    """Keep the complement of `ratio`: two builds, one of them with `rest`, split a store."""
    seed: int = 0
    """Seed of the random choice of records."""
    by: str = ""
    """Column such as `project`, `program`, `function`: records with equal values are drawn
    together. `function-hash`, or nothing: records with equal tokens are drawn together."""
    unique: bool = False
    """Keep only the first of equal records."""
    near_unique: float = 0.0
    """Keep only the first of nearly equal records: leave out a record whose similarity (Jaccard
    of the shingles, estimated) to a kept one is at least this, such as 0.9; 0 is off."""
    shingle: Annotated[int, Meta(ge=1)] = SHINGLE
    """For `near_unique`: tokens of a shingle; phrases for records that are stored as phrases
    (instructions)."""
    not_in: tuple[str, ...] = ()
    """Stores whose records are left out (to avoid leakage of training data into validation)."""
    partial: bool = False
    """Accept unfinished stores."""
    map_oov: str = ""
    """Replacement of ids that the vocabulary does not have: a role such as unk or pad, or an id."""


class SelectSource(Source):
    """Records of other stores; several of one schema are merged in the order given."""

    Config: ClassVar[type[msgspec.Struct]] = SelectConfig
    places = "record"
    version: ClassVar[int] = 3
    """3: `where` compares the numbers that strings hold as numbers."""
    is_bounded = False

    schema: Schema = {}
    config: SelectConfig

    def prepare(self) -> None:
        config, vocabularies = self.config, self.vocabularies
        self.config = msgspec.structs.replace(
            config, not_in=tuple(str(Path(path).absolute()) for path in config.not_in)
        )
        if config.near_unique:
            rows_of_a_band(config.near_unique)
        self.stores = open_stores(self.inputs, config.partial)
        self.schema = dict(self.stores[0].schema)
        if "token" in vocabularies and "token" in self.schema:
            # A tokenizer that is given now becomes the vocabulary of an imported store.
            size = vocabularies["token"].vocabulary.size
            self.schema["token"] = msgspec.structs.replace(
                self.schema["token"], vocab="token", dtype=id_dtype(size)
            )
        if config.map_oov and not vocabularies:
            raise UsageError(
                "map_oov: the stores carry no vocabulary, so no id is out of it",
                where=str(self.stores[0].path),
                hint="give the one that the ids are meant for: --tokenizer",
            )
        if config.map_oov:
            # An unknown role or id is reported before anything is read.
            for column in self.schema.values():
                if column.vocab is not None and not column.phrase:
                    substitute(config.map_oov, vocabularies[column.vocab].vocabulary)
        if not token_names(self.schema):
            lengths = config.min_length or config.max_length is not None or config.near_unique
            if lengths or any(re.match(r"\s*length\b", text) for text in config.where):
                raise UsageError(
                    "the records have no tokens, so they have no lengths and are near to none",
                    where=str(self.stores[0].path),
                    hint="select from the store that they refer to; --unique leaves out equal ones",
                )
        for path in self.config.not_in:
            check_comparable(self.stores[0], *open_stores([path], config.partial))
        self.conditions = [parse_condition(text, self.schema) for text in config.where]
        self.by = "" if config.by == BY_CONTENT else config.by
        single = {n: c for n, c in self.schema.items() if c.per == "record" and not c.width}
        keys = [name for name, column in single.items() if (name, column) != ("role", ROLE)]
        if self.by and self.by not in keys:
            raise UsageError(
                f"by: the stores have no column {config.by!r} with one value per record",
                hint=nearest(config.by, [*keys, BY_CONTENT]),
            )
        self.looks_back = config.unique or config.near_unique > 0
        self._repeats: list[Array] | None = None
        self._excluded: Array | None = None

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the vocabularies of the inputs; refuse options without effect."""
        check_idle(config)
        first = open_stores(request.inputs, config.partial)[0]
        frozen = {
            name: Frozen(vocabulary, read_file(first.vocabulary_file(name)))
            for name, vocabulary in first.vocabularies.items()
        }
        if request.tokenizer is not None:
            if frozen:
                raise UsageError(
                    "the stores carry a vocabulary already",
                    where=str(first.path),
                    hint="--tokenizer is for imported stores that have none",
                )
            tokenizer = plugins.require("tokmill.text.tokenizers.tokenizer").Tokenizer
            frozen["token"] = Frozen(
                *tokenizer.from_file(request.tokenizer).vocabulary(request.roles)
            )
        return frozen

    @classmethod
    def outcome(cls, config: Any, inputs: Sequence[str], manifest: Manifest) -> str:
        """Return how many records were drawn, if that is far from the share that was asked for."""
        later = ("in another store", *REPEATS.values())
        drawn = manifest.records + sum(manifest.skipped.get(why, 0) for why in later)
        of = drawn + manifest.skipped.get("not drawn", 0)
        asked = 1 - config.ratio if config.rest else config.ratio
        single = config.by in ("", BY_CONTENT)
        chance = 3 * (asked * (1 - asked) / max(of, 1)) ** 0.5 if single else 0
        if not of or abs(drawn / of - asked) <= max(OFF * min(asked, 1 - asked), chance):
            return "" if manifest.records else "no record meets all conditions: demand less"
        together = (
            "records with equal tokens are drawn together; a second draw needs another --seed"
        )
        if not single:
            values = {
                value
                for store in map(Store, inputs)
                for _, _, batch in store.batches()
                for value in each_value(batch, config.by, store.schema, str)
            }
            together = f"records with an equal {config.by!r} are drawn together, and it has " + (
                f"{len(values):,} values here (--seed draws others)"
                if len(values) > 1
                else "one value here, so no share splits them: draw --by another column"
            )
        share = f"{100 * drawn / of:.3g} % of {of:,} records were drawn, not {100 * asked:.3g} %"
        return f"{share}: {together}"

    def identity(self) -> dict[str, Any]:
        return {"not_in": [Store(path).fingerprint for path in self.config.not_in]}

    def references(self) -> dict[str, Reference]:
        return references_of(self.stores[0])

    def probe(self, texts: Sequence[str]) -> Probe | None:
        """Return the probe of the first input that has one.

        There is none if inputs differ in the ids that were put before and after each text.
        """
        probes = [
            read_probe(store.path) for store in self.stores if isinstance(store.manifest.probe, str)
        ]
        around = {(probe.before, probe.after) for probe in probes}
        return probes[0] if len(around) == 1 else None

    def items(self) -> Iterator[Item]:
        before = ""
        for number, store in enumerate(self.stores):
            for place, entry in enumerate(store.shards):
                path = store.shard_file(place).absolute()
                digest = sampled(path)[1]
                name = f"{number:05d}/{place:08d}/{entry.name}"
                if self.looks_back:
                    # Which records stay depends on the shards before, so the name does too.
                    before = hashlib.sha256(f"{before} {entry.sha256}".encode()).hexdigest()
                    name += f"/{before[:24]}"
                yield Item(name, str(path), 0, entry.bytes, digest)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        number, place = (int(part) for part in item.name.split("/")[:2])
        store = self.stores[number]
        digest.update(f"{store.fingerprint} {store.shards[place].sha256}".encode())
        first = sum(entry.records for entry in store.shards[:place])
        begin = first
        for start, batch in batches(store, place):
            keep, reasons = self.choose(batch)
            if self.looks_back:
                repeats = self.repeats()[number][first : first + len(batch)]
                for code, why in REPEATS.items():
                    reasons[keep & (repeats == code)] = why
                keep &= repeats == 0
            first += len(batch)
            places = np.flatnonzero(keep)
            chosen = take(batch, places, self.schema)
            chosen.starts = places + start
            chosen.done = (first - begin) / store.shards[place].records
            # The records are still in the input store, so their number is enough.
            chosen.skipped = dict(Counter(reasons[~keep].tolist()))
            yield self.mapped(chosen) if self.config.map_oov else chosen
        assert first - begin == store.shards[place].records

    def choose(self, batch: Records) -> tuple[Array, Array]:
        """Return (which records stay, reasons of the others), without looking for repeats.

        An entry of several records stays if each of them meets the conditions.
        """
        config, n = self.config, len(batch)
        entries, schema, begins = as_entries(batch, self.schema)
        sizes = np.diff(begins, append=n)
        lengths = np.diff(batch.offsets)
        keep = np.ones(n, bool)
        reason = np.full(n, "", object)

        def demand(condition: Array, why: str) -> None:
            whole = np.repeat(np.logical_and.reduceat(condition, begins), sizes)
            reason[keep & ~whole] = why
            reason[keep & ~whole & condition] = f"{why}: another record of the entry"
            np.logical_and(keep, whole, out=keep)

        if config.min_length:
            demand(lengths >= config.min_length, "too short")
        if config.max_length is not None:
            demand(lengths <= config.max_length, "too many tokens")
        for text, condition in zip(config.where, self.conditions, strict=True):
            holds, unknown = condition(batch, lengths)
            if unknown is not None:
                demand(~unknown, f"no number: {text}")
            demand(holds, f"not {text}")
        needs_digest = config.ratio < 1 and not self.by or config.not_in
        digests = row_digests(entries, schema) if needs_digest else None
        if config.ratio < 1:
            drawn = self.draw(entries, digests) < config.ratio
            demand(np.repeat(drawn != config.rest, sizes), "not drawn")
        elif config.rest:
            demand(np.zeros(n, bool), "not drawn")
        if config.not_in and digests is not None:
            # After the draw, so that records of the other half of a split count as "not drawn".
            demand(np.repeat(~self.excluded(digests), sizes), "in another store")
        return keep, reason

    def draw(self, batch: Records, digests: Array | None) -> Array:
        """Return a number in [0, 1) a record, from its key and the seed."""
        if not self.by:
            assert digests is not None
            salt = hashlib.sha256(f"select {self.config.seed}".encode()).digest()
            mixed = mix(digests["a"] ^ np.uint64(int.from_bytes(salt[:8], "little")))
            return (mixed >> np.uint64(11)) / float(1 << 53)

        def drawn(value: Any) -> float:
            digest = hashlib.sha256(f"{self.config.seed}\0{value}".encode()).digest()
            return int.from_bytes(digest[:8], "little") / 2**64

        return np.asarray(each_value(batch, self.by, self.schema, drawn), np.float64)

    def repeats(self) -> list[Array]:
        """Return a uint8 a record for each store: a key of `REPEATS`, or 0 for what stays."""
        if self._repeats is None:
            config, counts = self.config, [len(store) for store in self.stores]

            def find() -> Array:
                return find_repeats(
                    self.stores,
                    lambda batch: self.choose(batch)[0],
                    config.unique,
                    config.near_unique,
                    config.shingle,
                )

            options = msgspec.to_builtins(config) | self.identity()
            parts = [options, [store.fingerprint for store in self.stores]]
            shape = (sum(counts),)
            repeats = shared(self.resources.scratch, "repeats", parts, np.uint8, shape, find)
            self._repeats = np.split(repeats, np.cumsum(counts)[:-1])
        return self._repeats

    def excluded(self, digests: Array) -> Array:
        """Return for each digest whether a record of another store has it."""
        if self._excluded is None:
            stores = [Store(path) for path in self.config.not_in]
            parts = [store_digests(one, entries=True) for one in stores]
            self._excluded = np.unique(np.concatenate(parts))
        places = np.searchsorted(self._excluded, digests)
        found: Array = places < len(self._excluded)
        found[found] = self._excluded[places[found]] == digests[found]
        return found

    def mapped(self, batch: Records) -> Records:
        for name, column in self.schema.items():
            if column.vocab is None or column.phrase:
                continue
            vocabulary = self.vocabularies[column.vocab].vocabulary
            value = np.array(batch.columns[name])
            wrong = value >= vocabulary.size
            if wrong.any():
                value[wrong] = substitute(self.config.map_oov, vocabulary)
                batch.columns[name] = value
                note = f"ids of {name} replaced by {self.config.map_oov}"
                batch.notes[note] = batch.notes.get(note, 0) + int(wrong.sum())
        return batch


def substitute(name: str, vocabulary: Vocabulary) -> int:
    """Return the id that `map_oov` names: an id, or the id of a role."""
    if not re.fullmatch("[0-9]{1,10}", name):
        return vocabulary.role(name)
    if int(name) >= vocabulary.size:
        raise UsageError(
            f"map_oov = {name} is not an id of the vocabulary, which has {vocabulary.size:,}",
            where=vocabulary.file,
            hint="give an id below that, or a role such as unk",
        )
    return int(name)


def check_idle(config: SelectConfig) -> None:
    if config.rest and config.near_unique:
        raise UsageError(
            "near duplicates are left out after the draw, so a split would have some in both parts",
            hint="build a store with --near-unique first, and split that one",
        )
    for idle, what, wants in (
        (config.rest and config.ratio == 1, "rest", "ratio"),
        (config.by and config.ratio == 1, "by", "ratio"),
        (config.shingle != SHINGLE and not config.near_unique, "shingle", "near-unique"),
    ):
        if idle:
            raise UsageError(
                f"--{what} does nothing without --{wants}",
                hint=f"give a share too, such as --{wants} 0.9, or leave --{what} out",
            )


def check_comparable(store: Store, other: Store) -> None:
    """Refuse stores whose vocabularies differ: equal ids would mean different tokens."""
    for name, vocabulary in store.vocabularies.items():
        same = other.vocabularies.get(name)
        if same is None or same.sha256 != vocabulary.sha256:
            raise TokmillError(
                f"the vocabularies {name!r} differ, so the tokens cannot be compared",
                where=f"{store.path} and {other.path}",
                hint="build both with one tokenizer",
            )
    both = []
    for one in (store, other):
        refers = {name: stated.fingerprint for name, stated in references_of(one).items()}
        columns = [(name, one.schema[name]) for name in digested(one.schema)]
        both.append(
            [(n, c.dtype * (not c.is_whole), c.width, refers.get(c.ref or "")) for n, c in columns]
        )
    if both[0] != both[1]:
        names = " and ".join(", ".join(name for name, *_ in columns) for columns in both)
        raise TokmillError(
            f"the columns that are compared differ in name or meaning: {names}",
            where=f"{store.path} and {other.path}",
            hint="build both with the same options, of the same stores",
        )


def open_stores(inputs: Sequence[str], partial: bool = False) -> list[Store]:
    """Return the stores at some paths; raises `TokmillError` if they cannot be merged.

    `partial`: whether unfinished ones are accepted.
    """
    if not inputs:
        raise UsageError("no store was named", hint="give one store or several")
    stores = [Store(path) for path in inputs]
    check_equal(stores)
    for store in stores if not partial else ():
        store.whole("finish its build, or take what is there by `build select --partial`")
    return stores


def check_equal(stores: Sequence[Store]) -> None:
    """Refuse stores with different columns, vocabularies or references."""
    first = stores[0]
    for store in stores[1:]:
        both = []
        for one in (first, store):
            references = {name: other.fingerprint for name, other in references_of(one).items()}
            both.append({"schema": one.schema, "vocabularies": one.vocabularies})
            both[-1]["references"] = references
        lines = difference(*map(msgspec.to_builtins, both))
        if lines:
            listed = "\n  ".join(lines)
            raise TokmillError(
                f"it cannot be merged with {first.path}:\n  {listed}",
                where=str(store.path),
                hint="stores are merged when columns and vocabularies are equal, and when they "
                "refer to the same stores",
            )
    same_engine(stores)
