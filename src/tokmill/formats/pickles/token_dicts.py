"""Pickles of token dicts: lists of sequences, or dicts of such lists, a dict an instruction.

An instruction is {"asm": [token], "mne": str, "type": [(kind, run)], "reg": [register],
"rw": [(access, run)], "eflag": str}: the six streams of x86 code, `type` and `rw` with run lengths.
A file holds [sequence] or {function: [sequence, one a variant]}; a sequence is a list of
instructions. In place of a list of sequences there may be one sequence, or a dict of either for
each level of optimisation, {level: [sequence]}; a list of these is a list of functions without a
name (`*_blame.pkl`), and such a dict alone is of one. Source of the formats: SemanticBBV,
`pre_processing/`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.unpickle import Pickle, type_name
from tokmill.builds.scan import FolderOptions, find_files
from tokmill.builds.source import Frozen, GatheredFiles, Request
from tokmill.formats.pickles.token_dicts_export import COLUMNS, ONCE, TokenDictsExport, tokens_of
from tokmill.store.schema import Column, Drops, Phrases, Records, Schema, Strings, id_dtype

MOST_PHRASES = 1 << 18
"""Different instructions after which a new table begins."""
MOST_INSTRUCTIONS = 1 << 20
"""Instructions of a batch."""
INSTRUCTION = 16
"""Memory of an instruction that is known already, about, in bytes."""
NO_REGISTER = {"tokmill": "-", "semanticbbv": "[PAD]"}
"""Rules → their token in `reg` for no register, which the other rules never use."""
HINT = "`tokmill inspect` shows what the file holds"
LISTS = {list, tuple}
"""Types of what is in an order; sets are in another one in each process."""


class TokenDictsOptions(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of pickles of token dicts."""

    vocab: str = ""
    """Folder with the six vocabularies, or a store; by default the tokens are counted."""
    min_count: int = 1
    """If tokens are counted: rarer tokens become [UNK]."""
    rules: str = "semanticbbv"
    """Rules that made the tokens; noted in counted vocabularies."""
    separator: bool = False
    """Put a [SEP] after each instruction, in all columns."""


