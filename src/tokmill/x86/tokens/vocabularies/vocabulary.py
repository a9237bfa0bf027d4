"""Vocabularies of x86 columns: lists of tokens, closed or counted, and their files.

A folder has a file per column. `asm.json` … is the frozen form, `asm_tokens.txt` … has a token per
line in the order of the ids, `asm_tokens_dict.pkl` … is {token: frequency}. Source of the last two:
SemanticBBV, `pre_processing/`, whose two writers begin a text with either [PAD] alone or with five
special tokens.
"""

import functools
import hashlib
import importlib.resources
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, check_name
from tokmill.base.files import is_private, machine_errors, make_folder, read_file, write_file
from tokmill.base.headers import loads_json
from tokmill.store.marks import has_store_files
from tokmill.store.vocab import Vocabulary, find_roles
from tokmill.x86.tokens.rules import COLUMNS

SPECIALS = ("[PAD]", "[SEP]", "[CLS]", "[UNK]", "[MASK]")
"""The ids 0 to 4 of every column."""
UNKNOWN = SPECIALS.index("[UNK]")


class TokenList:
    """The vocabulary of one column: the five special tokens, then all others, sorted.

    Attributes:
        column: which of the six streams.
        rules: the rules that made the tokens.
        tokens: by id.
        counts: occurrences of each token; None for a closed list.
    """

    def __init__(
        self, column: str, rules: str, tokens: Sequence[str], counts: Sequence[int] | None = None
    ) -> None:
        self.column, self.rules = column, rules
        self.tokens = list(tokens)
        self.counts = None if counts is None else list(counts)

    @classmethod
    def of(cls, column: str, rules: str, tokens: Iterable[str]) -> Self:
        return cls(column, rules, [*SPECIALS, *sorted(set(tokens) - set(SPECIALS))])

    @classmethod
    def counted(
        cls, column: str, rules: str, counts: Mapping[str, int], min_count: int = 1
    ) -> Self:
        """Make a list of the tokens that occur at least `min_count` times."""
        kept = (token for token, count in counts.items() if count >= min_count)
        result = cls.of(column, rules, kept)
        result.counts = [counts.get(token, 0) for token in result.tokens]
        return result

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def file(self) -> str:
        return f"{self.column}.json"

    def to_json(self) -> bytes:
        """Return the content of the frozen file; equal lists give equal bytes."""
        data: dict[str, Any] = {"column": self.column, "rules": self.rules, "tokens": self.tokens}
        if self.counts is not None:
            data["counts"] = self.counts
        return (json.dumps(data, ensure_ascii=False, indent=0) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes, where: str = "") -> Self:
        """Read a frozen file; raises `TokmillError` if it is not valid."""
        try:
            data = loads_json(raw)
            result = cls(data["column"], data["rules"], data["tokens"], data.get("counts"))
            good = (
                result.column in COLUMNS
                and isinstance(result.rules, str)
                and all(isinstance(token, str) for token in result.tokens)
                and tuple(result.tokens[: len(SPECIALS)]) == SPECIALS
                and len(result.ids) == len(result.tokens)
                and (result.counts is None or len(result.counts) == len(result.tokens))
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            good = False
        if not good:
            raise TokmillError(
                "not a vocabulary of an x86 column, which is an object with column, rules and "
                f"tokens, the first of which are {' '.join(SPECIALS)}",
                where=where,
                hint="`tokmill vocab import` reads lists of other forms",
            )
        return result

    def vocabulary(self) -> tuple[Vocabulary, bytes]:
        """Return the record of this vocabulary for a store, and the content of its file."""
        raw = self.to_json()
        roles = find_roles({token: self.ids[token] for token in SPECIALS}, where=self.file)
        digest = hashlib.sha256(raw).hexdigest()
        return Vocabulary(file=self.file, sha256=digest, size=len(self), roles=roles), raw


Vocabularies = dict[str, TokenList]
"""Column → its vocabulary."""


@functools.cache
def closed() -> Vocabularies:
    """Return the closed vocabularies of the `tokmill` rules.

    They have every token that the rules can make from instructions that iced-x86 1.21 decodes. The
    list is a file of this package, so it does not depend on the installed version.
    """
    folder = importlib.resources.files("tokmill.x86.tokens.vocabularies")
    lists = json.loads(folder.joinpath("closed_tokens.json").read_bytes())
    return {column: TokenList.of(column, "tokmill", lists[column]) for column in COLUMNS}


def counted(
    counts: Mapping[str, Mapping[str, int]], rules: str, min_count: int = 1
) -> Vocabularies:
    """Return the vocabularies of tokens (column → token → count) without the rarer ones."""
    return {
        column: TokenList.counted(column, rules, counts.get(column, {}), min_count)
        for column in COLUMNS
    }


FROZEN = ".json"
ENDINGS = (FROZEN, "_tokens.txt", "_tokens_dict.pkl")
"""Endings of a column's file; if there are several files, the first is read."""
FORMS = {".json": "frozen", ".txt": "text", ".pkl": "pickle", ".pickle": "pickle"}
"""Suffix → form of a list."""
DEFAULT_RULES = "semanticbbv"
"""The rules of lists that do not name theirs."""
OTHER_NAMES = {"assemble": "asm"}
FILES = "a list is COLUMN.json, COLUMN_tokens.txt or COLUMN_tokens_dict.pkl"


class ReadList(NamedTuple):
    """A list that was read, and its arrangement in the file."""

    path: Path
    tokens: TokenList
    convention: str
    """The place of special tokens, in words."""
    ids: list[int] | None
    """Id in the file → new id; None: the file has no ids."""
    repeated: tuple[str, ...] = ()
    """Tokens that were repeated in the file; they have the id of the first occurrence."""

    @property
    def renumbered(self) -> bool:
        """Whether tokens have other ids than in the file."""
        return self.ids is not None and self.ids != list(range(len(self.ids)))


def read_vocabularies(folder: Path | str, rules: str | None = None) -> Vocabularies:
    """Return the six vocabularies in a folder or a store, in any of the three forms.

    Args:
        rules: the rules that the lists must have. None: those that the lists name; text and pickles
            name none and are read as `semanticbbv`.
    """
    lists = find_lists(folder, rules)
    for one in lists.values():
        if one.repeated:
            raise TokmillError(
                f"the token {one.repeated[0]!r} is repeated in the list, so ids of later tokens "
                "would not be the numbers of their lines",
                where=str(one.path),
                hint="`tokmill vocab import` removes such lines, and lists the ids that change",
            )
    result = {column: one.tokens for column, one in lists.items()}
    missing = [column for column in COLUMNS if column not in result]
    if missing:
        raise TokmillError(
            f"the vocabularies of {', '.join(missing)} are missing",
            where=str(folder),
            hint="`tokmill vocab build x86` makes all six",
        )
    return result


def find_lists(folder: Path | str, rules: str | None = None) -> dict[str, ReadList]:
    """Return column → list of the lists in a folder, as `read_vocabularies`.

    If a column has a text and a pickle, the ids are from the text and the counts from the pickle.
    """
    root = Path(folder)
    with machine_errors("read", root):
        if not root.is_dir():
            raise TokmillError("there is no such folder", where=str(root), hint="check the path")
        if has_store_files(root):
            root = root / "vocab"
        paths = {
            column: [
                root / f"{column}{end}" for end in ENDINGS if (root / f"{column}{end}").exists()
            ]
            for column in COLUMNS
        }
    result = {}
    for column, files in paths.items():
        if files:
            result[column] = read_list(files[0], rules)
            if result[column].tokens.column != column:
                raise TokmillError(
                    f"the list is of the column {result[column].tokens.column}, not {column}",
                    where=str(files[0]),
                    hint="rename the file to its column",
                )
        if [form_of(file) for file in files] == ["text", "pickle"]:
            counts = read_list(files[1], rules).tokens
            numbers = dict(zip(counts.tokens, counts.counts or (), strict=False))
            if numbers:
                tokens = result[column].tokens
                tokens.counts = [numbers.get(token, 0) for token in tokens.tokens]
    if not result:
        raise TokmillError("the folder holds no x86 vocabulary", where=str(root), hint=FILES)
    named = {one.tokens.rules for one in result.values()}
    if len(named) > 1:
        raise TokmillError(
            f"the lists are for different rules: {', '.join(sorted(named))}",
            where=str(root),
            hint="put lists of different rules into different folders",
        )
    return result


def read_list(path: Path | str, rules: str | None = None, column: str = "") -> ReadList:
    """Return the list in a file of any of the three forms; see `read_vocabularies`.

    `column` is needed if the name of the file does not contain it.
    """
    path = Path(path)
    form = form_of(path)
    if rules is not None:
        check_name("no rules are", rules, plugins.RULES)
    with machine_errors("read", path):
        if not path.is_file():
            raise TokmillError("there is no such file", where=str(path), hint="check the path")
        if form == "frozen":
            tokens = TokenList.from_json(read_file(path), str(path))
            if rules is not None and tokens.rules != rules:
                raise TokmillError(
                    f"the list is for the rules {tokens.rules}, not {rules}",
                    where=str(path),
                    hint=f"choose another list, or use the rules {tokens.rules} for everything",
                )
            return ReadList(path, tokens, "frozen", list(range(len(tokens))))
        column, rules = column or column_of(path), rules or DEFAULT_RULES
        if form == "text":
            return _arranged(path, column, rules, _lines(path))
    return _of_pickle(path, column, rules)


def is_vocabulary(path: Path) -> bool:
    """Say whether a path has the name of a list of tokens, or is a folder with such a list."""
    if path.is_dir():
        names = (f"{column}{ending}" for column in COLUMNS for ending in ENDINGS)
        return any((path / name).exists() for name in names)
    return path.is_file() and path.suffix.lower() in FORMS


def form_of(path: Path) -> str:
    """Return the form of a list by the name of its file: frozen, text or pickle."""
    if path.suffix.lower() not in FORMS:
        raise TokmillError("the name is not that of a list of tokens", where=str(path), hint=FILES)
    return FORMS[path.suffix.lower()]


def column_of(path: Path) -> str:
    word = path.name.partition("_")[0].partition(".")[0]
    column = OTHER_NAMES.get(word, word)
    if column not in COLUMNS:
        raise UsageError(
            "the name does not contain the column of the tokens",
            where=str(path),
            hint=f"--column {'|'.join(COLUMNS)}",
        )
    return column


def write_vocabularies(folder: Path, vocabularies: Mapping[str, TokenList]) -> list[Path]:
    make_folder(folder)
    return [
        write_file(folder / f"{column}{FROZEN}", tokens.to_json())
        for column, tokens in vocabularies.items()
    ]


def check_target(folder: Path, rules: str) -> None:
    """Raise `TokmillError` for a folder with anything but frozen lists of the same rules."""
    hint = "choose another folder, or remove this one"
    with machine_errors("read", folder):
        if not folder.exists():
            return
        if not folder.is_dir():
            raise TokmillError("this is not a folder", where=str(folder), hint=hint)
        names = sorted(path.name for path in folder.iterdir() if not is_private(path.name))
    lists = {f"{column}.json" for column in COLUMNS}
    for name in names:
        if name not in lists:
            raise TokmillError(
                f"the folder holds other files than a vocabulary: {name}",
                where=str(folder),
                hint=hint,
            )
        other = read_list(folder / name).tokens.rules
        if other != rules:
            raise TokmillError(
                f"the folder holds a vocabulary of the rules {other}, not {rules}",
                where=str(folder),
                hint=hint,
            )


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokmillError(
            f"the text is not UTF-8: {error.reason}",
            where=f"{path}, byte {error.start:,}",
            hint="a list is text in UTF-8, a token per line",
        ) from None
    lines = [line.strip() for line in text.split("\n")]
    if lines[-1] == "":
        lines.pop()
    for number, line in enumerate(lines, 1):
        if not line:
            raise TokmillError(
                "the line is empty", where=f"{path}:{number}", hint="a list has a token per line"
            )
    return lines


def _of_pickle(path: Path, column: str, rules: str) -> ReadList:
    from tokmill.base.unpickle import Pickle

    # The factory of a defaultdict(int), under its name in Python 2.
    value = Pickle(path, ["builtins.long"]).load()
    names: Iterable[Any] = value if isinstance(value, dict | list | set | frozenset) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise _no_list(path, f"it is of type {type(value).__name__}")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise _no_list(path, f"{name!r} is not text") from None
    if not isinstance(value, dict):
        names = value if isinstance(value, list) else sorted(value)
        return _arranged(path, column, rules, names)
    if not all(type(count) is int and 0 <= count < 1 << 63 for count in value.values()):
        raise _no_list(path, "its values are not counts")
    if sorted(value.values()) == list(range(len(value))) and len(value) > 1:
        return _arranged(path, column, rules, sorted(value, key=value.__getitem__))
    tokens = TokenList.counted(column, rules, value, min_count=0)
    there = [special for special in SPECIALS if special in value]
    with_specials = f", {' '.join(there)} among them" if there else ""
    return ReadList(path, tokens, f"counts{with_specials}", None)


def _no_list(path: Path, why: str) -> TokmillError:
    return TokmillError(
        f"the pickle is not {{token: frequency}} with strings and counts: {why}",
        where=str(path),
        hint="`tokmill inspect` shows its content",
    )


def _arranged(path: Path, column: str, rules: str, names: Sequence[str]) -> ReadList:
    """Return a list of tokens by id; the five special tokens are put first if they are not.

    Repeated tokens are removed; their ids become that of the first occurrence.
    """
    counts = Counter(names)
    repeated = tuple(name for name, times in counts.items() if times > 1)
    there = [special for special in SPECIALS if special in names]
    if tuple(names[: len(SPECIALS)]) == SPECIALS:
        tokens = TokenList(column, rules, [*counts])
        ids = [tokens.ids[name] for name in names]
        return ReadList(path, tokens, "five special tokens first", ids, repeated)
    if there == ["[PAD]"] and names[0] == "[PAD]":
        convention = "[PAD] alone first"
    elif there:
        convention = f"{' '.join(there)} not at the beginning"
    else:
        convention = "no special tokens"
    tokens = TokenList.of(column, rules, names)
    return ReadList(path, tokens, convention, [tokens.ids[name] for name in names], repeated)
