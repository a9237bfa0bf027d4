"""The source `pairs`: from pairs of graphs to walks through both programs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tokmill import plugins
from tokmill.base.errors import (
    MachineError,
    MissingExtraError,
    TokmillError,
    UsageError,
    check_name,
    nearest,
)
from tokmill.builds.scan import NO_PROGRAM, FolderOptions, InputFile, find_files, in_order
from tokmill.builds.source import Item
from tokmill.store.manifest import OtherFile
from tokmill.store.schema import Column, Drop, Records, Schema
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import SUFFIX, read_facts, read_graph
from tokmill.x86.merged import NoFacts
from tokmill.x86.pair_records import TEXTS, Walked, nothing, pair_records
from tokmill.x86.program_source import MOST_TOKENS, Blocks, Walks, X86Source
from tokmill.x86.tokens.rules import COLUMNS
from tokmill.x86.walks import Walking

BETWEEN = " <> "
"""Stands between the two files in the name of an item."""
NO_FACTS = "a graph without imports and strings"
EXPANDS = 14
"""How many times larger than its graphs the records of a pair are, for one walk from each block."""


class PairsConfig(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of pairs of programs."""

    pair: tuple[str, ...] = ()
    """Two programs with a colon between them, by name or as files: A:B. May be repeated."""
    all_pairs: bool = False
    """Pair each program with each other program."""
    rules: str = "tokmill"
    """The rules that make the tokens: tokmill or semanticbbv."""
    vocab: str = ""
    """Folder with the vocabularies asm.json … of the rules semanticbbv."""
    streams: tuple[str, ...] = ()
    """Columns of tokens to keep, such as asm; by default all six. May be repeated."""
    layout: str = ""
    """The pattern of the programs' paths, such as {project}/{compiler}-{level}/{program}."""
    seed: int = 0
    """Seed of the walks."""
    walks: Walks = 2
    """Walks that begin at each block of both programs."""
    walk_tokens: Annotated[int, Meta(ge=16, le=MOST_TOKENS)] = 512
    """Largest number of tokens of a walk; it is cut between instructions."""
    walk_blocks: Blocks = 0
    """Largest number of blocks of a walk; 0: as many as the tokens allow."""
    min_tokens: Annotated[int, Meta(ge=1)] = 1
    """Smallest number of tokens of a walk; shorter walks are skipped."""
    weight: Literal["uniform", "degree"] = "uniform"
    """Probability of a successor: uniform, or in proportion to 1 + its successors (degree)."""


CHOOSING = ("pair", "all_pairs")
"""Options that only decide which pairs a plan lists."""


class GraphFile(NamedTuple):
    """A graph file, and the name of its program."""

    file: InputFile
    program: str


class PairsSource(X86Source):
    """Graph files of `tokmill cfg`; each item is a pair of them.

    Columns: the streams, `side` (0: first program, 1: second) and `border`, as phrases; `address`
    and `function` of a record's first block; `walk`, the number of the walk in that function;
    `first` and `second`, the names of the programs; `origin`, the name of the program in which the
    walk begins; `project program version compiler level` of both, as in `O0+O2` if they differ. A
    record's place is its address.
    """

    Config: ClassVar[type[msgspec.Struct]] = PairsConfig
    version: ClassVar[int] = 2
    hints: ClassVar[Mapping[str, str]] = {
        NO_FACTS: "it is from a pickle or angr; tokmill cfg makes it of the program",
    }

    _graphs: Mapping[tuple[str, str], Graph] = {}

    @classmethod
    def check(cls, config: Any) -> None:
        check(config)

    @classmethod
    def streams(cls, config: Any) -> tuple[str, ...]:
        return tuple(column for column in COLUMNS if column in config.streams or not config.streams)

    @cached_property
    def schema(self) -> Schema:
        return {
            **self.coded(),
            "side": Column("u1", phrase=True),
            "border": Column("u1", phrase=True),
            "address": Column("u8", per="record"),
            **{name: Column("utf8", per="record") for name in TEXTS},
            "walk": Column("u4", per="record"),
        }

    def identity(self) -> dict[str, Any]:
        """Return the versions that decide the tokens; options that choose pairs are left out."""
        streams = self.streams(self.config)
        return {**self.versions(), "streams": streams, **dict.fromkeys(CHOOSING)}

    def items(self) -> Iterator[Item]:
        graphs, self.left_out = find_graphs(self.inputs, self.config)
        self.check_layout(graph.program for graph in graphs)
        expands = EXPANDS * self.config.walks
        by_name: dict[str, Item] = {}
        for first, second in self._pairs(graphs):
            a, b = first.file, second.file
            name = f"{a.name}{BETWEEN}{b.name}"
            if name in by_name:
                raise UsageError(f"a pair is named twice: {name}", hint="name it once")
            partner = (OtherFile(str(b.path.absolute()), b.digest),)
            by_name[name] = Item(
                name, str(a.path.absolute()), 0, a.size + b.size, a.digest, expands, others=partner
            )
        for name in sorted(by_name):
            yield by_name[name]

    def _pairs(self, graphs: Sequence[GraphFile]) -> Iterator[tuple[GraphFile, GraphFile]]:
        config = self.config
        if config.all_pairs:
            if len(graphs) < 2:
                raise UsageError(
                    f"there is only one program, and a pair needs two: {graphs[0].program}",
                    hint="name further graphs",
                )
            yield from combinations(graphs, 2)
            return
        names = Names(graphs)
        for text in config.pair:
            yield names.split(text)

    def batches(self, item: Item) -> Iterator[Records]:
        config = self.config
        walking = Walking(
            seed=config.seed, walks=config.walks, walk_tokens=config.walk_tokens,
            walk_blocks=config.walk_blocks, weight=config.weight,
        )  # fmt: skip
        walked = Walked(self.streams(config), config.min_tokens, walking)
        try:
            first, second = self._both(item)
            keys = (self.key(first), self.key(second))
            caches = [self._caches.of(graph.bits) for graph in (first, second)]
            for batch in pair_records((first, second), keys, caches, walked):
                if "pairs" in batch.notes:
                    batch.notes |= Counter([*self.remarks(first), *self.remarks(second)])
                yield batch
        except (MachineError, MissingExtraError, UsageError):
            raise
        except (NoFacts, TokmillError) as error:
            why = NO_FACTS if isinstance(error, NoFacts) else error.what
            yield nothing(walked.streams, [Drop(0, why, True)])

    def _both(self, item: Item) -> tuple[Graph, Graph]:
        """Return the graphs of a pair; the last two are kept, because pairs are sorted."""
        wanted = [(item.path, item.digest), *((one.path, one.digest) for one in item.others)]
        # Others are dropped first, so that their memory is free for the next ones.
        self._graphs = kept = {key: self._graphs[key] for key in wanted if key in self._graphs}
        for key in wanted:
            if key not in kept:
                kept[key] = read_graph(key[0])
        return kept[wanted[0]], kept[wanted[1]]


