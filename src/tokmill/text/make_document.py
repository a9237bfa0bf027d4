"""From a raw record to a document: fields, placeholders, stripping."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from tokmill.base.errors import UsageError
from tokmill.builds.scan import FolderOptions
from tokmill.store.schema import Array, Drops

_STEP = re.compile(r'("(?:[^"\\]|\\.)*"|[^."\[\]]+)((?:\[\])*)(\.|$)', re.DOTALL)


class Step(NamedTuple):
    """One key of a path, and the number of `[]` after it."""

    key: str
    lists: int


def parse_path(path: str) -> tuple[Step, ...]:
    """Return the steps of a path; raises `UsageError` for an invalid path."""
    steps: list[Step] = []
    place = 0
    while True:
        step = _STEP.match(path, place)
        if step is None:
            raise UsageError(
                f"{path!r} is not a path of keys",
                hint="keys have dots between them and [] after a list, as in messages[].content; "
                'a key that holds such characters itself is quoted: "a.b"',
            )
        key, lists, dot = step.groups()
        if key[0] == '"':
            try:
                key = msgspec.json.decode(key, type=str)
            except msgspec.DecodeError:
                raise UsageError(
                    f"{path!r}: the quoted key is not a JSON string",
                    hint='a key in quotation marks is as in JSON: "a.b".c',
                ) from None
        steps.append(Step(key, len(lists) // 2))
        place = step.end()
        if not dot:
            return tuple(steps)


def quoted(key: str) -> str:
    plain = _STEP.fullmatch(key + ".") and not key.startswith('"') and "[" not in key
    return key if plain else msgspec.json.encode(key).decode()


class Paths:
    """Several paths, read from decoded lines.

    Lines are decoded into structs that hold only these paths, so other content of a line makes no
    objects.
    """

    def __init__(self, texts: Sequence[str], others: Sequence[str] = ()) -> None:
        """Prepare."""
        tree: dict[str, Any] = {}
        self._getters: dict[str, Callable[[Any], Any]] = {}
        # A path may be in both: then it must lead to strings.
        for path in dict.fromkeys([*texts, *others]):
            _grow(tree, path, parse_path(path), str | None if path in texts else Any)
        self.struct = _struct(tree)
        self.decoder = msgspec.json.Decoder(self.struct)
        self._steps = {path: _attributes(tree, parse_path(path)) for path in (*texts, *others)}

    def values(self, records: Sequence[Any], path: str) -> list[Any]:
        """Return the value at a path in each record, or None.

        A path through a list gives the list of all values at it, or None if there are none.
        """
        result: list[Any] = list(records)
        steps = self._steps[path]
        for number, (name, lists) in enumerate(steps):
            if number:
                result = [None if value is None else getattr(value, name) for value in result]
            else:
                result = list(map(attrgetter(name), result))
            if lists:
                rest = steps[number + 1 :]
                return [_ends(value, lists, rest) or None for value in result]
        return result

    def has_lists(self, path: str) -> bool:
        """Say whether a path goes through a list, so that a record may have several values."""
        return any(lists for _, lists in self._steps[path])


class _Node:
    """A key in a tree of paths: `kind` at an end, `inner` keys elsewhere."""

    def __init__(self, path: str, lists: int, kind: Any) -> None:
        self.path, self.lists, self.kind = path, lists, kind
        self.inner: dict[str, _Node] = {}


def _grow(tree: dict[str, _Node], path: str, steps: Sequence[Step], kind: Any) -> None:
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        node = tree.get(step.key)
        if node is None:
            node = tree[step.key] = _Node(path, step.lists, kind if last else None)
        elif node.lists != step.lists or last or node.kind is not None:
            raise UsageError(
                f"the paths {node.path!r} and {path!r} cannot be read together: one ends where the "
                "other goes on",
                hint="name the one that goes further",
            )
        tree = node.inner


def _struct(tree: dict[str, _Node]) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any, Any]] = []
    for number, node in enumerate(tree.values()):
        kind = (_struct(node.inner) | None) if node.inner else node.kind
        for _ in range(node.lists):
            kind = list[kind] | None  # type: ignore[valid-type]
        fields.append((f"f{number}", kind, None))
    names = {f"f{number}": key for number, key in enumerate(tree)}
    return msgspec.defstruct("Line", fields, rename=names.get, gc=False)


def _attributes(tree: dict[str, _Node], steps: Sequence[Step]) -> tuple[tuple[str, int], ...]:
    result = []
    for step in steps:
        result.append((f"f{list(tree).index(step.key)}", step.lists))
        tree = tree[step.key].inner
    return tuple(result)


def _ends(value: Any, lists: int, steps: Sequence[tuple[str, int]]) -> list[Any]:
    """Return all values at the end of a path below a value, in order, without nulls."""
    values = [value]
    for _ in range(lists):
        values = [inner for each in values if each is not None for inner in each]
    for number, (name, deeper) in enumerate(steps):
        values = [getattr(each, name) for each in values if each is not None]
        if deeper:
            rest = steps[number + 1 :]
            return [end for each in values for end in _ends(each, deeper, rest)]
    return [each for each in values if each is not None]


class TextOptions(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options that all text sources share."""

    specials_in_text: Literal["plain", "special", "reject"] = "plain"
    """Meaning of `<|endoftext|>` inside user text: ordinary text, the special token, a reject."""
    end_of_record: Literal["eot", "none"] = "eot"
    """Whether a document ends with the `eot` token."""
    template: Literal["refuse", "add", "none"] = "refuse"
    """For a tokenizer that adds tokens such as BOS to every text."""


