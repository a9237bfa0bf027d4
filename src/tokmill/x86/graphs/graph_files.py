"""Graphs as Parquet files, with one row for each block, or as JSON Lines.

Columns: `program`, `function` (its address), `name` (raw symbol name, or `sub_401000`),
`demangled`, `address`, `code` (bytes), `lengths` (bytes of each instruction), `successors`
(addresses, 0 for none), `kinds` (fall, jump, branch, call, indirect, return), `strings`,
`constants`, `references` (addresses) and `slots` (places on the stack) that instructions of the
block take and, all in the first row, what is of the whole program (`WHOLE`). Facts about the whole
program, also its imports, are in the metadata of the file, and in the first line of JSON Lines,
where code is hexadecimal.
"""

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.bounds import bounded_reader
from tokmill.base.errors import TokmillError
from tokmill.base.files import write_file
from tokmill.base.headers import arrow_errors, loads_json, refused
from tokmill.store.schema import Array
from tokmill.x86.graph import PLACES, TEXT, Edge, Graph
from tokmill.x86.image.image import owners
from tokmill.x86.image.program import demangle

KEY = b"tokmill.graph"
SUM = b"tokmill.graph.crc32"
"""Key of the checksum of the facts, because Parquet has none of its metadata."""
VERSION = 5
KINDS = [edge.name.lower() for edge in Edge]
COLUMNS = (
    "program", "function", "name", "demangled", "address", "code", "lengths", "successors", "kinds",
    "strings", "constants", "references", "reference_places", "slots", "slot_places", "slot_sizes",
)  # fmt: skip
WHOLE = {
    "pointers": ("pointer_address", np.uint64), "pointed": ("pointer_target", np.uint64),
    "pointed_strings": ("pointer_text", str), "tables": ("table_address", np.uint64),
    "table_sizes": ("table_size", np.int64), "table_ends": ("table_entries", np.int64),
    "table_targets": ("table_target", np.uint64), "import_slots": ("import_slot", np.uint64),
    "import_slot_names": ("import_slot_name", str), "symbols": ("symbol_address", np.uint64),
    "symbol_sizes": ("symbol_size", np.uint64), "symbol_names": ("symbol_name", str),
    "exports": ("exports", str), "data_addresses": ("data_address", np.uint64),
    "data_names": ("data_name", str), "data_constant": ("data_constant", bool),
    "data": ("data", bytes),
}  # fmt: skip
"""Column of a list in the first row → the column of the graph, and its type."""
SUFFIX, LINES = ".parquet", ".jsonl"
"""Ends of the names of graph files; files as JSON Lines are not read back."""
JSON_ROWS = 4096


class About(msgspec.Struct, frozen=True):
    """The facts about a program in its graph file."""

    program: str
    bits: int
    functions: int
    blocks: int
    instructions: int
    edges: int
    digest: str = ""
    """sha256 of the program file; "" if the graph is not from one."""
    lifter: str = ""
    """Lifter that made the graph, with versions."""
    unresolved: dict[str, list[int]] = {}
    """Reason → addresses at which control could not be followed."""
    version: int = VERSION
    compiler: str = ""
    level: str = ""
    cut_short: tuple[str, ...] = ()
    """As of `Graph`."""
    facts: bool = False
    """Whether imports, strings and constants were looked for."""
    imports: list[tuple[int, str]] = []
    """Address and name of each import, by address."""

    def is_current(self, program: str, digest: str, lifter: str) -> bool:
        """Say whether the same file would be written now for a program with this digest."""
        known = (self.program, self.version, self.digest, self.lifter)
        return known == (program, VERSION, digest, lifter)