def check(config: PairsConfig) -> None:
    check_name("no rules are", config.rules, plugins.RULES)
    for name in config.streams:
        check_name("no stream is", name, COLUMNS)
    chosen = bool(config.pair)
    if chosen == config.all_pairs:
        raise UsageError(
            "all_pairs makes all pairs, so no pairs may be named"
            if chosen
            else "it is not said which programs are pairs",
            hint="--pair A:B, or --all-pairs",
        )
    if config.min_tokens > config.walk_tokens:
        raise UsageError(
            f"min_tokens = {config.min_tokens}", hint=f"1 to {config.walk_tokens} (walk_tokens)"
        )


def find_graphs(
    inputs: Sequence[str], choice: FolderOptions | None = None
) -> tuple[list[GraphFile], dict[str, int]]:
    """Return the graph files below some paths, and what was left out.

    A Parquet file in a folder that holds something else is left out. Raises `TokmillError` if there
    is no graph, for a named file that is not a graph, and for a graph that is damaged or of a later
    version, because the name of its program cannot be read.
    """
    make_them = "make them first, once for all pairs: tokmill cfg FOLDER -o GRAPHS"
    files, left_out = find_files(inputs, (SUFFIX,), choice=choice, instead=make_them)
    named = {Path(argument).absolute() for argument in inputs}
    graphs = []
    for file in files:
        about = read_facts(file.path) if file.path.suffix == SUFFIX else None
        if about is not None:
            graphs.append(GraphFile(file, about.program))
        elif file.path.absolute() in named:
            raise TokmillError(
                "this is not a graph of a program",
                where=str(file.path),
                hint=f"make one, once for all its pairs: tokmill cfg {file.path} -o GRAPHS",
            )
        else:
            left_out[NO_PROGRAM] = left_out.get(NO_PROGRAM, 0) + 1
    if not graphs:
        raise TokmillError(
            "there are no graphs of programs",
            where=", ".join(inputs),
            hint=make_them,
        )
    return graphs, in_order(left_out)


class Names:
    """Finds graphs by the name of the program, or by the name or path of the graph file."""

    def __init__(self, graphs: Sequence[GraphFile]) -> None:
        self.graphs: dict[str, list[GraphFile]] = {}
        for graph in graphs:
            file = graph.file
            names = {file.name, file.name.removesuffix(SUFFIX), str(file.path.absolute())}
            for name in {*names, graph.program, str(file.path)}:
                self.graphs.setdefault(name, []).append(graph)

    def find(self, name: str) -> GraphFile:
        """Return the graph of a name; raises `UsageError` if there is none, or several."""
        named = self.graphs.get(name, [])
        if len(named) == 1:
            return named[0]
        if not named:
            programs = [graph.program for graphs in self.graphs.values() for graph in graphs]
            raise UsageError(
                f"there is no graph of a program called {name!r}",
                hint=nearest(name, list(dict.fromkeys(programs))),
            )
        files = ", ".join(str(graph.file.path) for graph in named)
        raise UsageError(f"several graphs are called {name!r}: {files}", hint="name the files")

    def split(self, text: str) -> tuple[GraphFile, GraphFile]:
        """Return the two programs of `A:B`; A and B may contain colons."""
        parts = text.split(":")
        cuts = [(":".join(parts[:i]), ":".join(parts[i:])) for i in range(1, len(parts))]
        if not cuts:
            raise UsageError(f"--pair {text!r} does not name two programs", hint="--pair A:B")
        readings = [cut for cut in cuts if cut[0] in self.graphs and cut[1] in self.graphs]
        if len(readings) > 1:
            raise UsageError(f"--pair {text!r} can be read in two ways", hint="name the files")
        first, second = readings[0] if readings else cuts[0]
        return self.find(first), self.find(second)
