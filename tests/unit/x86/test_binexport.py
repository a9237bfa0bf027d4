"""`.BinExport` files: read back by others, who must see what the graph says."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from binexport import ProgramBinExport
from binexport.types import FunctionType
from iced_x86 import Decoder, Mnemonic

from tokmill.base.errors import TokmillError
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.graphs.binexport import FlowType, message
from tokmill.x86.graphs.calls import calls_of
from tokmill.x86.graphs.graph_files import read_about, write_graph
from tokmill.x86.graphs.lifting import lift_files
from tokmill.x86.lift.cfg import lift
from x86_graphs import Block, graph_of
from x86_programs import C_SOURCE, CPP_SOURCE, assembled, compiles, flat, run, stripped

FLOWS = {Edge.FALL, Edge.JUMP, Edge.BRANCH, Edge.INDIRECT}
MNEMONICS = {value: name.lower() for name, value in vars(Mnemonic).items() if name.isupper()}
QBINDIFF = """
import sys, warnings
warnings.simplefilter("ignore")
from qbindiff import Program, QBinDiff
from qbindiff.features import DEFAULT_FEATURES
from qbindiff.loader.types import LoaderType
diff = QBinDiff(*(Program(path, loader=LoaderType.binexport) for path in sys.argv[1:]))
for feature in DEFAULT_FEATURES:
    diff.register_feature_extractor(feature, 1.0)
diff.process()
for match in diff.compute_matching():
    print(f"{match.primary.name}={match.secondary.name}={match.similarity:.3f}")
