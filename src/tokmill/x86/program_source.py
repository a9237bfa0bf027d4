"""The source `x86`: from programs, or graphs of them, to records of six streams."""

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tokmill import plugins
from tokmill.base.errors import (
    MachineError,
    MissingExtraError,
    TokmillError,
    UsageError,
    check_name,
)
from tokmill.builds.scan import NO_PROGRAM, FolderOptions, InputFile, Inputs, in_order
from tokmill.builds.source import Frozen, Item, Request, Resources, WholeFiles
from tokmill.store.schema import Column, Drop, Records, Schema, id_dtype
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import SUFFIX, read_about
from tokmill.x86.graphs.lifting import (
    PICKLE,
    find_inputs,
    graphs_in,
    lifter_version,
)
from tokmill.x86.image.program import Key, KeyTemplate
from tokmill.x86.records import Cutting, Unit, nothing, records_of
from tokmill.x86.tokens.rules import COLUMNS
from tokmill.x86.tokens.templates import Templates
from tokmill.x86.tokens.vocabularies.vocabulary import (
    TokenList,
    Vocabularies,
    closed,
    read_vocabularies,
)

EXPANDS = {"function": 1, "block": 6, "walk": 10}
"""About how many times larger than a program its records are; for walks, with one from each
block."""
LEAST_TOKENS = 64
"""Smallest limit of tokens in a record: any instruction must fit."""
MOST_TOKENS = 32_768
Walks = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Walks from a block: a walk's number in its function is u4."""
Blocks = Annotated[int, Meta(ge=0, le=1 << 30)]