def about(graph: Graph, digest: str = "", lifter: str = "") -> About:
    unresolved: dict[str, list[int]] = {}
    for address, reason in graph.unresolved:
        unresolved.setdefault(reason, []).append(address)
    return About(
        graph.program,
        graph.bits,
        len(graph.function_address),
        len(graph.block_address),
        len(graph.lengths),
        len(graph.edge_target),
        digest,
        lifter,
        unresolved,
        compiler=graph.compiler,
        level=graph.level,
        cut_short=graph.cut_short,
        facts=graph.facts,
        imports=list(zip(graph.import_address.tolist(), graph.import_name, strict=True)),
    )


def write_graph(graph: Graph, path: Path, digest: str = "", lifter: str = "") -> About:
    """Write a graph atomically, as JSON Lines if the path ends so, else as Parquet."""
    facts = about(graph, digest, lifter)
    write_file(path, (_json_lines if path.suffix == LINES else _parquet)(graph, facts))
    return facts


@bounded_reader
def read_graph(path: Path | str) -> Graph:
    """Return the graph in a Parquet file that `write_graph` made."""
    graph = _read_graph(Path(path))
    # What Arrow keeps of a large file for itself is several times as large as the graph.
    plugins.require("pyarrow").default_memory_pool().release_unused()
    return graph


def _read_graph(path: Path) -> Graph:
    arrow = plugins.require("pyarrow")
    with _arrow_errors(path):
        file = plugins.require("pyarrow.parquet").ParquetFile(path, page_checksum_verification=True)
        facts = _readable(_facts(file, path), path)
        names_read = [*COLUMNS, *WHOLE]
        table = file.read(columns=names_read).combine_chunks()
        columns = {name: table[name].combine_chunks() for name in names_read}
        name = columns["name"].cast(arrow.large_string()).dictionary_encode()
        function, number = columns["function"].to_numpy(), name.indices.to_numpy()
        begins = np.ones(len(function), bool)
        begins[1:] = (function[1:] != function[:-1]) | (number[1:] != number[:-1])
        first = np.flatnonzero(begins)
        names = name.dictionary.take(arrow.array(number[first])).to_pylist()
        address = function[first].astype(np.uint64)
        code, block_bytes = _binary(columns["code"])
        kinds = columns["kinds"].flatten().dictionary_encode()
        kind_of = [KINDS.index(kind) for kind in kinds.dictionary.to_pylist()]
        lengths, successors = columns["lengths"], columns["successors"]
        graph = Graph(
            program=facts.program,
            bits=facts.bits,
            function_address=address,
            function_name=[
                "" if name == f"sub_{at:x}" else name
                for name, at in zip(names, address.tolist(), strict=True)
            ],
            function_blocks=np.append(first, len(function)).astype(np.int64),
            block_address=columns["address"].to_numpy().astype(np.uint64),
            block_bytes=block_bytes,
            code=code,
            block_instructions=_list_offsets(lengths),
            lengths=lengths.flatten().to_numpy().astype(np.uint8),
            block_edges=_list_offsets(successors),
            edge_target=successors.flatten().to_numpy().astype(np.uint64),
            edge_kind=np.asarray(kind_of, np.uint8)[kinds.indices.to_numpy()],
            unresolved=sorted((at, why) for why, all_ in facts.unresolved.items() for at in all_),
            compiler=facts.compiler,
            level=facts.level,
            cut_short=facts.cut_short,
        )
        _read_facts(graph, facts, columns)
        _check(graph)
        return graph


