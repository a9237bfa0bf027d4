"""Diffing of programs: tokmill beside qbindiff and simple answers, functions against the truth.

Both programs are stripped; the truth is in their debug information (see diffing-protocol.md). They
lie below CACHE/diffing, compiled by `similarity_programs.py`. qbindiff reads `.BinExport` files
of the same graphs, in a process of its own with limits. Its answers are kept below
CACHE/diffing/answers by the digests of both programs, so a run that was stopped goes on. qbindiff
is killed with it.

    python benchmarks/diffing.py CACHE PEERS-PYTHON [--limit SECONDS] [PROGRAM …]
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

from binexport_file import binexport
from debug_info import read_debug_info
from diff_evidence_programs import Pair, pairs
from diffing_table import OURS, THEIRS, Result, details, means, table
from function_truth import function_truth, judge_functions
from tokmill.base.children import child
from tokmill.store.schema import Array
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.graph import Graph
from tokmill.x86.lift.cfg import lift

PEER = Path(__file__).parent / "peers" / "qbindiff_peer.py"
SECONDS, MEMORY = 900, 6 << 30
"""What qbindiff may take for a pair: CPU seconds, bytes."""
WAIT = 20
"""So many times as long it may take by the clock, as on a busy machine."""
SEED = 1
NAMES = ("exact hash", "opcode histogram", THEIRS, OURS)
PROGRAMS = ("bzip2", "zlib", "lua", "lz4", "xxhash", "brotli", "zstd")
KINDS = {
    "O0 ↔ O2": ("gcc-O0", "gcc-O2"),
    "O2 ↔ O3": ("gcc-O2", "gcc-O3"),
    "gcc ↔ clang": ("gcc-O2", "clang-O2"),
    "versions": ("gcc-O2", "gcc-O2"),
    "O1 ↔ O2": ("gcc-O1", "gcc-O2"),
    "O0 ↔ O3": ("gcc-O0", "gcc-O3"),
    "O0 ↔ O2, shuffled": ("gcc-O0", "gcc-O2_shuffled"),
    "O2 ↔ O3, shuffled": ("gcc-O2", "gcc-O3_shuffled"),
}
"""Kind of a pair → compiler and level of A and of B."""
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

    def judge(self, pair: Pair) -> Result:
        """Return what each contestant makes of a pair."""
        a, b = map(graph_of, pair.bare)
        truth = function_truth(a, b, *map(info_of, pair.debug))
        size = max(path.stat().st_size for path in pair.bare)
        result = Result(pair, truth.matches, size)
        answers: dict[str, Callable[[Graph, Graph], Pairs]] = {
            "exact hash": exact,
            "opcode histogram": histogram,
        }
        for name, answer in answers.items():
            started = time.process_time()
            result.scores[name], _ = judge_functions(truth, *answer(a, b))
            result.seconds[name] = time.process_time() - started
        found = self.qbindiff(pair)
        result.failed = found.failed
        if not found.failed:
            result.scores[THEIRS], _ = judge_functions(truth, *rows(found.pairs, a, b))
            result.seconds[THEIRS] = found.cpu_seconds
            result.peak = found.peak
        started = time.process_time()
        diff = diff_graphs(a, b, names=False)
        result.seconds[OURS] = time.process_time() - started
        matched = diff.function_a, diff.function_b
        result.scores[OURS], result.left_out = judge_functions(truth, *matched)
        return result

    def qbindiff(self, pair: Pair) -> Answer:
        """Return qbindiff's answer, kept by the digests of the two programs."""
        both = [digest(path) for path in pair.bare]
        kept = self.folder / "answers" / f"{pair.project}-{'-'.join(both)}.json"
        if kept.exists():
            there = msgspec.json.decode(kept.read_bytes(), type=Answer)
            if not there.failed or there.limit >= self.limit:
                return there
        exports = [self._export(path, key) for path, key in zip(pair.bare, both, strict=True)]
        words = (PEER, os.getpid(), *exports, SEED)
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

    def _export(self, program: Path, digest: str) -> Path:
        path = self.folder / "exports" / f"{digest}.BinExport"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(binexport(graph_of(program), digest))
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


def assigned(similarity: Array) -> Pairs:
    from scipy.optimize import linear_sum_assignment

    found: Pairs = linear_sum_assignment(similarity, maximize=True)
    return found


def main(
    cache: Path, peers_python: str, names: Sequence[str] = PROGRAMS, limit: int = SECONDS
) -> list[str]:
    bench = Bench(cache / "diffing", peers_python, limit)
    results = []
    for pair in pairs(cache, tuple(names), KINDS):
        results.append(bench.judge(pair))
        done = results[-1]
        print(pair.project, pair.kind, *(f"{k} {v.f1:.3f}" for k, v in done.scores.items()),
              flush=True)  # fmt: skip
    return [
        "F1 of functions by the protocol of benchmarks/diffing-protocol.md: both programs "
        "stripped, no name is looked at. Programs with a star were looked at while features and "
        "the weights of tables of pointers were chosen; the other weights were fitted on none of "
        "these.",
        "",
        *means(results, NAMES),
        "",
        *table(results, NAMES),
        "",
        *details(results),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("peers_python")
    parser.add_argument("--limit", type=int, default=SECONDS, help="CPU seconds of qbindiff a pair")
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    chosen = parser.parse_intermixed_args()
    print("\n".join(main(chosen.cache, chosen.peers_python, chosen.programs, chosen.limit)))
