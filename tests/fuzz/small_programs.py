"""Programs, graphs and vocabularies of x86 code, for the fuzz harness."""

import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from reader import Make, Read

from making import quick_build


def make_elf(folder: Path) -> Iterable[Path]:
    from x86_programs import compiles

    source = "int f(int x){return x*3+1;}int g(int x){return x?f(x):2;}void _start(){g(1);}"
    source += 'const char *hello(void){return "hello";}'
    flags = ("-Os", "-nostdlib", "-static", "-fno-asynchronous-unwind-tables")
    path = compiles(folder, "program", source, *flags)
    (folder / "program-source.c").unlink()
    return [path]


def small_graph() -> Any:
    from tokmill.x86.graph import PLACES, TEXT, Edge
    from x86_graphs import Block, graph_of

    nop, ret = b"\x90", b"\xc3"
    graph = graph_of({
        0x1000: [Block(0x1000, [nop, b"\x31\xc0"], [(Edge(1), 0x1003)]), Block(0x1003, [ret])],
        0x2000: [Block(0x2000, [b"\x55", ret])],
    }, ["main", ""])  # fmt: skip
    graph.facts = True
    graph.import_address, graph.import_name = np.asarray([0x3000], np.uint64), ["puts"]
    graph.block_strings, graph.string = np.asarray([0, 1, 1, 3]), np.asarray([0, 1, 0], np.uint32)
    graph.strings = ["hello", "wörld"]
    graph.block_constants, graph.constant = np.asarray([0, 0, 2, 2]), np.asarray([7, -(1 << 63)])
    graph.reference = np.asarray([0x4000, 0x5000, 0x5008, 0x5000], np.uint64)
    graph.reference_place = np.asarray([TEXT, PLACES, 3 * PLACES + TEXT, 4 * PLACES + TEXT])
    graph.slot, graph.slot_place, graph.slot_size = np.asarray([[-8, 8], [1, 3], [0, 4]])
    graph.table_address, graph.table_size = np.asarray([0x6000], np.uint64), np.asarray([8])
    graph.table_entries, graph.table_target = np.asarray([0, 1]), np.asarray([0x1003], np.uint64)
    graph.import_slot, graph.import_slot_name = np.asarray([0x7000], np.uint64), ["puts"]
    graph.symbol_address, graph.symbol_size = np.asarray([[0x4000], [8]], np.uint64)
    graph.symbol_name, graph.exports = ["words"], ["main"]
    graph.data, graph.data_name = [np.arange(9, dtype=np.uint8)], [".data"]
    graph.data_address, graph.data_constant = np.asarray([0x4000], np.uint64), np.asarray([True])
    graph.pointer_address = np.asarray([0x4000, 0x4008, 0x4010], np.uint64)
    graph.pointer_target = np.asarray([0x5000, 0x1000, 0x2000], np.uint64)
    graph.pointer_text = ["wörld", "", ""]
    return graph


def make_graph(suffix: str) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        from tokmill.x86.graphs.graph_files import write_graph

        write_graph(small_graph(), folder / f"a{suffix}")
        return [folder / f"a{suffix}"]

    return make


def make_pair(folder: Path) -> Iterable[Path]:
    """Write two graphs that name what they import and show."""
    from pair_graphs import write_small

    return [write_small(folder, 1), write_small(folder, 0)]


def read_graph_file(name: str) -> Read:
    def read(folder: Path) -> Any:
        from tokmill.x86.graphs.graph_files import read_graph

        graph = read_graph(folder / name)
        return [np.asarray(getattr(graph, field)).tolist() for field in (
            "function_address", "function_blocks", "block_address", "code", "lengths",
            "block_edges", "edge_target", "edge_kind", "facts", "import_address", "import_name",
            "block_strings", "string", "strings", "block_constants", "constant",
            "reference", "reference_place", "pointer_address", "pointer_target", "pointer_text",
            "slot", "slot_place", "slot_size", "table_address", "table_size", "table_entries",
            "table_target", "import_slot", "import_slot_name", "symbol_address", "symbol_size",
            "symbol_name", "exports", "data_address", "data_name", "data_constant",
            )], [one.tolist() for one in graph.data], graph.function_name  # fmt: skip

    return read


def read_facts(folder: Path) -> Any:
    from tokmill.x86.lift.cfg import lift

    graph = lift(folder / "program", facts=True)
    return graph.import_name, graph.strings, graph.constant.tolist(), graph.code.tobytes()


def read_compared(folder: Path) -> Any:
    """A graph that is damaged beside the good one."""
    from tokmill.x86.diff.output.diff_json import diff_file
    from tokmill.x86.diff.program_diff import diff_graphs
    from tokmill.x86.graphs.graph_files import read_graph

    damaged, good = read_graph(folder / "a.cfg.parquet"), small_graph()
    return repr(diff_file(damaged, good, diff_graphs(damaged, good)))


def make_index(folder: Path) -> Iterable[Path]:
    from test_saved_index import small

    functions = {f"f{i}": [small(0x1000 * (i + 1))] for i in range(3)}
    (folder / "saved_index.pkl").write_bytes(pickle.dumps(functions, 4))
    return [folder / "saved_index.pkl"]


def read_index(folder: Path) -> Any:
    from tokmill.x86.graphs.saved_index import graphs_of

    return [
        (graph.program, graph.block_address.tolist(), graph.code.tobytes())
        for graph in graphs_of(folder / "saved_index.pkl", ["O2"])
    ]


def x86_store(path: Path) -> Path:
    from tokmill.x86.graphs.graph_files import write_graph

    path.parent.mkdir(exist_ok=True)
    write_graph(small_graph(), path.parent / "g.cfg.parquet")
    quick_build("x86", path.parent / "g.cfg.parquet", path)
    return path


def make_vocabularies(folder: Path) -> Iterable[Path]:
    store = x86_store(folder.parent / "x" / "s")
    shutil.copytree(store / "vocab", folder / "vocab")
    return sorted((folder / "vocab").iterdir())


def read_vocabularies(folder: Path) -> Any:
    from tokmill.x86.tokens.vocabularies.vocabulary import read_vocabularies as read

    return {name: tokens.tokens for name, tokens in read(folder / "vocab").items()}


def make_count_pickle(folder: Path) -> Iterable[Path]:
    for name in ("asm", "mne"):
        counts = {"[PAD]": 9, "[UNK]": 8, "[SEP]": 7, "[CLS]": 6, "[MASK]": 5, "MOV": 4, "RAX": 3}
        (folder / f"{name}_vocab.pkl").write_bytes(pickle.dumps(counts, 4))
    return sorted(folder.iterdir())


def read_lists(folder: Path) -> Any:
    from tokmill.x86.tokens.vocabularies.vocabulary import read_list

    return [read_list(path).tokens.tokens for path in sorted(folder.iterdir())]