def _read_facts(graph: Graph, facts: About, columns: dict[str, Any]) -> None:
    arrow = plugins.require("pyarrow")
    strings, constants = columns["strings"], columns["constants"]
    text = strings.flatten().cast(arrow.large_string()).dictionary_encode()
    graph.facts = facts.facts
    graph.import_address = np.asarray([address for address, _ in facts.imports], np.uint64)
    graph.import_name = [name for _, name in facts.imports]
    graph.block_strings, graph.block_constants = _list_offsets(strings), _list_offsets(constants)
    graph.string = text.indices.to_numpy().astype(np.uint32)
    graph.strings = text.dictionary.to_pylist()
    graph.constant = constants.flatten().to_numpy().astype(np.int64)
    graph.reference = columns["references"].flatten().to_numpy().astype(np.uint64)
    graph.slot, graph.slot_size = (
        columns[name].flatten().to_numpy().astype(np.int64) for name in ("slots", "slot_sizes")
    )
    graph.reference_place = _rows(graph, columns["reference_places"], PLACES)
    graph.slot_place = _rows(graph, columns["slot_places"], 1)
    for name, (field, kind) in WHOLE.items():
        values = columns[name].flatten()
        if kind is str:
            setattr(graph, field, values.to_pylist())
        elif kind is bytes:
            graph.data = [np.frombuffer(one.as_buffer(), np.uint8) for one in values]
        else:
            setattr(graph, field, values.to_numpy(zero_copy_only=False).astype(kind))
    if not len(graph.table_entries):
        graph.table_entries = np.zeros(1, np.int64)


def _rows(graph: Graph, column: Any, each: int) -> Array:
    """Return places that count from the first instruction of their block as those of the graph."""
    first = np.repeat(graph.block_instructions[:-1], np.diff(_list_offsets(column)))
    return column.flatten().to_numpy().astype(np.int64) + each * first


def _within(graph: Graph, places: Array, each: int) -> tuple[Array, Array]:
    """Return the ends of each block's places, (B + 1,) i8, and them as `_rows` reads them."""
    rows = places // each
    ends = np.searchsorted(rows, graph.block_instructions).astype(np.int64)
    block = np.searchsorted(graph.block_instructions, rows, side="right") - 1
    return ends, places - each * graph.block_instructions[block]


def _check(graph: Graph) -> None:
    """Raise `ValueError` if the columns of a graph do not fit together, or cannot be a program."""
    if graph.bits not in (32, 64):
        raise ValueError(f"a program of {graph.bits} bits")
    if "\0" in graph.program:
        raise ValueError("the name of its program holds a zero byte")
    blocks = len(graph.block_address)
    ends = np.append(0, np.cumsum(graph.lengths, dtype=np.int64))
    good = (
        all(
            len(offsets) == blocks + 1 and (np.diff(offsets) >= 0).all()
            for offsets in (
                graph.block_bytes,
                graph.block_instructions,
                graph.block_edges,
                graph.block_strings,
                graph.block_constants,
            )
        )
        and graph.block_instructions[-1] == len(graph.lengths)
        and graph.block_edges[-1] == len(graph.edge_target) == len(graph.edge_kind)
        and graph.block_bytes[-1] == len(graph.code)
        and (ends[graph.block_instructions] == graph.block_bytes).all()
        and graph.block_strings[-1] == len(graph.string)
        and graph.block_constants[-1] == len(graph.constant)
        and (graph.import_address[1:] > graph.import_address[:-1]).all()
        and _fits(graph)
        and (graph.pointer_address[1:] > graph.pointer_address[:-1]).all()
        and len(graph.pointer_address) == len(graph.pointer_target) == len(graph.pointer_text)
        and all(isinstance(text, str) for text in graph.pointer_text)
    )
    if not good:
        raise ValueError("its columns do not fit together")
    last = np.uint64(2**64 - 1) - np.diff(graph.block_bytes).astype(np.uint64)
    if (graph.block_address > last).any():
        raise ValueError("a block ends after the last address")
    graph.check_entries()


