"""Diffing of programs: tokmill beside qbindiff and simple answers, functions against the truth.

Both programs are stripped; the truth is in their debug information (see diffing-protocol.md).
qbindiff reads `.BinExport` files of the same graphs, in a process of its own with limits. Its
answers are kept below CACHE/diffing/answers by the digests of both programs, so a run that was
stopped goes on. qbindiff is killed with it.

    python benchmarks/diffing.py CACHE PEERS-PYTHON [--limit SECONDS] [--kind KIND] [PROGRAM …]
"""

import argparse
import functools
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

import diffing_programs as programs
from binexport_file import binexport
from debug_info import read_debug_info
from diffing_table import NO_ADDRESSES, THEIRS, Result, details, means, table
from function_truth import function_truth, judge_functions
from tokmill.base.children import child
from tokmill.store.schema import Array
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.lift.cfg import lift

PEER = Path(__file__).parent / "peers" / "qbindiff_peer.py"
SECONDS, MEMORY = 900, 6 << 30
"""What qbindiff may take for a pair: CPU seconds, bytes."""
WAIT = 20
"""So many times as long it may take by the clock, as on a busy machine."""
SEED = 1
NAMES = (
    "random", "exact hash", "opcode histogram", "structure", "qbindiff", NO_ADDRESSES, "tokmill"
)  # fmt: skip
Pairs = tuple[Array, Array]
"""Functions of A and of B that were matched: i8 each, as long."""


class Answer(msgspec.Struct):
    """What qbindiff says of one pair; kept as JSON."""

    pairs: list[tuple[int, int]] = []
    cpu_seconds: float = 0.0
    peak: int = 0
    failed: str = ""
    limit: int = SECONDS
    """CPU seconds that it had."""


graph_of = functools.cache(functools.partial(lift, facts=True))
info_of = functools.cache(read_debug_info)


@dataclass
class Bench:
    """Asks all contestants; the answers of qbindiff are kept."""

    folder: Path
    peers_python: str
    limit: int
    peers: dict[str, tuple[str, ...]]
    """Name → features that qbindiff does without."""

    def judge(self, pair: programs.Pair) -> Result:
        """Return what each contestant makes of a pair."""
        a, b = graph_of(pair.a.bare), graph_of(pair.b.bare)
        truth = function_truth(a, b, info_of(pair.a.debug), info_of(pair.b.debug))
        sizes = pair.a.bare.stat().st_size, pair.b.bare.stat().st_size
        result = Result(pair, truth.matches, sizes=sizes)
        answers: dict[str, Callable[[Graph, Graph], Pairs]] = {
            "random": at_random, "exact hash": exact, "opcode histogram": histogram,
            "structure": structure,
        }  # fmt: skip
        for name, answer in answers.items():
            started = time.process_time()
            result.scores[name], _ = judge_functions(truth, *answer(a, b))
            result.seconds[name] = time.process_time() - started
        for name, without in self.peers.items():
            if result.failed:
                result.failed[name] = "not tried, as it has no answer by its defaults"
                continue
            found = self.qbindiff(pair, without)
            if found.failed:
                result.failed[name] = found.failed
                continue
            result.scores[name], _ = judge_functions(truth, *rows(found.pairs, a, b))
            result.seconds[name] = found.cpu_seconds
            result.peak = result.peak or found.peak
        started = time.process_time()
        diff = diff_graphs(a, b, names=False)
        result.seconds["tokmill"] = time.process_time() - started
        matched = diff.function_a, diff.function_b
        result.scores["tokmill"], result.left_out = judge_functions(truth, *matched)
        return result

    def qbindiff(self, pair: programs.Pair, without: Sequence[str]) -> Answer:
        """Return qbindiff's answer, kept by the digests of the two programs."""
        both = [digest(one.bare) for one in (pair.a, pair.b)]
        name = "-".join((pair.a.name, pair.b.name, *both, *(f"no-{one}" for one in without)))
        kept = self.folder / "answers" / f"{name}.json"
        if kept.exists():
            there = msgspec.json.decode(kept.read_bytes(), type=Answer)
            if not there.failed or there.limit >= self.limit:
                return there
        exports = [self._export(one, key) for one, key in zip((pair.a, pair.b), both, strict=True)]
        words = (PEER, os.getpid(), *exports, SEED, *without)
        command = [self.peers_python, *map(str, words)]
        limits = child.Limits(self.limit * WAIT, memory=MEMORY)
        ended = child.run(command, limits)
        if ended.code and not ended.passed:
            # No answer to keep: something is not installed, or broke.
            return Answer(failed=ended.why(), limit=0)
        if ended.passed:
            answer = Answer(failed=ended.why(), limit=self.limit)
        else:
            answer = msgspec.json.decode(ended.out, type=Answer)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(msgspec.json.encode(answer))
        return answer

    def _export(self, one: programs.Built, digest: str) -> Path:
        path = self.folder / "exports" / f"{one.name}-{digest}.BinExport"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(binexport(graph_of(one.bare), digest))
        return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# ---- simple answers ------------------------------------------------------------------------------