class X86Config(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of x86 programs."""

    unit: Unit = "function"
    """What a record is: a function, a basic block, or a random walk over the blocks of one."""
    rules: str = "tokmill"
    """The rules that make the tokens: tokmill or semanticbbv."""
    vocab: str = ""
    """Folder with the vocabularies asm.json … of the rules semanticbbv."""
    separator: bool = False
    """Put a [SEP] after each instruction, in all columns."""
    lifter: str = "native"
    """The lifter, which finds functions and blocks in programs: native, or that of an installed
    package; graphs need none."""
    layout: str = ""
    """The pattern of the programs' paths, such as {project}/{compiler}-{level}/{program}."""
    max_tokens: Annotated[int, Meta(ge=LEAST_TOKENS, le=MOST_TOKENS)] = MOST_TOKENS
    """Largest number of tokens of a record; a longer function is cut into parts, between
    instructions."""
    min_tokens: int = 100
    """Smallest number of tokens of a walk; shorter walks are skipped."""
    seed: int = 0
    """Seed of the walks."""
    walks: Walks = 1
    """Walks from each starting point (walk_from)."""
    walk_from: Literal["every", "entry", "random"] = "every"
    """Starting points in a function: every block, its entry, or random blocks."""
    walk_tokens: int = 512
    """Largest number of tokens of a walk; it is cut between instructions."""
    walk_blocks: Blocks = 0
    """Largest number of blocks of a walk; 0: as many as the tokens allow."""
    weight: Literal["uniform", "degree"] = "uniform"
    """Probability of a successor: uniform, or in proportion to 1 + its successors (degree)."""


WALKS = ("min_tokens", "seed", "walks", "walk_from", "walk_tokens", "walk_blocks", "weight")
"""Options that only concern walks."""


class X86Source(WholeFiles):
    """ELF and PE programs, and the graphs that `tokmill cfg` makes of them; one item each.

    Columns: the six streams of `tokmill.x86.tokens.rules` and `border` through phrases; a record's
    `address` (of the function or block, of a walk's first block), `function` (raw symbol, or
    `sub_401000`), `project program version compiler level`, `part` (number of the part, from 0, of
    a function that was cut) and, for walks, `walk`. A record's place is its address. A program that
    cannot be lifted is rejected.
    """

    Config: ClassVar[type[msgspec.Struct]] = X86Config
    places = "address"
    version: ClassVar[int] = 2
    has_tokenizer: ClassVar[bool] = False
    rejects_items: ClassVar[bool] = True
    part_bytes: ClassVar[int] = 128 << 20

    def __init__(
        self,
        config: Any,
        inputs: Sequence[str],
        vocabularies: Mapping[str, Frozen],
        resources: Resources,
    ) -> None:
        self.check(config)
        vocab = str(Path(config.vocab).absolute()) if config.vocab else ""
        self.config: Any = msgspec.structs.replace(config, vocab=vocab)
        self.inputs, self.frozen = list(inputs), vocabularies
        self.layout = KeyTemplate(config.layout)
        self._caches = Caches(config.rules, vocabularies, getattr(config, "separator", False))

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse options that do not fit together."""
        check(config)

    @classmethod
    def streams(cls, config: Any) -> tuple[str, ...]:
        return COLUMNS

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the vocabularies of the streams: the closed ones, or those of a folder."""
        if request.tokenizer is not None or request.roles:
            raise UsageError("x86 code has no tokenizer", hint="--vocab names vocabularies")
        cls.check(config)
        lists = vocabularies_of(config.rules, config.vocab)
        return {column: Frozen(*lists[column].vocabulary()) for column in cls.streams(config)}

    def coded(self) -> Schema:
        return {
            column: Column(id_dtype(self.frozen[column].vocabulary.size), phrase=True, vocab=column)
            for column in self.streams(self.config)
        }

    @cached_property
    def schema(self) -> Schema:
        per_record: dict[str, Literal["u4", "u8", "utf8"]] = {"address": "u8", "function": "utf8"}
        per_record |= dict.fromkeys(Key._fields, "utf8")
        per_record["part"] = "u4"
        if self.config.unit == "walk":
            per_record["walk"] = "u4"
        return {
            **self.coded(),
            "border": Column("u1", phrase=True),
            **{name: Column(dtype, per="record") for name, dtype in per_record.items()},
        }

    def identity(self) -> dict[str, Any]:
        """Return the versions that decide blocks and tokens; leave out options without effect."""
        unused = () if self.config.unit == "walk" else WALKS
        lifter = lifter_version(self.config.lifter)
        return {**self.versions(), "lifter": lifter, **dict.fromkeys(unused)}

    def versions(self) -> dict[str, Any]:
        rules = plugins.load(plugins.RULES, self.config.rules)
        iced = importlib.metadata.version("iced-x86")
        return {"vocab": None, "rules": f"{rules.name} {rules.version}, iced-x86 {iced}"}

    def check_layout(self, names: Iterable[str]) -> None:
        name = None
        for name in names:
            if self.layout.fields(name) is not None:
                return
        if name is not None:
            raise UsageError(
                f"layout: no path fits {self.config.layout!r}, such as {name!r}",
                hint="it is matched with all of the path below the INPUT argument",
            )

    def key(self, graph: Graph) -> Key:
        return self.layout.key(graph.program, graph.compiler, graph.level)

    def remarks(self, graph: Graph) -> list[str]:
        notes = [f"programs that are not complete: {why}" for why in graph.cut_short]
        if self.layout.fields(graph.program) is None:
            notes.append("programs whose path does not fit the layout")
        return notes

    def items(self) -> Iterator[Item]:
        files, self.left_out = find_items(self.inputs, self.config)
        self.check_layout(map(name_of, files))
        config = self.config
        expands = config.walks if config.unit == "walk" else 1
        if config.unit != "walk" or config.walk_from == "every":
            expands *= EXPANDS[config.unit]
        for file in files:
            path = str(file.path.absolute())
            yield Item(file.name, path, 0, file.size, file.digest, expands=expands)

    def batches(self, item: Item) -> Iterator[Records]:
        config = self.config
        walking = None
        if config.unit == "walk":
            from tokmill.x86.walks import Walking

            walking = msgspec.convert(config, Walking, from_attributes=True)
        cutting = Cutting(config.unit, config.max_tokens, config.min_tokens, walking)
        graph = self._graph(item)
        if isinstance(graph, str):
            yield nothing(cutting.unit, self._caches.of(64), [Drop(0, graph, True)])
            return
        notes = self.remarks(graph)
        for batch in records_of(graph, self.key(graph), self._caches.of(graph.bits), cutting):
            batch.notes |= dict.fromkeys(notes, 1)
            notes = []
            yield batch

    def _graph(self, item: Item) -> Graph | str:
        program = InputFile(item.name, Path(item.path), item.size, item.digest)
        try:
            return next(graphs_in(program, lifter=self.config.lifter))
        except (MachineError, MissingExtraError, UsageError, MemoryError, OSError):
            raise
        except TokmillError as error:
            return error.what
        except Exception as error:
            # A bug of the lifter costs this program, not a build of thousands of programs.
            return f"the lifter failed: {type(error).__name__}"


class Caches:
    """Caches of templates, one for each kind of code, which outlive programs and shards."""

    def __init__(self, rules: str, frozen: Mapping[str, Frozen], separator: bool = False) -> None:
        """Take the rules and the vocabularies; streams without a vocabulary are not kept."""
        self.rules, self.frozen, self.separator = rules, frozen, separator
        self._templates: dict[int, Templates] = {}

    def of(self, bits: int) -> Templates:
        if bits not in self._templates:
            vocabularies = {
                column: TokenList.from_json(self.frozen[column].data)
                if column in self.frozen
                else TokenList.of(column, self.rules, ())
                for column in COLUMNS
            }
            self._templates[bits] = Templates(self.rules, bits, vocabularies, self.separator)
        return self._templates[bits]


def find_items(inputs: Sequence[str], choice: FolderOptions | None = None) -> Inputs:
    """Return the programs and graphs below some paths, and what was left out."""
    files, left_out = find_inputs(inputs, choice)
    named = {Path(argument).name for argument in inputs if not Path(argument).is_dir()}
    kept = []
    for file in files:
        if file.path.suffix == PICKLE:
            raise TokmillError(
                "a pickle is not a program",
                where=str(file.path),
                hint=f"make graphs of it first: tokmill cfg {file.path} -o GRAPHS",
            )
        if file.name in named or file.path.suffix != SUFFIX or read_about(file.path) is not None:
            kept.append(file)
    if not kept:
        raise TokmillError(
            "there are no programs",
            where=", ".join(inputs),
            hint="ELF and PE files for x86 are read, and graphs that `tokmill cfg` makes of them",
        )
    if len(files) > len(kept):
        left_out[NO_PROGRAM] = left_out.get(NO_PROGRAM, 0) + len(files) - len(kept)
        left_out = in_order(left_out)
    return Inputs(kept, left_out)


def name_of(file: InputFile) -> str:
    """Return the name of a program; for a graph, that of the program it was made from."""
    about = read_about(file.path) if file.path.suffix == SUFFIX else None
    return about.program if about else file.name


def vocabularies_of(rules: str, folder: str) -> Vocabularies:
    """Return the vocabularies of a set of rules: the closed ones, or those in a folder."""
    if folder:
        return read_vocabularies(folder, rules)
    if rules == "tokmill":
        return closed()
    raise UsageError(
        f"the rules {rules} have no closed vocabularies",
        hint=f"count them: tokmill vocab build x86 INPUT… --rules {rules} -o DIR; then --vocab DIR",
    )


def check(config: X86Config) -> None:
    """Refuse options that do not fit together."""
    check_name("no rules are", config.rules, plugins.RULES)
    check_name("no lifter is", config.lifter, plugins.LIFTERS)
    if config.unit != "walk":
        changed = [key for key in WALKS if getattr(config, key) != getattr(X86Config(), key)]
        if changed:
            raise UsageError(f"{changed[0]} only concerns walks", hint="--unit walk makes walks")
        return
    if not max(config.min_tokens, LEAST_TOKENS) <= config.walk_tokens <= config.max_tokens:
        raise UsageError(
            f"walk_tokens = {config.walk_tokens}",
            hint=f"{max(config.min_tokens, LEAST_TOKENS)} (min_tokens) to "
            f"{config.max_tokens} (max_tokens)",
        )
