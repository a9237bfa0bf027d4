"""Diffing of programs: tokmill beside qbindiff and simple answers, functions against the truth.

Both programs are stripped; the truth is in their debug information (docs/diffing-protocol.md).
qbindiff reads `.BinExport` files of the same graphs, in a process of its own with limits; what it
answers is kept below CACHE/diffing/answers by the digests of both programs, so a run that was
stopped goes on.

    python benchmarks/diffing.py CACHE PEERS-PYTHON [--limit SECONDS] [--run RUN] [PROGRAM …]
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

import diffing_programs as programs
from tokmill import child
from tokmill.store.schema import Array
from tokmill.x86.diff.block_truth import judge_blocks
from tokmill.x86.diff.ground_truth import GroundTruth, LeftOut, ground_truth, judge_functions
from tokmill.x86.diff.programs import diff_graphs
from tokmill.x86.diff.source_lines import two_versions
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.graphs.files import write_graph
from tokmill.x86.image.debug_info import DebugInfo, debug_reader, read_debug_info
from tokmill.x86.image.truth import Score
from tokmill.x86.lift.cfg import lift

PEER = Path(__file__).parent / "peers" / "qbindiff_peer.py"
SECONDS, MEMORY = 900, 6 << 30
"""What qbindiff may take for a pair."""
SEED = 1
NO_ADDRESSES = "qbindiff without `addr`"
NAMES = (
    "random", "exact hash", "opcode histogram", "structure", "qbindiff", NO_ADDRESSES, "tokmill"
)  # fmt: skip
RUN = "tokmill with a model"
Pairs = tuple[Array, Array]
"""Functions of A and of B that were matched: i8 each, as long."""


class Answer(msgspec.Struct):
    """What qbindiff says of one pair; kept as JSON."""

    pairs: list[tuple[int, int]] = []
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    peak: int = 0
    failed: str = ""
    limit: int = SECONDS
    """Seconds that it had."""


@dataclass
class Result:
    """One pair, judged."""

    pair: programs.Pair
    matches: int
    scores: dict[str, Score] = field(default_factory=dict)
    blocks: Score = field(default_factory=lambda: Score(0, 0, 0))
    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds after lifting."""
    peak: int = 0
    """Of qbindiff, with its defaults."""
    failed: dict[str, str] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)


class Bench:
    """Programs, graphs and debug information, each read once, and the answers that are kept."""

    def __init__(
        self, cache: Path, peers_python: str, run: Path | None, limit: int = SECONDS
    ) -> None:
        self.folder, self.peers_python, self.run = cache / "diffing", peers_python, run
        self.limit = limit
        self.graphs: dict[Path, Graph] = {}
        self.infos: dict[Path, DebugInfo] = {}

    def graph(self, path: Path) -> Graph:
        """Return the graph of a stripped program."""
        if path not in self.graphs:
            self.graphs[path] = lift(path, facts=True)
        return self.graphs[path]

    def info(self, path: Path) -> DebugInfo:
        """Return what the debug information of a program says."""
        if path not in self.infos:
            with debug_reader(path) as reader:
                self.infos[path] = read_debug_info(path, reader)
        return self.infos[path]

    def truth(self, pair: programs.Pair) -> GroundTruth:
        """Return the truth about a pair."""
        a, b = self.info(pair.a.debug), self.info(pair.b.debug)
        # The same sources need no difference.
        versions = pair.a.source != pair.b.source
        source = two_versions(a.files, b.files, pair.a.source, pair.b.source) if versions else None
        return ground_truth(self.graph(pair.a.bare), self.graph(pair.b.bare), a, b, source)

    def judge(self, pair: programs.Pair) -> Result:
        """Return what each contestant makes of a pair."""
        truth = self.truth(pair)
        a, b = truth.a.graph, truth.b.graph
        result = Result(pair, truth.matches)
        answers: dict[str, Callable[[Graph, Graph], Pairs]] = {
            "random": at_random, "exact hash": exact, "opcode histogram": histogram,
            "structure": structure,
        }  # fmt: skip
        for name, answer in answers.items():
            started = time.process_time()
            result.scores[name], _ = judge_functions(truth, *answer(a, b))
            result.seconds[name] = time.process_time() - started
        for name, without in (("qbindiff", ()), (NO_ADDRESSES, ("addr",))):
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
        result.blocks, _ = judge_blocks(truth, diff.block_a, diff.block_b)
        if self.run is not None:
            from tokmill.cli.diff_vectors import vectors_of

            vectors = vectors_of((a, b), self.run, at="last", device="auto", quiet=True)
            diff = diff_graphs(a, b, names=False, vectors=vectors)
            result.scores[RUN], _ = judge_functions(truth, diff.function_a, diff.function_b)
        return result

    def qbindiff(self, pair: programs.Pair, without: Sequence[str]) -> Answer:
        """Return qbindiff's answer, kept by the digests of the two programs."""
        both = [hashlib.sha256(one.bare.read_bytes()).hexdigest()[:16] for one in (pair.a, pair.b)]
        name = "-".join((pair.a.name, pair.b.name, *both, *(f"no-{one}" for one in without)))
        kept = self.folder / "answers" / f"{name}.json"
        if kept.exists():
            there = msgspec.json.decode(kept.read_bytes(), type=Answer)
            if not there.failed or there.limit >= self.limit:
                return there
        exports = [self._export(one, key) for one, key in zip((pair.a, pair.b), both, strict=True)]
        command = [self.peers_python, str(PEER), *map(str, exports), str(SEED), *without]
        ended = child.run(command, child.Limits(seconds=self.limit, memory=MEMORY))
        if ended.code and not ended.passed:
            # No answer to keep: something is not installed, or broke.
            return Answer(failed=ended.why())
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
            write_graph(self.graph(one.bare), path, digest)
        return path


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
        hashes = [hashlib.sha256(text.encode()).digest() for text in texts(graph)]
        counts = Counter(hashes)
        found.append({one: row for row, one in enumerate(hashes) if counts[one] == 1})
    both = sorted(found[0].keys() & found[1].keys())
    one, other = ([side[key] for key in both] for side in found)
    return np.asarray(one, np.int64), np.asarray(other, np.int64)


