"""What the tests of SemanticBBV's rows share: the played section, records by names of tokens."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page import Checks, Played
from references_semanticbbv import (
    COMPILERS,
    LEVELS,
    SOURCES,
    STREAMS,
    Block,
    Tokens,
    aligned,
    functions_of,
    got,
    graph_of,
    instructions_of,
    put_inputs,
    reachable,
)

import tokmill
from x86_programs import compiler

checks = Checks("SemanticBBV")
Graph = Any


def played_here(play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch) -> Played:
    """Return the folder in which the section was played, and make it the current one."""
    for name in COMPILERS:
        compiler(name)
    played = play("SemanticBBV", put_inputs)
    monkeypatch.chdir(played.folder)
    return played


# What the tests compare: names of streams for ids, dicts for records.


def named(store: tokmill.Store, record: dict[str, Any]) -> dict[str, list[str]]:
    """Return the tokens of a record, by the vocabularies of its store."""
    found = {}
    for stream in STREAMS:
        names = json.loads(Path(store.vocabulary_file(stream)).read_bytes())["tokens"]
        found[stream] = [names[one] for one in record[stream]]
    return found


def records(path: str | Path) -> list[dict[str, list[str]]]:
    store = tokmill.Store(path)
    return [named(store, record) for record in store]


def streams_of(sequences: Iterable[Iterable[Tokens]]) -> list[dict[str, list[str]]]:
    """Return the streams of sequences of token dicts, which pickles hold."""
    return [aligned(one) for one in sequences]


def blocks_of(store: tokmill.Store, record: dict[str, Any]) -> list[Block]:
    """Return the tokens of a record, or of columns with the ids of a store, in blocks."""
    rows = list(zip(*named(store, record).values(), strict=True))
    begins = [*np.flatnonzero(record["border"] == 3).tolist(), len(rows)]
    return [rows[a:b] for a, b in zip(begins[:-1], begins[1:], strict=True)]


def keyed(streams: dict[str, list[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(streams[stream]) for stream in STREAMS)


def multiset(many: Iterable[dict[str, list[str]]]) -> Counter[Any]:
    return Counter(map(keyed, many))


def numbers_of(text: str, label: str) -> dict[str, float]:
    """Return {min: …, max: …} of a line of `tokmill inspect`."""
    line = next(line for line in text.splitlines() if line.startswith(label))
    return {
        name: float(value.replace(",", ""))
        for name, value in re.findall(r"(\w+): ([\d.,]*\d)", line)
    }


def programs() -> Iterator[tuple[str, str, str, Path]]:
    for project in SOURCES:
        for by in COMPILERS:
            for level in LEVELS:
                yield project, by, level, Path(f"binaries/{project}/{by}-{level}/tool")


def recorded_graphs() -> Iterator[tuple[str, str, int, Graph]]:
    """Yield project, function, number of the program and graph of the indexes in `cfg`.

    Blocks end at calls, which they do not in the pickles.
    """
    for project in SOURCES:
        for name, functions in got(f"cfg/{project}/saved_index.pkl").items():
            for number, (address, _, raw, graph, _) in enumerate(functions):
                finer = graph_of(address, raw, calls_end=True)
                assert list(instructions_of(finer)) == list(instructions_of(graph))
                yield project, name, number, finer


def program_graphs() -> Iterator[tuple[Path, str, Graph]]:
    for *_, path in programs():
        for name, (address, raw) in functions_of(path).items():
            yield path, name, reachable(graph_of(address, raw, calls_end=True))