def _fits(graph: Graph) -> bool:
    """Return whether the columns of operands, jump tables, symbols and data fit together."""
    same = (
        (graph.reference, graph.reference_place),
        (graph.slot, graph.slot_place, graph.slot_size),
        (graph.table_address, graph.table_size, graph.table_entries[1:]),
        (graph.import_slot, graph.import_slot_name),
        (graph.symbol_address, graph.symbol_size, graph.symbol_name),
        (graph.data, graph.data_address, graph.data_name, graph.data_constant),
    )
    rows = graph.reference_place // PLACES, graph.slot_place
    texts = [*graph.import_slot_name, *graph.symbol_name, *graph.exports, *graph.data_name]
    return (
        all(len({len(column) for column in columns}) == 1 for columns in same)
        and all((np.diff(one) >= 0).all() for one in (*rows, graph.table_entries))
        and all(not len(one) or 0 <= one[0] <= one[-1] < len(graph.lengths) for one in rows)
        and graph.table_entries[0] == 0
        and graph.table_entries[-1] == len(graph.table_target)
        and ((graph.reference_place & TEXT) > 0).sum() == len(graph.string)
        and all(isinstance(one, str) for one in texts)
    )


def read_facts(path: Path) -> About | None:
    """Return the facts of a graph in a Parquet file; None where the file holds something else."""
    with _arrow_errors(path):
        file = plugins.require("pyarrow.parquet").ParquetFile(path)
        there = KEY in (file.schema_arrow.metadata or {})
        return _readable(_facts(file, path), path) if there else None


def read_about(path: Path) -> About | None:
    """Return the facts of a graph file of any version; None if it is not one, or is damaged."""
    try:
        if not path.exists():
            return None
        with _arrow_errors(path):
            return _facts(plugins.require("pyarrow.parquet").ParquetFile(path), path)
    except (TokmillError, OSError, ValueError):
        return None


def _table(graph: Graph) -> Any:
    arrow = plugins.require("pyarrow")
    blocks = len(graph.block_address)
    number = owners(graph.function_blocks)
    names = graph.names(range(len(graph.function_name)))
    code = [None, arrow.py_buffer(graph.block_bytes), arrow.py_buffer(graph.code)]
    kinds = arrow.DictionaryArray.from_arrays(
        arrow.array(graph.edge_kind.view(np.int8)), arrow.array(KINDS, arrow.string())
    )
    return arrow.table(
        {
            "program": arrow.DictionaryArray.from_arrays(
                arrow.array(np.zeros(blocks, np.int32)), arrow.array([graph.program])
            ),
            "function": arrow.array(graph.function_address[number]),
            "name": _repeated(names, number),
            "demangled": _repeated(demangle(names), number),
            "address": arrow.array(graph.block_address),
            "code": arrow.Array.from_buffers(arrow.large_binary(), blocks, code),
            "lengths": arrow.LargeListArray.from_arrays(
                graph.block_instructions, arrow.array(graph.lengths)
            ),
            "successors": arrow.LargeListArray.from_arrays(
                graph.block_edges, arrow.array(graph.edge_target)
            ),
            "kinds": arrow.LargeListArray.from_arrays(graph.block_edges, kinds),
            "strings": arrow.LargeListArray.from_arrays(
                graph.block_strings, _repeated(graph.strings, graph.string)
            ),
            "constants": arrow.LargeListArray.from_arrays(
                graph.block_constants, arrow.array(graph.constant)
            ),
            **_operands(graph),
            **_whole(graph),
        },
    )


def _parquet(graph: Graph, facts: About) -> Iterator[bytes]:
    arrow, raw = plugins.require("pyarrow"), msgspec.json.encode(facts)
    table = _table(graph).replace_schema_metadata({KEY: raw, SUM: b"%08x" % zlib.crc32(raw)})
    sink = arrow.BufferOutputStream()
    plugins.require("pyarrow.parquet").write_table(
        table,
        sink,
        compression="zstd",
        write_page_checksum=True,
        # pyarrow cannot read lists of strings of several groups at a time.
        row_group_size=max(len(table), 1),
    )
    yield memoryview(sink.getvalue()).tobytes()


