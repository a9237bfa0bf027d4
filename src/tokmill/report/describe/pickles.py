"""The structure and content of a pickle, read as data; none of its code is run."""

from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.base.errors import MachineError, TokmillError, shell_word
from tokmill.base.files import machine_errors
from tokmill.base.progress import Progress, human_count
from tokmill.base.unpickle import Budget, Instance, Name, Pickle, array_of, type_name
from tokmill.report.describe.recogniser import Facts, Look
from tokmill.store.schema import Array

PICKLES = (".pkl", ".pickle")
MOST_BYTES = 1 << 30
"""Larger pickles are not read for a description."""
LONG = 16 << 20
"""For larger pickles progress is shown."""
DEPTH, LINES = 6, 80
"""Depth to which values are shown, and largest number of lines."""
WIDTH, WHOLE = 3, 6
"""Entries of a value that are shown; of at most `WHOLE` entries all are shown."""
SHOWN = 60
"""Characters of a string that are shown."""
FREQUENT = 20
LOOK = 4
"""Cost of looking at a value, in units of the budget."""
SAMPLE = 1000
"""Entries whose types are checked."""


def read_pickle(look: Look, what: str) -> Facts:
    """Return the facts of a pickle, with its first `look.entries` entries.

    Raises `MachineError` if it cannot be read; damage is reported as a `problem`.
    """
    path, size = look.path, look.size
    facts: Facts = {"kind": "pickle", "what": what, "bytes": size}
    if size > MOST_BYTES:
        return {**facts, "problem": f"larger than {MOST_BYTES >> 30} GiB: it was not read"}
    pickle = Pickle(path, None)
    summary = _Summary()
    try:
        try:
            budget = pickle.budget()
            with Progress("inspect", size, quiet=look.quiet or size < LONG) as bar:
                for key, value in pickle.entries():
                    summary.add(key, value, look.entries, budget)
                    bar.reach(pickle.position)
                bar.reach(size)
        except TokmillError:
            if pickle.holds in (dict, list, None):
                raise
            summary = _Summary()
            summary.whole = [pickle.load()]
    except MachineError:
        raise
    except TokmillError as error:
        facts["problem"] = f"{error.what} ({error.where})"
    summary.is_dict = pickle.holds is dict
    kind = summary.kind() if pickle.holds else "it cannot be read"
    names = sorted(map(printable, pickle.named))
    facts["what"] = f"{what}: {kind}; nothing of it was run"
    if pickle.holds:
        facts |= summary.facts(path)
    if names:
        more = f" … ({len(names) - 20:,} more)" if len(names) > 20 else ""
        facts["python_would_load"] = ", ".join(names[:20]) + more
    if 0 < pickle.stop < size and "problem" not in facts:
        facts["problem"] = f"{size - pickle.stop:,} bytes follow the pickle and were not read"
    return facts


def lengths_of_pickle(path: Path) -> tuple[str, Array]:
    """Return (unit, lengths) of the sequences in a pickle; lengths are int64.

    Raises `TokmillError` if it has no sequences, or is damaged.
    """
    with machine_errors("read", path):
        size = path.stat().st_size
    pickle, summary = Pickle(path, None), _Summary()
    budget = pickle.budget()
    with Progress("lengths", size, quiet=size < LONG) as bar:
        for key, value in pickle.entries():
            summary.add(key, value, 0, budget)
            bar.reach(pickle.position)
    pickle.check_end(size)
    if not summary.lengths:
        raise TokmillError(
            "the pickle holds no sequences",
            where=str(path),
            hint="`tokmill inspect` shows what it holds",
        )
    return summary.unit, np.frombuffer(summary.lengths, np.int64)