def rows(pairs: Sequence[tuple[int, int]], a: Graph, b: Graph) -> Pairs:
    """Return pairs of addresses as functions of the graphs; those of imports are left out."""
    places = [
        {address: row for row, address in enumerate(graph.function_address.tolist())}
        for graph in (a, b)
    ]
    found = [
        (places[0][one], places[1][other])
        for one, other in pairs
        if one in places[0] and other in places[1]
    ]
    table = np.asarray(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def at_random(a: Graph, b: Graph) -> Pairs:
    """Match functions by lot."""
    numbers = np.random.default_rng(SEED)
    count = min(len(a.function_address), len(b.function_address))
    return (
        numbers.permutation(len(a.function_address))[:count],
        numbers.permutation(len(b.function_address))[:count],
    )


def exact(a: Graph, b: Graph) -> Pairs:
    """Match functions whose code, addresses left out, no other function has."""
    found = []
    for graph in (a, b):
        code = [tuple(one) for one in instructions(graph)]
        counts = Counter(code)
        found.append({one: row for row, one in enumerate(code) if counts[one] == 1})
    both = sorted(found[0].keys() & found[1].keys())
    one, other = ([side[key] for key in both] for side in found)
    return np.asarray(one, np.int64), np.asarray(other, np.int64)


def instructions(graph: Graph) -> list[list[tuple[str, str]]]:
    """Return mnemonic and operands of the instructions of each function, addresses left out."""
    from iced_x86 import Decoder

    from tokmill.x86.diff.output.diff_code import RIP
    from tokmill.x86.tokens.instructions import intel

    formatter = intel()
    found = []
    for function in range(len(graph.function_address)):
        lines = []
        for block in range(*graph.function_blocks[function : function + 2].tolist()):
            low, high = graph.block_bytes[block : block + 2].tolist()
            code = graph.code[low:high].tobytes()
            for one in Decoder(graph.bits, code, ip=int(graph.block_address[block])):
                operands = formatter.format_all_operands(one)
                rest = "" if one.near_branch_target else RIP.sub("rip", operands)
                lines.append((formatter.format_mnemonic(one), rest))
        found.append(lines)
    return found


def histogram(a: Graph, b: Graph) -> Pairs:
    """Assign functions by the cosine of their counts of mnemonics."""
    counts = [[Counter(name for name, _ in one) for one in instructions(g)] for g in (a, b)]
    columns = {name: i for i, name in enumerate(sorted(set().union(*counts[0], *counts[1])))}
    sides = []
    for side in counts:
        table = np.zeros((len(side), max(1, len(columns))), np.float32)
        for row, one in enumerate(side):
            for name, number in one.items():
                table[row, columns[name]] = number
        sides.append(table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-9))
    return assigned(sides[0] @ sides[1].T)


def structure(a: Graph, b: Graph) -> Pairs:
    """Assign functions by blocks, edges, calls, callers and instructions, and nothing of code."""
    sides = [shapes(graph) for graph in (a, b)]
    spread = np.concatenate(sides).std(axis=0) + 1e-9
    one, other = (side / spread for side in sides)
    distance = np.zeros((len(one), len(other)), np.float32)
    for column in range(one.shape[1]):
        distance += np.abs(one[:, column, None] - other[None, :, column])
    return assigned(-distance)


def shapes(graph: Graph) -> Array:
    """Return the logarithms of what is counted: (F, 5) f4."""
    owner = np.repeat(np.arange(len(graph.function_address)), np.diff(graph.function_blocks))
    source = owner[np.repeat(np.arange(len(owner)), np.diff(graph.block_edges))]
    size = len(graph.function_address)
    is_call = graph.edge_kind == Edge.CALL
    at = np.searchsorted(graph.function_address, graph.edge_target[is_call])
    known = np.append(graph.function_address, 0)[at] == graph.edge_target[is_call]
    counts = [
        np.bincount(owner, minlength=size),
        np.bincount(source[~is_call], minlength=size),
        np.bincount(source[is_call], minlength=size),
        np.bincount(at[known], minlength=size),
        np.bincount(owner, np.diff(graph.block_instructions), minlength=size),
    ]
    return np.log1p(np.stack(counts, 1)).astype(np.float32)


def assigned(similarity: Array) -> Pairs:
    from scipy.optimize import linear_sum_assignment

    found: Pairs = linear_sum_assignment(similarity, maximize=True)
    return found


def main(
    cache: Path,
    peers_python: str,
    names: Sequence[str] = (),
    limit: int = SECONDS,
    kinds: Sequence[str] = (),
    defaults: bool = False,
) -> list[str]:
    made = programs.make(cache, names, kinds)
    peers: dict[str, tuple[str, ...]] = {THEIRS: ()}
    if not defaults:
        peers[NO_ADDRESSES] = ("addr",)
    shown = [name for name in NAMES if name != NO_ADDRESSES or not defaults]
    bench = Bench(cache / "diffing", peers_python, limit, peers)
    results = []
    for pair in made.pairs:
        results.append(bench.judge(pair))
        done = results[-1]
        print(pair.program, pair.kind, *(f"{k} {v.f1:.3f}" for k, v in done.scores.items()),
              flush=True)  # fmt: skip
    return [
        "F1 of functions by the protocol of benchmarks/diffing-protocol.md: both programs "
        "stripped, no name is looked at. Programs with a star were looked at while features and "
        "the weights of tables of pointers were chosen; the other weights were fitted on none of "
        "these.",
        "",
        *means(results, shown),
        "",
        *table(results, shown),
        "",
        *details(results),
        *(f"- Not built: {line}." for line in made.missing),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("peers_python")
    parser.add_argument("--limit", type=int, default=SECONDS, help="CPU seconds of qbindiff a pair")
    parser.add_argument("--kind", action="append", choices=list(programs.WAYS))
    parser.add_argument("--defaults", action="store_true", help=f"leave out {NO_ADDRESSES}")
    parser.add_argument("programs", nargs="*")
    chosen = parser.parse_intermixed_args()
    made = main(
        chosen.cache, chosen.peers_python, chosen.programs, chosen.limit,
        chosen.kind or (), chosen.defaults,
    )  # fmt: skip
    print("\n".join(made))
