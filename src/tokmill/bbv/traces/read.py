"""Read basic block vectors as text, whoever wrote them.

A line that begins with `T` is an interval, with entries `:ID:COUNT` between white space (SimPoint
3.2, section "Frequency vector file"). Written by SimPoint's tools, valgrind's exp-bbv, QEMU's
plugin bbv, gem5, DynamoRIO and others, who differ in white space, comments, the first id and
compression. All other lines are counted and left out.

Beside a trace are files that say where its blocks lie, what was mapped, what its intervals cost.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.base.errors import TokmillError, plain
from tokmill.base.files import machine_errors, sampled
from tokmill.base.inflate import MAGIC, inflate, packing
from tokmill.base.progress import Progress, human_count
from tokmill.bbv.traces.block_vectors import EMPTY, BlockVectors, Declared, joined
from tokmill.store.schema import Array

LONGEST = 1 << 20
"""Most bytes of an entry."""
CHUNK = 1 << 20
"""Bytes that are parsed at once, so that what is computed of them stays in the cache."""
PIECE = 1 << 20
"""Entries of a piece of `pieces`, about."""
ID_LIMIT = 1 << 63
MOST_ENTRIES = 1 << 24
"""Entries of an interval at most, as a row is whole in memory; large programs have millions."""
BOM = b"\xef\xbb\xbf"
BLANK, COLON, NEWLINE, T = (ord(one) for one in " :\nT")
WHITE = np.isin(np.arange(256), [*range(9, 14), BLANK])
VALID = re.compile(rb"(?:\s*:[0-9]+:[0-9]+(?=\s))*\s*")
KEPT, COMMENT = 64, 200
"""Comment lines, the last ones, that are searched for what the file says about itself, and bytes of
each."""
DECLARED = {
    "interval": re.compile(rb"Interval Size (\d{1,18})\)"),
    "intervals": re.compile(rb"Total intervals: (\d{1,18})\b"),
    "instructions": re.compile(rb"Total instructions: (\d{1,18})\b"),
    "repetitions": re.compile(rb"Total reps: (\d{1,18})\b"),
    "thread": re.compile(rb"# Thread (\d{1,18})\b"),
}
MOST = (1 << 64) - 1
"""What `numpy.fromstring` makes of larger numbers."""


def read(path: Path | str, *, quiet: bool = True) -> BlockVectors:
    """Return all intervals of a file; memory is 16 bytes an entry, twice while they are joined."""
    return joined(list(pieces(path, quiet=quiet)))


def pieces(
    path: Path | str,
    *,
    quiet: bool = True,
    tell: Callable[[float], Any] = lambda share: None,
) -> Iterator[BlockVectors]:
    """Yield the intervals of a file in pieces of whole rows, of about `PIECE` entries.

    Memory is bounded by a piece and the longest row. The last piece has the facts of the file
    (`declared`, `ignored`, `torn`). `tell` is called before each piece with the share of the file
    that was read. Raises as `read`.
    """
    parser = _Parser(Path(path))
    size = Path(path).stat().st_size if Path(path).exists() else 0
    parts: list[BlockVectors] = []
    rows = count = 0
    instructions = 0.0
    with Progress(f"reading {Path(path).name}", size, quiet=quiet) as progress:
        for part in parser.run(progress):
            instructions += part.counts.sum(dtype=np.float64)
            parts.append(part)
            rows, count = rows + len(part), count + part.entries
            if instructions >= 2.0**63:
                raise TokmillError(
                    f"the counts of the first {human_count(rows, 'interval')} add up to more than "
                    "63 bits",
                    where=str(path),
                    hint="no program executes so many instructions: the file is damaged",
                )
            if count >= PIECE:
                tell(min(1.0, progress.reached / max(size, 1)))
                yield joined(parts)
                parts, count = [], 0
    stated = parser.declared().intervals
    if stated is not None and stated != rows:
        raise TokmillError(
            f"the file declares {human_count(stated, 'interval')} and has {rows:,}",
            where=str(path),
            hint="a part of it is missing or duplicated: copy it again, or make it again",
        )
    if not rows:
        raise TokmillError(
            "no line is an interval of a basic block vector",
            where=str(path),
            hint="such a line begins with T and has entries :ID:COUNT",
        )
    end = joined(parts or [EMPTY])
    tell(1.0)
    yield replace(end, declared=parser.declared(), ignored=dict(parser.ignored), torn=parser.torn)


def thread_of(path: Path | str) -> int | None:
    """Return the thread that a file says it is of, wherever: exp-bbv writes it at the end."""
    text = b""
    for data in chain(_Parser(Path(path)).content(Progress("", 0, quiet=True)), [b"\n"]):
        text = text[-KEPT:] + data
        # White space after it: a chunk may end between two digits.
        if match := re.search(rb"# Thread (\d{1,18})\s", text):
            return int(match[1])
    return None


class _Parser:
    """Cuts a stream of bytes into chunks, and parses them into rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ignored: Counter[str] = Counter()
        self.torn = False
        self.line = 1
        self.inside: bool | None = None
        """Whether the chunk begins inside of a line: True: of an interval; False: of another."""
        self.comments: deque[bytes] = deque(maxlen=KEPT)
        # The row that is not finished.
        self.ids: list[Array] = []
        self.counts: list[Array] = []

    def declared(self) -> Declared:
        text = b"\n".join(self.comments)
        matches = {name: pattern.search(text) for name, pattern in DECLARED.items()}
        return Declared(**{name: int(match[1]) for name, match in matches.items() if match})

    def run(self, progress: Progress) -> Iterator[BlockVectors]:
        carry = b""
        for number, data in enumerate(self.content(progress)):
            text = carry + (data if number else data.removeprefix(BOM))
            cut = 1 + max(text.rfind(white) for white in (b" ", b"\n", b"\t", b"\r"))
            line = text.rfind(b"\n") + 1
            is_comment = text.startswith(b"#", line) and (line > 0 or self.inside is None)
            if is_comment and len(text) - line < COMMENT:
                # Kept whole, for what the file says about itself.
                cut = line
            elif not cut and (self.inside is False or (self.inside is None and text[:1] != b"T")):
                # Inside of a comment without white space, which need not be kept.
                self.ignored[chr(text[0])] += self.inside is None
                self.inside, carry = False, b""
                continue
            elif not cut and len(text) > LONGEST:
                raise self._error(text, 0, "an entry is longer than 1 MiB")
            carry = text[cut:]
            if cut:
                yield self._parse(text[:cut])
        self.torn = bool(carry) or self.inside is not None
        # The end of the file ends its last line.
        yield self._parse(carry + b"\n" if self.torn else b"", last=True)

    def content(self, progress: Progress) -> Iterator[bytes]:
        path = str(self.path)
        with machine_errors("read", path), open(path, "rb") as file:
            data = file.read(CHUNK)
            kind = packing(data)
            while data and not kind:
                progress.advance(len(data))
                yield data
                data = file.read(CHUNK)
        if kind:
            yield from inflate(path, kind=kind, tell=progress.reach)

    def _parse(self, data: bytes, last: bool = False) -> BlockVectors:
        """Return the rows that end in a chunk; keep the entries of the one that goes on."""
        text = np.frombuffer(bytearray(b"  " + data), np.uint8)
        went_on = self.inside is True
        begins = self._mark_lines(text, data)
        ids, counts, places = self._entries(text, data)
        self.line += data.count(b"\n")
        goes_on = self.inside is True and not last
        edges = np.searchsorted(places, begins)
        if went_on:
            edges = np.append(0, edges)
        rest = int(edges[-1]) if goes_on else len(ids)
        if not goes_on:
            edges = np.append(edges, rest)
        if len(edges) < 2:
            if goes_on:
                self.ids.append(ids[rest:])
                self.counts.append(counts[rest:])
                if sum(map(len, self.ids)) > MOST_ENTRIES:
                    raise self._error(data, 0, f"an interval has more than {MOST_ENTRIES:,} blocks")
            return EMPTY
        edges += sum(map(len, self.ids))
        edges[0] = 0
        ended_ids = np.concatenate([*self.ids, ids[:rest]])
        ended_counts = np.concatenate([*self.counts, counts[:rest]])
        self.ids, self.counts = [ids[rest:]], [counts[rest:]]
        return BlockVectors(edges.astype(np.int64), ended_ids, ended_counts)

    def _mark_lines(self, text: Array, data: bytes) -> Array:
        """Blank out what is not an entry; return where the intervals begin that begin here."""
        ends = np.flatnonzero(text == NEWLINE)
        starts = np.concatenate([[2], ends + 1])
        starts = starts[starts < len(text)]
        stops = np.append(ends + 1, len(text))[: len(starts)]
        firsts = starts.copy()
        blank = WHITE[text[firsts]]
        if blank.any():
            solid = np.append(np.flatnonzero(~WHITE[text]), len(text))
            firsts[blank] = solid[np.searchsorted(solid, starts[blank])]
            blank = firsts >= stops
        new = ~blank
        if self.inside is not None:
            new[:1] = False
        is_vector = np.zeros(len(starts), bool)
        lines = np.flatnonzero(new)
        first, second = text[firsts[lines]], text[firsts[lines] + 1]
        is_vector[lines] = (first == T) & (WHITE[second] | (second == COLON))
        begins = firsts[is_vector]
        is_other = new & ~is_vector
        if is_other.any():
            for letter, count in enumerate(np.bincount(text[firsts[is_other]], minlength=256)):
                if count:
                    self.ignored[chr(letter)] += int(count)
            for i in np.flatnonzero(is_other)[-KEPT:]:
                self.comments.append(data[starts[i] - 2 : min(stops[i], starts[i] + COMMENT) - 2])
        ended = text[stops - 1] == NEWLINE
        empty = blank & ended
        if self.inside is not None:
            empty[:1] = False
        if empty.any():
            self.ignored["blank"] += int(np.count_nonzero(empty))
        if self.inside is False:
            is_other[:1] = True
        if is_other.any():
            # Nothing of these lines is an entry, but their ends still count as lines.
            masked = np.repeat(is_other, stops - starts)
            body = text[2:]
            body[masked & (body != NEWLINE)] = BLANK
        text[begins] = BLANK
        if len(starts) and not ended[-1]:
            if self.inside is None or len(starts) > 1:
                self.inside = None if blank[-1] else bool(is_vector[-1])
        else:
            self.inside = None
        return begins

    def _entries(self, text: Array, data: bytes) -> tuple[Array, Array, Array]:
        """Return ids (int64), counts (uint64) and the places of all entries of a chunk."""
        digit = (text - np.uint8(48)) < 10
        edges = np.flatnonzero(digit[1:] != digit[:-1]) + 1
        if len(edges) % 4:
            raise self._malformed(text, data)
        begins, ends = edges[0::2], edges[1::2]
        colons = np.count_nonzero(text == COLON)
        white = np.count_nonzero((text == BLANK) | ((text - np.uint8(9)) < 5))
        id_begins, count_begins = begins[0::2], begins[1::2]
        if (
            colons != len(begins)
            or colons + white + np.count_nonzero(digit) != len(text)
            or (text[begins - 1] != COLON).any()
            or (ends[0::2] != count_begins - 1).any()
            or not WHITE[text[id_begins - 2]].all()
        ):
            raise self._malformed(text, data)
        digits = np.where(digit, text, BLANK).astype(np.uint8).tobytes()
        numbers = np.fromstring(digits if len(begins) else b"", np.uint64, sep=" ")
        if len(numbers) and int(numbers.max()) == MOST:
            place = int(begins[numbers.argmax()]) - 2
            raise self._error(data, place, "a number has more than 64 bits")
        ids, counts = numbers[0::2], numbers[1::2]
        if len(ids) and int(ids.max()) >= ID_LIMIT:
            place = int(id_begins[ids.argmax()]) - 2
            raise self._error(data, place, "the id of a block has more than 63 bits")
        return ids.astype(np.int64), counts.copy(), id_begins

    def _malformed(self, text: Array, data: bytes) -> TokmillError:
        match = VALID.match(text.tobytes(), 2)
        place = (match.end() if match else 2) - 2
        entry = plain(data[place : place + 20].split(b"\n")[0].decode("latin-1"))
        return self._error(data, place, f"{entry!r} is not an entry of a basic block vector")

    def _error(self, data: bytes, place: int, what: str) -> TokmillError:
        line = self.line + data.count(b"\n", 0, max(place, 0))
        return TokmillError(
            what,
            where=f"{self.path}, line {line}",
            hint="a line that begins with T holds entries :ID:COUNT with white space between",
        )