def texts(graph: Graph) -> list[str]:
    """Return the instructions of each function as text, without what linking decides."""
    return ["\n".join(f"{name} {rest}" for name, rest in one) for one in instructions(graph)]


def instructions(graph: Graph) -> list[list[tuple[str, str]]]:
    """Return mnemonic and operands of the instructions of each function, addresses left out."""
    from iced_x86 import Decoder

    from tokmill.report.diff_code import RIP
    from tokmill.x86.tokens.spellings import intel

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
    """Return the assignment with the largest sum."""
    from scipy.optimize import linear_sum_assignment

    found: Pairs = linear_sum_assignment(similarity, maximize=True)
    return found


# ---- tables --------------------------------------------------------------------------------------


def table(results: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Return F1 of functions a pair, and means by kind of pair and in total."""
    lines = [
        f"| pair | functions | {' | '.join(names)} | blocks, tokmill |",
        f"|---|---|{'---|' * (len(names) + 1)}",
    ]
    for one in results:
        cells = [f"{one.scores[n].f1:.3f}" if n in one.scores else "no answer" for n in names]
        star = "" if one.pair.held_out else " *"
        lines.append(
            f"| {one.pair.program}{star} {one.pair.kind} | {one.matches:,} | {' | '.join(cells)} | "
            f"{one.blocks.f1:.3f} |"
        )
    kinds = list(dict.fromkeys(one.pair.kind for one in results))
    for kind in kinds:
        lines += mean(f"**{kind}**", [one for one in results if one.pair.kind == kind], names)
    lines += mean("**all that are held out**", [one for one in results if one.pair.held_out], names)
    return lines + mean("**all**", list(results), names)


def mean(title: str, results: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Return the row of means over the pairs of which all have an answer."""
    whole = [one for one in results if all(name in one.scores for name in names)]
    if not whole:
        return []
    cells = [f"{statistics.mean(one.scores[name].f1 for one in whole):.3f}" for name in names]
    left = f", {len(whole)} of {len(results)} pairs" if len(whole) < len(results) else ""
    blocks = statistics.mean(one.blocks.f1 for one in whole)
    matches = sum(one.matches for one in whole)
    return [f"| {title}{left} | {matches:,} | {' | '.join(cells)} | {blocks:.3f} |"]


def details(results: Sequence[Result]) -> list[str]:
    """Return what is beside the figures: times, memory, what does not count, what is missing."""
    lines = []
    timed = [one for one in results if "qbindiff" in one.seconds]
    if timed:
        ours, theirs = ([one.seconds[name] for one in timed] for name in ("tokmill", "qbindiff"))
        lines.append(
            f"CPU seconds after lifting, median of {len(timed)} pairs: tokmill "
            f"{statistics.median(ours):.1f}, qbindiff {statistics.median(theirs):.1f} (largest "
            f"{max(ours):.1f} and {max(theirs):.1f}); qbindiff's largest resident memory "
            f"{max(one.peak for one in timed) / 2**20:,.0f} MiB."
        )
    for one in results:
        for name, why in one.failed.items():
            lines.append(f"- {name}, {one.pair.program} {one.pair.kind}: {why}.")
    left: dict[str, Counter[str]] = {"A": Counter(), "B": Counter()}
    for one in results:
        left["A"] += one.left_out.a
        left["B"] += one.left_out.b
    for side, counts in left.items():
        reasons = ", ".join(f"{number:,} {why}" for why, number in counts.most_common())
        lines.append(f"- Functions of {side} that do not count: {reasons}.")
    return lines


def main(
    cache: Path,
    peers_python: str,
    run: Path | None = None,
    names: Sequence[str] = (),
    limit: int = SECONDS,
) -> list[str]:
    """Build, measure; return the section for RESULTS.md."""
    made = programs.make(cache, names)
    bench = Bench(cache, peers_python, run, limit)
    results = []
    for pair in made.pairs:
        results.append(bench.judge(pair))
        done = results[-1]
        print(pair.program, pair.kind, *(f"{k} {v.f1:.3f}" for k, v in done.scores.items()),
              flush=True)  # fmt: skip
    contestants = [*NAMES, RUN] if run else list(NAMES)
    return [
        "F1 of functions by the protocol of docs/diffing-protocol.md: both programs stripped, no "
        "name is looked at. Programs with a star were looked at while features were chosen; "
        "weights were fitted on none of these.",
        "",
        *table(results, contestants),
        "",
        *details(results),
        *(f"- Not built: {line}." for line in made.missing),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("peers_python")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--limit", type=int, default=SECONDS, help="seconds of qbindiff a pair")
    parser.add_argument("programs", nargs="*")
    chosen = parser.parse_args()
    lines = main(chosen.cache, chosen.peers_python, chosen.run, chosen.programs, chosen.limit)
    print("\n".join(lines))