def _operands(graph: Graph) -> dict[str, Any]:
    arrow = plugins.require("pyarrow")
    result = {}
    for places, each, names in (
        (graph.reference_place, PLACES, {"references": graph.reference}),
        (graph.slot_place, 1, {"slots": graph.slot, "slot_sizes": graph.slot_size}),
    ):
        ends, within = _within(graph, places, each)
        for name, values in {**names, f"{next(iter(names))[:-1]}_places": within}.items():
            result[name] = arrow.LargeListArray.from_arrays(ends, arrow.array(values))
    return result


def _whole(graph: Graph) -> dict[str, Any]:
    """Return the columns of the whole program: lists that are empty in all rows but the first."""
    arrow = plugins.require("pyarrow")
    result = {}
    for name, (field, kind) in WHOLE.items():
        values = getattr(graph, field)
        bounds = np.full(len(graph.block_address) + 1, len(values), np.int64)
        bounds[0] = 0
        if kind is str:
            column = _repeated(values, np.arange(len(values)))
        elif kind is bytes:
            column = arrow.array([memoryview(one) for one in values], arrow.large_binary())
        else:
            column = arrow.array(values)
        result[name] = arrow.LargeListArray.from_arrays(bounds, column)
    return result


def _repeated(values: list[str], number: Array) -> Any:
    """Return values[number[0]], values[number[1]], … as a dictionary array with each string once.

    If the dictionary had a string twice, pyarrow would write all strings, and not always the same
    bytes.
    """
    arrow = plugins.require("pyarrow")
    places: dict[str, int] = {}
    index = np.asarray([places.setdefault(value, len(places)) for value in values], np.int32)
    return arrow.DictionaryArray.from_arrays(
        arrow.array(index[number]), arrow.array(list(places), arrow.string())
    )


def _json_lines(graph: Graph, facts: About) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode
    yield encode({"graph": facts}) + b"\n"
    table = _table(graph).select([*COLUMNS, *WHOLE])
    for begin in range(0, len(table), JSON_ROWS):
        rows = table.slice(begin, JSON_ROWS).to_pylist()
        for row in rows:
            row["code"], row["data"] = row["code"].hex(), [one.hex() for one in row["data"]]
        yield b"".join(encode(row) + b"\n" for row in rows)


def _facts(file: Any, path: Path) -> About:
    metadata = file.schema_arrow.metadata or {}
    if KEY not in metadata:
        raise TokmillError(
            "the Parquet file holds no graph", where=str(path), hint="tokmill cfg makes such files"
        )
    raw = metadata[KEY]
    with refused("the facts of the graph are damaged", path, hint="make it again"):
        if metadata.get(SUM) != b"%08x" % zlib.crc32(raw):
            raise ValueError("their checksum is another")
        facts: About = loads_json(raw, About)
    return facts


def _readable(facts: About, path: Path) -> About:
    """Return the facts of a graph; raises `TokmillError` if it is of another version."""
    if facts.version != VERSION:
        raise TokmillError(
            f"a graph of version {facts.version}, and this program reads {VERSION}",
            where=str(path),
            hint="make it again: tokmill cfg PROGRAM",
        )
    return facts


MALFORMED: tuple[type[Exception], ...] = (
    KeyError, ValueError, IndexError, TypeError, OverflowError, AttributeError,
)  # fmt: skip


@contextlib.contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    arrow = plugins.require("pyarrow")
    try:
        yield
    except FileNotFoundError:
        raise TokmillError(
            "there is no such file", where=str(path), hint="check the path"
        ) from None
    except MALFORMED + arrow_errors(arrow) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TokmillError(
            f"the graph cannot be read: {what}", where=str(path), hint="make it again"
        ) from None


def _binary(column: Any) -> tuple[Array, Array]:
    bounds = np.frombuffer(column.buffers()[1], np.int64)[: len(column) + 1]
    data = np.frombuffer(column.buffers()[2] or b"", np.uint8)
    return data[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0]


def _list_offsets(column: Any) -> Array:
    bounds = column.offsets.to_numpy()[: len(column) + 1].astype(np.int64)
    return bounds - bounds[0]