SIDECARS = {"pc": ".pc", "map": ".map", "cpi": ".intervals.csv"}
"""Option → suffix of the file beside a trace, whose name else is the same."""
ABOUT = ".about.json"
"""What `tokmill bbv profile` also writes beside a trace; no build reads it."""
SUFFIXES = (".bb", ".bbv")


def stem_of(trace: Path) -> Path:
    """Return the path of a trace without `.bb` and the suffix of a compression."""
    for suffix in (*MAGIC, *SUFFIXES):
        if trace.name.lower().endswith(suffix) and len(trace.name) > len(suffix):
            trace = trace.with_name(trace.name[: -len(suffix)])
    return trace


def without_sidecars(
    left_out: Mapping[str, int], traces: Iterable[Path], named: Sequence[str]
) -> dict[str, int]:
    """Return the counts of files that a scan left out, without those beside the traces.

    `named`: the arguments; what lies beside a trace that was named itself was never counted.
    """
    left = Counter(left_out)
    for trace in traces:
        if str(trace) in named:
            continue
        stem = stem_of(trace)
        left.subtract(
            Path(end).suffix or end
            for end in (*SIDECARS.values(), ABOUT)
            if stem.with_name(stem.name + end).is_file()
        )
    return {why: count for why, count in left.items() if count > 0}


class Sidecars:
    """Finds the files that belong to traces."""

    def __init__(
        self, named: Mapping[str, Sequence[str]], options: Iterable[str] = SIDECARS
    ) -> None:
        """Take the files that were named for all traces, by option, and the options to look for."""
        self.named = {name: paths[0] for name, paths in named.items() if paths}
        self.options = tuple(options)
        self._digests: dict[str, str] = {}

    def of(self, trace: Path) -> Iterator[tuple[str, str]]:
        """Yield (path, sampled digest) of the files of a trace."""
        stem = stem_of(trace.absolute())
        for name in self.options:
            path = self.named.get(name) or f"{stem}{SIDECARS[name]}"
            if name not in self.named and not Path(path).is_file():
                continue
            if path not in self._digests:
                self._digests[path] = sampled(Path(path))[1]
            yield path, self._digests[path]

    def roles(self, trace: Path, paths: Iterable[str]) -> dict[str, str]:
        stem, there = stem_of(trace), set(paths)
        places = {name: self.named.get(name) or f"{stem}{end}" for name, end in SIDECARS.items()}
        return {name: path for name, path in places.items() if path in there}