class TokenDictsSource(GatheredFiles):
    """Pickles of token dicts: a record is a sequence, its instructions are phrases.

    The columns `function`, `level` and `variant` are the key of a dict, the level of optimisation
    and the place in the list ("", "" and 0 in files that are lists of sequences; in a list of
    levels, `function` is the number in that list, and a key that is a level is not a function). A
    record's place is its number in the file. No code in a file is run.
    """

    Config: ClassVar[type[msgspec.Struct]] = TokenDictsOptions
    version: ClassVar[int] = 4
    has_tokenizer: ClassVar[bool] = False
    suffixes = (".pkl", ".pickle")

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the six vocabularies: the named ones, or those of the tokens in the inputs."""
        if request.tokenizer is not None or request.roles:
            raise UsageError("token dicts have no tokenizer", hint="--vocab names vocabularies")
        if config.vocab:
            if config.min_count != 1:
                raise UsageError(
                    "min_count is of tokens that are counted", hint="leave --vocab out"
                )
            read = plugins.require("tokmill.x86.tokens.vocabularies.vocabulary").read_vocabularies
            vocabularies = read(Path(config.vocab))
            return {column: Frozen(*tokens.vocabulary()) for column, tokens in vocabularies.items()}
        counts: dict[str, dict[str, int]] = {column: {} for column in COLUMNS}
        for file in find_files(request.inputs, cls.suffixes, choice=config).files:
            count_tokens(file.path, counts)
        for rules, token in NO_REGISTER.items():
            if token in counts["reg"] and rules != config.rules:
                raise UsageError(
                    f"the dicts are not of the rules {config.rules}: their column reg holds "
                    f"{token!r}, which only the rules {rules} make",
                    hint=f"--rules {rules}",
                )
        counted = plugins.require("tokmill.x86.tokens.vocabularies.vocabulary").counted
        lists = counted(counts, config.rules, config.min_count)
        return {column: Frozen(*tokens.vocabulary()) for column, tokens in lists.items()}

    @cached_property
    def schema(self) -> Schema:
        """The six columns and `border` through phrases, `function`, `level` and `variant`."""
        return {
            **{
                column: Column(
                    id_dtype(self.vocabularies[column].vocabulary.size), phrase=True, vocab=column
                )
                for column in COLUMNS
            },
            "border": Column("u1", phrase=True),
            "function": Column("utf8", per="record"),
            "level": Column("utf8", per="record"),
            "variant": Column("u4", per="record"),
        }

    def identity(self) -> dict[str, Any]:
        """Leave out options that only choose vocabularies, as these are in the plan."""
        return {"vocab": None, "min_count": None, "rules": None}

    def gather(self, path: Path) -> _Sequences:
        table = _Table(self.vocabularies, self.config.separator)
        return _Sequences(path, table, self.resources.block_bytes)


def count_tokens(path: Path, counts: dict[str, dict[str, int]]) -> None:
    """Add the occurrences of each token in a file: of `mne` and `eflag` once an instruction, of the
    other columns once a token of `asm`.
    """
    seen: dict[Key, int] = {}
    for place, (_, sequence, _) in enumerate(_sequences(path)):
        for number, instruction in enumerate(sequence):
            try:
                key = _key(instruction)
                if key not in seen:
                    _streams(key)
            except (TypeError, ValueError, KeyError) as error:
                raise _unfit(path, place, number, error) from None
            seen[key] = seen.get(key, 0) + 1
    for key, times in seen.items():
        for column, tokens in zip(COLUMNS, _streams(key), strict=True):
            here = counts[column]
            for token in tokens[:1] if column in ONCE else tokens:
                here[token] = here.get(token, 0) + times


class _Place(NamedTuple):
    """The position of a sequence in its file."""

    function: str
    level: str
    variant: int


def _sequences(path: Path) -> Iterator[tuple[_Place, list[Any], int]]:
    """Yield (place, instructions, byte up to which the file has been read)."""
    pickle = Pickle(path)
    budget = pickle.budget()
    levels = plugins.require("tokmill.x86.image.program").LEVELS
    number = 0
    for key, value in pickle.entries():
        if pickle.holds is dict and not isinstance(key, str):
            raise _unfit(path, number, None, f"a {type(key).__name__} is a key")
        if isinstance(key, str) and not (isinstance(value, list) or _is_by_level(value)):
            raise _unfit(path, number, None, f"{key!r} holds {_kind(value)}, not a list")
        for place, row in _rows(key, value, levels):
            if not isinstance(row, list):
                raise _unfit(path, number, None, f"it is {_kind(row)}, not a list of token dicts")
            budget.take(INSTRUCTION * (1 + len(row)))
            yield place, row, pickle.position
            number += 1


def _rows(key: Any, value: Any, known: Sequence[str]) -> Iterator[tuple[_Place, Any]]:
    """Yield the sequences of an entry: itself, those of its list, or those of its levels.

    `known`: names of levels.
    """
    function, levels = str(key), value
    if not _is_by_level(value):
        if not isinstance(key, str):
            yield _Place("", "", 0), value
            return
        function, level = ("", key) if key in known else (key, "")
        levels = {level: value}
    # In a list, the number of the function is its name.
    for level, rows in levels.items():
        for variant, row in enumerate([rows] if any(map(_is_token_dict, rows)) else rows):
            yield _Place(function, level, variant), row


def _is_token_dict(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("mne"), str)


def _kind(value: Any) -> str:
    """Return what stands in place of a sequence, in words."""
    if _is_token_dict(value):
        return "one token dict"
    ids = isinstance(value, dict) and isinstance(value.get("mne"), list)
    return "a dict of ids" if ids else f"a {type_name(value)}"


def _is_by_level(value: Any) -> bool:
    """Say whether a value is {level: [sequence]} or {level: sequence}, and no dict of ids."""
    return (
        isinstance(value, dict)
        and "asm" not in value
        and all(isinstance(rows, list) for rows in value.values())
        and all(isinstance(level, str) for level in value)
    )


def _unfit(path: Path, place: int, number: int | None, why: object) -> TokmillError:
    instruction = "" if number is None else f", instruction {number:,}"
    text = f"{why} is missing" if isinstance(why, KeyError) else str(why)
    return TokmillError(
        f"no sequence of token dicts: {text}",
        where=f"{path}, sequence {place:,}{instruction}",
        hint=HINT,
    )


Key = tuple[
    tuple[str, ...], str, tuple[str, ...], bytes, tuple[str, ...], tuple[str, ...], bytes, str
]


def _key(instruction: Any) -> Key:
    """Return the content of an instruction as a tuple, which is fast to compare.

    Raises `TypeError`, `ValueError` or `KeyError` if it is not a token dict.
    """
    asm, reg, types, rw = [instruction[name] for name in ("asm", "reg", "type", "rw")]
    if not {type(asm), type(reg), type(types), type(rw)} <= LISTS:
        raise TypeError("asm, reg, type and rw are not all lists")
    kinds, kind_runs = zip(*types, strict=True)
    accesses, access_runs = zip(*rw, strict=True)
    mne, eflag = instruction["mne"], instruction["eflag"]
    # `join` is the fastest way to check that all are strings.
    "".join(asm), "".join(reg), "".join(kinds), "".join(accesses), "".join((mne, eflag))
    return tuple(asm), mne, kinds, bytes(kind_runs), tuple(reg), accesses, bytes(access_runs), eflag


def _streams(key: Key) -> list[tuple[str, ...]]:
    asm, mne, kinds, kind_runs, reg, accesses, access_runs, eflag = key
    count = len(asm)
    streams = [
        asm,
        (mne,) * count,
        tuple(kind for kind, run in zip(kinds, kind_runs, strict=True) for _ in range(run)),
        reg,
        tuple(
            access for access, run in zip(accesses, access_runs, strict=True) for _ in range(run)
        ),
        (eflag,) * count,
    ]
    for column, stream in zip(COLUMNS, streams, strict=True):
        if len(stream) != count or not count:
            raise ValueError(f"{len(stream)} entries of {column} for {count} tokens")
        # Vocabularies are UTF-8, so a lone surrogate is refused.
        "".join(stream).encode()
    return streams


class _Table:
    """The different instructions so far, as ids."""

    def __init__(self, frozen: Mapping[str, Frozen], separator: bool) -> None:
        self.ids = [tokens_of(frozen[column].data, column).ids for column in COLUMNS]
        roles = [frozen[column].vocabulary.roles for column in COLUMNS]
        self.unknown = [role["unk"] for role in roles]
        self.separator = [[role["sep"]] if separator else [] for role in roles]
        self.clear()

    def clear(self) -> None:
        self.numbers: dict[Key, int] = {}
        self.offsets = array("q", [0])
        self.columns = [array("I") for _ in COLUMNS]
        self.lost = array("I")
        """For each phrase the unknown tokens of each column."""

    def number(self, instruction: Any) -> int:
        """Return the row of an instruction, made if it is new."""
        key = _key(instruction)
        number = self.numbers.get(key)
        if number is None:
            streams = _streams(key)
            for column, ids, unknown, separator, stream in zip(
                self.columns, self.ids, self.unknown, self.separator, streams, strict=True
            ):
                numbers = [ids.get(token, unknown) for token in stream]
                self.lost.append(sum(token not in ids for token in stream))
                column.extend(numbers + separator)
            self.offsets.append(len(self.columns[0]))
            number = self.numbers[key] = len(self.numbers)
        return number

    def phrases(self, ids: array[int], lengths: Sequence[int]) -> tuple[Phrases, dict[str, int]]:
        """Return records of instructions, and how many of their tokens were unknown."""
        rows = np.array(ids, np.uint32)
        lost = np.array(self.lost, np.int64).reshape(-1, len(COLUMNS))[rows].sum(axis=0)
        notes = {
            f"tokens of {column} replaced by unk": int(count)
            for column, count in zip(COLUMNS, lost, strict=True)
            if count
        }
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Copies, as an array cannot grow while views of it exist.
        table = {c: np.array(values) for c, values in zip(COLUMNS, self.columns, strict=True)}
        return Phrases(rows, offsets, np.array(self.offsets), table), notes


class _Sequences:
    def __init__(self, path: Path, table: _Table, block_bytes: int) -> None:
        self.path, self.table, self.block_bytes = path, table, block_bytes
        self.clear()

    def clear(self) -> None:
        self.places: list[int] = []
        self.keys: list[_Place] = []
        self.lengths: list[int] = []
        self.ids = array("I")
        self.empty = array("q")

    def positions(self) -> Iterator[int]:
        """Gather sequence after sequence; one without instructions is skipped."""
        for place, (key, sequence, position) in enumerate(_sequences(self.path)):
            before = len(self.ids)
            for number, instruction in enumerate(sequence):
                try:
                    self.ids.append(self.table.number(instruction))
                except (TypeError, ValueError, KeyError) as error:
                    raise _unfit(self.path, place, number, error) from None
            if len(self.ids) == before:
                self.empty.append(place)
            else:
                self.places.append(place)
                self.keys.append(key)
                self.lengths.append(len(self.ids) - before)
            yield position

    def is_full(self, size: int) -> bool:
        return size > self.block_bytes or len(self.ids) > MOST_INSTRUCTIONS

    def records(self) -> Records:
        phrases, notes = self.table.phrases(self.ids, self.lengths)
        tokens = np.cumsum(np.diff(phrases.table_offsets)[phrases.ids])
        offsets = np.append(0, tokens)[phrases.offsets]
        result = Records(
            offsets,
            {
                "function": Strings.of([key.function for key in self.keys]),
                "level": Strings.of([key.level for key in self.keys]),
                "variant": np.asarray([key.variant for key in self.keys], "u4"),
            },
            np.asarray(self.places, np.int64),
            [Drops(np.array(self.empty, np.int64), "empty", False)] if self.empty else (),
            phrases=phrases,
            notes=notes,
        )
        self.clear()
        if len(self.table.numbers) > MOST_PHRASES:
            self.table.clear()
        return result


__all__ = ["TokenDictsExport", "TokenDictsSource", "count_tokens"]