class FieldOptions(TextOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of sources whose records have fields."""

    fields: tuple[str, ...] = ("title", "text")
    """Fields whose texts make the document, in this order; missing fields are left out. In JSON
    also paths: meta.title, messages[].content, "a.b" for a key with a dot."""
    join: str = "\n"
    """Text between two fields, and between the elements of a list."""
    strip: bool = False
    """Remove white space around each field."""
    placeholders: tuple[str, ...] = ("[deleted]", "[removed]")
    """Texts that count as empty."""
    keep: tuple[str, ...] = ()
    """Fields that are kept as string columns."""

    def __post_init__(self) -> None:
        if len({*self.fields}) < len(self.fields):
            raise UsageError("fields: a field is named twice", hint="name each once")


@dataclass(slots=True)
class Documents:
    """A batch of documents: texts, where each begins, records left out, fields that are kept."""

    texts: Sequence[str]
    starts: Array
    drops: list[Drops] = field(default_factory=list)
    kept: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ends_part: bool = False
    done: float | None = None
    """Share of the item up to the end of these documents."""

    def take(self, chosen: Sequence[int], drops: Sequence[Drops]) -> Self:
        return dataclasses.replace(
            self,
            texts=[self.texts[i] for i in chosen],
            starts=self.starts[np.asarray(chosen, np.int64)],
            drops=[*self.drops, *drops],
            kept={name: [values[i] for i in chosen] for name, values in self.kept.items()},
        )


D = TypeVar("D", bound=Documents)


def join_lists(values: Sequence[list[str] | None], options: FieldOptions) -> list[str | None]:
    """Return each list of texts as one text; elements are treated like fields."""
    placeholders = frozenset(options.placeholders)
    joined: list[str | None] = []
    for texts in values:
        if texts is None:
            joined.append(None)
            continue
        parts = [text.strip() for text in texts] if options.strip else texts
        joined.append(options.join.join(p for p in parts if p and p not in placeholders))
    return joined


def join_fields(
    columns: Sequence[Sequence[str | None]], options: FieldOptions
) -> tuple[list[str], list[str]]:
    """Return (texts, reasons); a text that is skipped is empty and has a reason.

    `columns` has a sequence of values for each field, None for a missing field.
    """
    placeholders = frozenset(options.placeholders)
    # A long text is not hashed.
    longest = max(map(len, placeholders), default=0)
    texts = []
    for values in zip(*columns, strict=True):
        parts = []
        for value in values:
            if value:
                part = value.strip() if options.strip else value
                if part and (len(part) > longest or part not in placeholders):
                    parts.append(part)
        texts.append(options.join.join(parts))
    reasons = [""] * len(texts)
    # A comprehension for speed: it tests every document, and few are empty.
    for i in [i for i, text in enumerate(texts) if not text or text.isspace()]:
        reasons[i] = _reason([values[i] for values in columns], placeholders)
        texts[i] = ""
    return texts, reasons


def _reason(values: Sequence[str | None], placeholders: frozenset[str]) -> str:
    if all(value is None for value in values):
        return "missing"
    if any(value and value.strip() in placeholders for value in values):
        return "placeholder"
    return "empty"


def select(documents: D, reasons: Sequence[str], rejected: bool = False) -> D:
    if not any(reasons):
        return documents
    kept = [i for i, reason in enumerate(reasons) if not reason]
    left: dict[str, list[int]] = {}
    for i, reason in enumerate(reasons):
        if reason:
            left.setdefault(reason, []).append(i)
    drops = [Drops(documents.starts[at], reason, rejected) for reason, at in left.items()]
    return documents.take(kept, drops)
