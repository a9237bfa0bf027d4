"""From two programs to a `Diff`: matches their functions, then the blocks of these."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import sha256_file
from tokmill.store.schema import Array
from tokmill.x86.diff.content.operand_references import Compared, Operands
from tokmill.x86.diff.content.other_references import compare
from tokmill.x86.diff.evidence import weigh
from tokmill.x86.diff.match_blocks import BlockMatches, Side, match_blocks
from tokmill.x86.diff.match_functions import Given, Matched, match_functions
from tokmill.x86.diff.output.diff_json import DiffFile, diff_file
from tokmill.x86.diff.result import Diff, Reason, unmatched
from tokmill.x86.diff.same import (
    Content,
    block_hashes,
    content_of,
    function_hashes,
    names_of,
    same_names,
    unique_in_both,
)
from tokmill.x86.features.function_features import Functions, functions_of, members_of
from tokmill.x86.features.tables import tables_of
from tokmill.x86.graph import Graph
from tokmill.x86.graphs.graph_files import SUFFIX, read_about
from tokmill.x86.graphs.lifting import PICKLES, find_inputs, graphs_in

LONG = 24
"""Functions with so many instructions are matched at once if no others have the same code."""
NOT_FOLLOWED = "places that could not be followed"
"""Instructions whose targets the lifter does not know (`Graph.unresolved`)."""
UNVERIFIED = "variables without a name that could not be told apart by all of their users"
MOST_OF_CHANGED, MOST_OF_CHANGED_BLOCK = 0.999, 0.99
"""Largest similarity of functions, and of blocks, that are not the same."""


def diff(old: Path | str, new: Path | str, *, names: bool = True) -> DiffFile:
    """Return what changed between two programs, as `tokmill diff -o` writes it.

    Args:
        old: a program (ELF or PE for x86), or a graph file of `tokmill cfg`.
        new: the same, of the new version.
        names: whether functions of the same symbol name are taken for the same.
    """
    graphs = graph_of(Path(old)), graph_of(Path(new))
    digests = digest_of(Path(old)), digest_of(Path(new))
    return diff_file(*graphs, diff_graphs(*graphs, names=names), digests)


def diff_graphs(a: Graph, b: Graph, *, names: bool = True) -> Diff:
    """Return the matches of functions and blocks of two programs.

    Args:
        b: the new program; one may have 32 and the other 64 bits.
        names: functions with the same symbol name are the same. Without it, nothing is used that
            `strip` removes.
    """
    features = functions_of(a), functions_of(b)
    contents = content_of(a, features[0]), content_of(b, features[1])
    alone = _alone(a, contents[0]), _alone(b, contents[1])
    code = unique_in_both(*alone)
    long = np.diff(a.block_instructions[a.function_blocks])[code[0]] >= LONG
    given = _given(a, b, (code[0][long], code[1][long]), names)
    tables = tables_of(a), tables_of(b)
    for graph, functions in zip((a, b), features, strict=True):
        functions.bags |= members_of(graph, functions.instructions)
    weighted = weigh(*features, tables)
    # Of large programs the bags are hundreds of megabytes, and nothing reads them from here on;
    # nor, after the functions, the matrices.
    features = replace(features[0], bags={}), replace(features[1], bags={})
    matched = match_functions(*features, weighted, alone, tables, given)
    del weighted
    unique = np.isin(matched.i, code[0]) & (alone[0][matched.i] == alone[1][matched.j])
    matched.reason[unique & (matched.reason != Reason.NAME)] = Reason.CODE
    return _with_blocks((a, b), features, contents, alone, matched, names)


def _alone(graph: Graph, content: Content) -> Array:
    """Return a hash of each function without the functions it leads to."""
    return function_hashes(content.block, content.within, graph.function_blocks)


def _given(a: Graph, b: Graph, code: tuple[Array, Array], names: bool) -> Given:
    """Return the pairs with the same name and, for functions without one, with the same code."""
    i, j = same_names(*(names_of(graph) for graph in (a, b))) if names else same_names({}, {})
    free = ~np.isin(code[0], i) & ~np.isin(code[1], j)
    why = np.repeat([Reason.NAME, Reason.CODE], [len(i), int(free.sum())]).astype(np.uint8)
    i, j = np.concatenate([i, code[0][free]]), np.concatenate([j, code[1][free]])
    order = np.argsort(i)
    return Given(i[order], j[order], why[order])


def _with_blocks(
    graphs: tuple[Graph, Graph],
    features: tuple[Functions, Functions],
    contents: tuple[Content, Content],
    alone: tuple[Array, Array],
    matched: Matched,
    names: bool,
) -> Diff:
    first, second = (len(graph.function_address) for graph in graphs)
    numbers = _shared_numbers(first, second, matched.i, matched.j)
    sides, shapes, operands = [], [], []
    for graph, functions, content, number in zip(graphs, features, contents, numbers, strict=True):
        hashes = block_hashes(content, number, len(graph.block_address))
        callees = content.edge_block, number[content.edge_function].astype(np.uint64)
        sides.append(Side(graph, functions, hashes, callees))
        shapes.append(function_hashes(content.shape, content.within, graph.function_blocks))
        operands.append(Operands(graph, functions, content.leaving))
    same_code = shapes[0][matched.i] == shapes[1][matched.j]
    blocks = match_blocks(sides[0], sides[1], matched.i, matched.j, same_code)
    same_shape = contents[0].shape[blocks.a] == contents[1].shape[blocks.b]
    compared = Compared(operands[0], operands[1], names)
    count = [len(one.block_address) for one in graphs]
    compared.number(numbers, _shared_numbers(count[0], count[1], blocks.a, blocks.b))
    changes, outside = compare(compared, alone, blocks, np.flatnonzero(same_shape))
    other = np.zeros(len(blocks.a), bool)
    other[changes.block] = True
    below = np.minimum(blocks.similarity, MOST_OF_CHANGED_BLOCK)
    blocks.similarity = np.where(same_shape & ~other, np.float32(1), below)
    differs = np.zeros(len(matched.i), bool)
    differs[blocks.match[other]] = True
    diff = _columns(graphs, matched, same_code & ~differs, blocks)
    diff.references_only, diff.references = same_code & differs, changes
    diff.other = outside
    if compared.unverified:
        diff.left_out[UNVERIFIED] = compared.unverified
    return diff


def _shared_numbers(first: int, second: int, i: Array, j: Array) -> tuple[Array, Array]:
    """Return a number (i8) for each thing of two sides; matched ones have the same."""
    numbers = np.arange(first), first + np.arange(second)
    numbers[1][j] = i
    return numbers


def _columns(
    graphs: tuple[Graph, Graph], matched: Matched, same: Array, blocks: BlockMatches
) -> Diff:
    counts, sums = [], []
    sizes = [np.diff(graph.block_instructions) for graph in graphs]
    for graph, functions in zip(graphs, (matched.i, matched.j), strict=True):
        counts.append(np.diff(graph.block_instructions[graph.function_blocks])[functions])
    for size, chosen in zip(sizes, (blocks.a, blocks.b), strict=True):
        weight = size[chosen] * blocks.similarity.astype(np.float64)
        sums.append(np.bincount(blocks.match, weight, len(matched.i)))
    share = (sums[0] + sums[1]) / np.maximum(counts[0] + counts[1], 1)
    similarity = np.where(same, 1, np.minimum(share, MOST_OF_CHANGED)).astype(np.float32)
    left_out = {
        "programs without imports, strings and constants": sum(not one.facts for one in graphs),
        "programs that were not looked through to the end": sum(
            bool(one.cut_short) for one in graphs
        ),
        NOT_FOLLOWED: sum(len(one.unresolved) for one in graphs),
    }
    return Diff(
        function_a=matched.i,
        function_b=matched.j,
        similarity=similarity,
        confidence=matched.confidence,
        reason=matched.reason,
        match_blocks=np.searchsorted(blocks.match, np.arange(len(matched.i) + 1)),
        block_a=blocks.a,
        block_b=blocks.b,
        block_similarity=blocks.similarity,
        block_reason=blocks.reason,
        deleted=unmatched(len(graphs[0].function_address), matched.i),
        inserted=unmatched(len(graphs[1].function_address), matched.j),
        deleted_blocks=_left(graphs[0], matched.i, blocks.a),
        inserted_blocks=_left(graphs[1], matched.j, blocks.b),
        left_out={what: count for what, count in left_out.items() if count},
    )


def _left(graph: Graph, functions: Array, matched: Array) -> Array:
    inside = np.zeros(len(graph.function_address), bool)
    inside[functions] = True
    inside = np.repeat(inside, np.diff(graph.function_blocks))
    inside[matched] = False
    return np.flatnonzero(inside).astype(np.int64)


def graph_of(path: Path) -> Graph:
    """Return the graph of a program or of a graph file; raises `TokmillError` for several."""
    if path.is_dir():
        raise UsageError(
            "this is a folder", where=str(path), hint="name two programs, or two graph files"
        )
    graphs = graphs_in(find_inputs([str(path)]).files[0], facts=True)
    graph = next(graphs, None)
    if graph is None or next(graphs, None) is not None:
        raise TokmillError(
            "it holds no program" if graph is None else "it holds several programs",
            where=str(path),
            hint="`tokmill cfg` writes a graph file of each, which can be compared",
        )
    return graph


def digest_of(path: Path) -> str:
    """Return the sha256 of a program, also of the one that a graph file is of."""
    facts = read_about(path) if path.suffix == SUFFIX else None
    # A graph that was read from a pickle has the digest of all its programs.
    return (facts and facts.lifter != PICKLES and facts.digest) or sha256_file(path)