"""


def written(graph: Graph, folder: Path) -> ProgramBinExport:
    path = folder / "a.BinExport"
    write_graph(graph, path, "ab" * 32, "lifter")
    return ProgramBinExport(path)


def compare(graph: Graph, read: ProgramBinExport) -> None:
    """Compare functions, blocks, instructions and edges within functions."""
    functions = {at: one for at, one in read.items() if not one.is_import()}
    assert sorted(functions) == graph.function_address.tolist()
    code = graph.code.tobytes()
    for number, address in enumerate(graph.function_address.tolist()):
        one = functions[address]
        first, last = graph.function_blocks[number : number + 2].tolist()
        blocks = one.blocks
        assert list(blocks) == graph.block_address[first:last].tolist()
        edges = set()
        for block in range(first, last):
            begin, end = graph.block_bytes[block : block + 2].tolist()
            at = int(graph.block_address[block])
            assert blocks[at].bytes == code[begin:end]
            wanted = list(Decoder(graph.bits, code[begin:end], ip=at))
            assert list(blocks[at].instructions) == [instruction.ip for instruction in wanted]
            assert [found.mnemonic for found in blocks[at].instructions.values()] == [
                MNEMONICS[instruction.mnemonic] for instruction in wanted
            ]
            ways = slice(*graph.block_edges[block : block + 2].tolist())
            columns = graph.edge_target[ways].tolist(), graph.edge_kind[ways].tolist()
            for target, kind in zip(*columns, strict=True):
                if kind in FLOWS and target in blocks:
                    edges.add((at, target))
        assert set(one.graph.edges) == edges
        name = graph.function_name[number]
        assert not name or one.name == name or name.startswith("_Z")


@pytest.mark.parametrize("flags", [("-O0",), ("-O2",), ("-O2", "-m32"), ("-O1", "-static")])
def test_others_read_what_the_graph_says(
    built: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    graph = lift(compiles(built, f"be{''.join(flags)}", C_SOURCE, *flags), facts=True)
    read = written(graph, tmp_path)
    assert read.name == graph.program
    assert read.architecture == ("x86-32" if graph.bits == 32 else "x86-64")
    assert read.proto.meta_information.executable_id == "ab" * 32
    compare(graph, read)


def test_cxx_without_symbols_and_with(built: Path, tmp_path: Path) -> None:
    path = compiles(built, "be-cxx", CPP_SOURCE, "-O2", by="g++")
    for one in (path, stripped(path)):
        compare(lift(one, facts=True), written(lift(one, facts=True), tmp_path))
    names = {one.name for one in written(lift(path, facts=True), tmp_path).values()}
    assert any(name.startswith("Thing::") for name in names), "demangled"


def test_calls_and_imports(built: Path, tmp_path: Path) -> None:
    graph = lift(compiles(built, "be-O2", C_SOURCE, "-O2"), facts=True)
    read = written(graph, tmp_path)
    imports = {one.name: one for one in read.values() if one.type == FunctionType.IMPORTED}
    assert {"puts", "exit", "rand"} <= set(imports) <= set(graph.import_name)
    names = {one.name: one for one in read.values()}
    assert {one.name for one in names["die"].children} >= {"exit"}
    assert {one.name for one in names["checked"].children} == {"give_up"}
    # Of the whole program: the calls by address.
    calls = calls_of(graph)
    wanted = defaultdict(set)
    for caller, function, imported in zip(
        calls.caller, calls.function, calls.imported, strict=True
    ):
        columns = graph.function_address, graph.import_address
        to = columns[0][function] if function >= 0 else columns[1][imported]
        wanted[int(graph.function_address[caller])].add(int(to))
    found = {at: {child.addr for child in one.children} for at, one in read.items() if one.children}
    assert found == dict(wanted)
    # The instruction that calls says so, too.
    targets = [target for one in read.proto.instruction for target in one.call_target]
    assert sorted(set(targets)) == np.unique(graph.edge_target[
        (graph.edge_kind == Edge.CALL) & (graph.edge_target > 0)]).tolist()  # fmt: skip


def test_stubs_of_own_functions_are_these_functions(built: Path, tmp_path: Path) -> None:
    source = 'int f(int x) { return x * 7; }\nint g(int x) { return f(x) + f(x + 1) + puts(""); }'
    path = compiles(built, "be-own.so", source, "-O1", "-shared", "-fPIC")
    read = written(lift(stripped(path), facts=True), tmp_path)
    (caller,) = [one for one in read.values() if one.name == "g"]
    assert {(one.name, one.type) for one in caller.children} == {
        ("f", FunctionType.NORMAL), ("puts", FunctionType.IMPORTED)
    }  # fmt: skip


def test_libraries_of_pe_files(built: Path, tmp_path: Path) -> None:
    path = compiles(built, "be.exe", C_SOURCE, "-O1", by="x86_64-w64-mingw32-gcc")
    read = written(lift(path, facts=True), tmp_path)
    libraries = [one.name for one in read.proto.library]
    assert "KERNEL32.dll" in libraries
    vertices = {one.mangled_name: one for one in read.proto.call_graph.vertex if one.type == 2}
    assert libraries[vertices["VirtualQuery"].library_index] == "KERNEL32.dll"


def test_kinds_of_edges_and_strings(tmp_path: Path) -> None:
    jump, branch, ret = b"\xff\x24\xc5\x00\x00\x00\x00", b"\x74\x00", b"\xc3"
    to = [(Edge.BRANCH, 0x20), (Edge.FALL, 0x12)]
    table = [(Edge.INDIRECT, 0x10), (Edge.INDIRECT, 0x20), (Edge.INDIRECT, 0x10)]
    graph = graph_of({0x10: [
        Block(0x10, [branch], to), Block(0x12, [jump], table),
        Block(0x20, [b"\x90"], [(Edge.FALL, 0x21)]), Block(0x21, [ret], [(Edge.RETURN, 0)]),
    ]})  # fmt: skip
    graph.facts, graph.strings = True, ["a string"]
    graph.block_strings, graph.string = np.array([0, 0, 1, 1, 1]), np.array([0], np.uint32)
    write_graph(graph, tmp_path / "a.BinExport")
    (flow,) = (found := ProgramBinExport(tmp_path / "a.BinExport").proto).flow_graph
    edges = [(e.source_basic_block_index, e.target_basic_block_index, e.type) for e in flow.edge]
    assert edges == [
        (0, 1, FlowType.CONDITION_FALSE), (0, 2, FlowType.CONDITION_TRUE),
        (1, 0, FlowType.SWITCH), (1, 2, FlowType.SWITCH), (2, 3, FlowType.UNCONDITIONAL),
    ]  # fmt: skip
    assert list(found.string_table) == ["a string"]
    assert [one.instruction_index for one in found.string_reference] == [1]


def test_blocks_that_functions_share_are_there_once(built: Path, tmp_path: Path) -> None:
    source = r"""
    .globl _start, one, two
    .type one, @function
    .type two, @function
    _start: call one
            call two
            ret
    one:    mov eax, 1
            test edi, edi
            jz tail
            ret
    two:    mov eax, 2
            jmp tail
            nop
    tail:   add eax, 7
            ret
    """
    graph = lift(assembled(built, "be-shared", source), facts=True)
    read = written(graph, tmp_path)
    compare(graph, read)
    assert len(read.proto.basic_block) == len(graph.block_address) - 1


def test_the_same_graph_gives_the_same_bytes_and_says_who_made_it(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiles(built, "be-O2", C_SOURCE, "-O2")
    graph = lift(path, facts=True)
    for name in ("one", "two"):
        facts = write_graph(graph, tmp_path / f"{name}.BinExport", "digest", "lifter")
    first = (tmp_path / "one.BinExport").read_bytes()
    assert first == (tmp_path / "two.BinExport").read_bytes()
    assert read_about(tmp_path / "one.BinExport") == facts and facts.lifter == "lifter"
    # In parts of any size it is the same.
    monkeypatch.setattr("tokmill.x86.graphs.binexport.AT_ONCE", 7)
    write_graph(graph, tmp_path / "three.BinExport", "digest", "lifter")
    parts = message().FromString((tmp_path / "three.BinExport").read_bytes())
    assert parts == message().FromString(first), "messages joined are one message"


def test_many_programs_and_again(built: Path, tmp_path: Path) -> None:
    path = compiles(built, "be-O2", C_SOURCE, "-O2")
    out = tmp_path / "graphs"
    assert lift_files([str(path)], out, form="binexport").made == 1
    assert [one.name for one in out.iterdir()] == ["be-O2.BinExport"]
    assert lift_files([str(path)], out, form="binexport").kept == 1
    single = tmp_path / "single.BinExport"
    assert lift_files([str(path)], single).made == 1
    assert single.read_bytes() == (out / "be-O2.BinExport").read_bytes()
    # What others wrote is not replaced.
    (out / "be-O2.BinExport").write_bytes(message()().SerializeToString() + b"\x0a\x00")
    report = lift_files([str(path)], out, form="binexport")
    assert [one.refused for one in report.refusals] == [
        "there is a file with the name of its graph that is not a graph"
    ]


def test_graphs_without_code_and_of_bytes_that_are_none(tmp_path: Path) -> None:
    read = written(lift(flat(b"\x06"), facts=True), tmp_path)
    assert len(read) == 0
    odd = graph_of({0x10: [Block(0x10, [b"\x0f\x1f\x00"])]})
    odd.lengths, odd.block_instructions = np.array([1, 2], np.uint8), np.array([0, 2])
    with pytest.raises(TokmillError, match="bytes that are not instructions"):
        written(odd, tmp_path)


@pytest.mark.long
def test_qbindiff_matches_two_programs(built: Path, tmp_path: Path) -> None:
    for level in ("-O1", "-O2"):
        path = compiles(built, f"be{level}", C_SOURCE, level)
        lift_files([str(path)], tmp_path / f"{level}.BinExport")
    files = [str(tmp_path / f"{level}.BinExport") for level in ("-O1", "-O2")]
    lines = run(sys.executable, "-c", QBINDIFF, *files).splitlines()
    pairs = [line.rsplit("=", 1)[0].split("=") for line in lines if line.count("=") == 2]
    assert sum(a == b for a, b in pairs) > 20, lines
    assert ["main", "main"] in pairs and ["puts", "puts"] in pairs