class _Summary:
    def __init__(self) -> None:
        self.count = 0
        self.is_dict = False
        self.first: list[tuple[Any, Any]] = []
        self.whole: list[Any] = []
        self.types: Counter[str] = Counter()
        self.lengths = array("q")
        self.unit = "entries"
        self.counts: Counter[str] | None = Counter()
        self.programs: set[int] = set()

    def add(self, key: Any, value: Any, head: int, budget: Budget) -> None:
        self.count += 1
        if len(self.first) < head:
            self.first.append((key, value))
        self.types[type_of(value)] += 1
        if self.counts is not None:
            if isinstance(key, str) and type(value) is int and value >= 0:
                self.counts[key] = value
            else:
                self.counts = None
        programs = programs_of(value)
        if programs:
            self.programs.add(programs)
        else:
            for length, unit in sequence_lengths(value, 2, budget):
                self.lengths.append(length)
                # An empty sequence does not show its unit.
                self.unit = unit if length else self.unit

    def kind(self) -> str:
        if self.programs:
            return f"functions of {human_count(max(self.programs), 'program')} (BinaryCorp)"
        if self.counts:
            return "token counts"
        if self.unit == "tokens":
            return "sequences of token dicts"
        if self.lengths:
            return "sequences"
        if self.whole:
            return type_of(self.whole[0])
        return "a dict" if self.is_dict else "a list"

    def facts(self, path: Path) -> Facts:
        facts: Facts = {}
        if self.programs:
            facts["functions"] = self.count
            facts["next"] = f"tokmill cfg {shell_word(path)} -o GRAPHS"
        elif self.counts:
            total = self.counts.total()
            facts |= {"tokens": self.count, "occurrences": total}
            facts["most_frequent"] = [
                {"token": printable(token), "count": count, "share": count / max(1, total)}
                for token, count in self.counts.most_common(FREQUENT)
            ]
        elif self.lengths:
            values = np.frombuffer(self.lengths, np.int64)
            facts["sequences"] = len(values)
            facts["lengths"] = {
                "min": int(values.min()), "max": int(values.max()),
                "mean": float(values.mean()), "median": float(np.median(values)),
                "in": self.unit,
            }  # fmt: skip
            if self.unit == "tokens":
                facts["next"] = f"tokmill build token-dicts {shell_word(path)} -o STORE"
        if not self.counts:
            facts["structure"] = "\n".join(self.lines())
        return facts

    def lines(self) -> list[str]:
        if self.whole:
            return cut(outline("", self.whole[0], DEPTH))
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in self.types.most_common(5))
        lines = [f"{'dict' if self.is_dict else 'list'} of {self.count:,}: {kinds or 'empty'}"]
        for key, value in self.first:
            label = f"{short(key)}: " if self.is_dict else f"[{key}] "
            lines += [f"  {line}" for line in outline(label, value, DEPTH - 1)]
        if self.count > len(self.first):
            lines.append(f"  … ({self.count - len(self.first):,} more)")
        return cut(lines, len(self.first))


def programs_of(value: Any) -> int:
    """Return the number of programs of which a value has a function each (BinaryCorp); 0: none."""
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    for row in rows:
        if not isinstance(row, list) or len(row) < 4 or not isinstance(row[3], Instance):
            return 0
        if not row[3].kind.startswith("networkx."):
            return 0
    return len(rows)


def sequence_lengths(value: Any, deep: int, budget: Budget) -> Iterator[tuple[int, str]]:
    """Yield (length, unit) of the sequences in a value: itself, or those in its lists or dicts."""
    budget.take(LOOK * (len(value) if isinstance(value, list | tuple | dict) else 1))
    length = sequence_length(value)
    if length is not None:
        yield length
    elif deep and isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from sequence_lengths(inner, deep - 1, budget)


def sequence_length(value: Any) -> tuple[int, str] | None:
    """Return the length of a sequence and its unit; None for other values.

    For token dicts the tokens in `asm` are counted, for instructions with `opnd_ids` 1 and the
    operands.
    """
    if isinstance(value, dict):
        asm = value.get("asm")
        return (len(asm), "ids") if isinstance(asm, list) and "mne" in value else None
    if not isinstance(value, list | tuple):
        return None
    if value and all(isinstance(one, dict) for one in value):
        for name, unit, more in (("asm", "tokens", 0), ("opnd_ids", "opcodes and operands", 1)):
            parts = [one.get(name) for one in value]
            if name == "asm" and not all(map(is_instruction, value)):
                continue
            if all(isinstance(part, list) for part in parts):
                return sum(len(part) + more for part in parts if part is not None), unit
        return None
    if any(isinstance(one, list | tuple | dict | Instance) for one in value):
        return None
    return len(value), "entries"


def outline(label: str, value: Any, deep: int) -> list[str]:
    """Return the lines that show a value: its type and size, then its first entries, indented."""
    line = f"{label}{describe_value(value)}"
    if is_instruction(value):
        return [line]
    inner: list[tuple[str, Any]] = []
    count = 0
    if isinstance(value, dict):
        count = len(value)
        inner = [(f"{short(key)}: ", one) for key, one in _some(value.items(), shown_of(count))]
    elif isinstance(value, list | tuple) and any(map(_is_nested, value[:SAMPLE])):
        count = len(value)
        inner = [(f"[{i}] ", one) for i, one in enumerate(_some(value, shown_of(count)))]
    elif isinstance(value, Instance) and array_of(value) is None:
        parts = {"arguments": value.args, "state": value.state, "entries": value.items}
        inner = [(f"{name}: ", part) for name, part in parts.items() if part]
        count = len(inner)
    if not inner or not deep:
        return [line]
    lines = [line]
    for name, one in inner:
        lines += [f"  {text}" for text in outline(name, one, deep - 1)]
    if count > len(inner):
        lines.append(f"  … ({count - len(inner):,} more)")
    return lines


def shown_of(count: int) -> int:
    return count if count <= WHOLE else WIDTH


def describe_value(value: Any) -> str:
    """Return a value's type and size, and the value itself if it is small."""
    if isinstance(value, dict):
        if is_instruction(value):
            return f"token dict: {short(' '.join(map(str, value['asm'])))}"
        return f"dict of {len(value):,}"
    if isinstance(value, list | tuple | set | frozenset):
        some = list(_some(value, SAMPLE))
        kinds = sorted({type_of(one) for one in some})
        more = [] if len(kinds) <= 4 else ["…"]
        of = f" {' or '.join(kinds[:4] + more)}" if kinds else ""
        text = f"{type(value).__name__} of {len(value):,}{of}"
        if some and not any(map(_is_nested, some)):
            most = shown_of(len(value))
            text += f": {', '.join(map(short, some[:most]))}{', …' if len(value) > most else ''}"
        return text
    if isinstance(value, Instance):
        array = array_of(value)
        if array is not None:
            return f"numpy array {array.dtype} of shape {array.shape}"
        return printable(value.kind)
    if isinstance(value, bytes | bytearray):
        return f"{type(value).__name__} of {len(value):,}: {value[:16].hex(' ')}"
    if isinstance(value, str) and len(value) > SHOWN:
        return f"str of {len(value):,}: {short(value)}"
    return short(value)


def is_instruction(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("asm"), list):
        return False
    return isinstance(value.get("mne"), str)


def type_of(value: Any) -> str:
    """Return the name of a value's type, printable; for an instance, of its class."""
    return printable(type_name(value))


def short(value: Any) -> str:
    """Return a value as Python writes it, cut if it is long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN else f"{value[:SHOWN]!r}…"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, Name):
        return printable(str(value))
    if _is_nested(value) or isinstance(value, bytes | bytearray):
        return f"({type_of(value)})" if not isinstance(value, tuple) else _short_tuple(value)
    return repr(value)


def _short_tuple(value: tuple[Any, ...]) -> str:
    most = shown_of(len(value))
    parts = [f"({type_of(one)})" if _is_nested(one) else short(one) for one in value[:most]]
    return f"({', '.join(parts)}{', …' if len(value) > most else ''})"


def printable(text: str) -> str:
    return text if text.isprintable() and len(text) < 200 else repr(text[:200])


def cut(lines: list[str], entries: int = 0) -> list[str]:
    most = LINES // WIDTH * max(WIDTH, entries)
    return lines if len(lines) <= most else [*lines[:most], "…"]


def _some(values: Any, most: int) -> Iterator[Any]:
    return (value for _, value in zip(range(most), values, strict=False))


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | set | frozenset | Instance)
