"""Learn what a hidden layer adds to the evidence of `tokmill diff`.

It is learned from what the matcher sees at its later looks at pairs of programs of the projects
`TRAIN`: of two levels, compilers, versions, and programs with themselves. The linear weights stay.
The loss is the likelihood that `match_functions.compete` gives to the truth: each function has its
one partner, or none. It is learned until it is best for the projects `STOP`, and the layers of
several seeds are joined to their mean, of which `SHARE` is taken. Members of structures and inlined
functions are hidden from it: with them it is no better (docs/log/2026-11-27-twins.md).
`diff_evidence_figures.py` measures it.

    python benchmarks/diff_evidence.py CACHE NET.npy [--seed 0 1]
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diff_evidence_programs import EQUAL, KINDS, SKIPPED, STOP, TRAIN, Case, cases
from tokmill.store.schema import Array
from tokmill.x86.diff import match_functions
from tokmill.x86.diff.candidates import Pairs
from tokmill.x86.diff.evidence_net import UNIT, Net
from tokmill.x86.diff.evidence_weights import LATER_BIAS
from tokmill.x86.diff.match_functions import EVIDENCE, Given

COLUMNS = len(EVIDENCE)
HIDDEN = 64
EPOCHS, RATE, DECAY = 10, 3e-3, 0.01
PIECE = 4096
"""Pairs whose hidden units are held at once."""
SHARE = 0.7
"""Of the layer's output; the best of four for the projects `STOP`."""
UNSEEN = [name == "inlined" or "member" in name for name in EVIDENCE]
"""Columns that the layer does not see."""
ZERO = np.zeros((COLUMNS + 2, 1), np.int16)
"""A net that adds nothing."""


class Look(NamedTuple):
    """All pairs of functions at a look of the matcher."""

    evidence: Array
    """(n, COLUMNS) f4."""
    linear: Array
    """(n,) f4, the logit without a layer; large where a pair is given."""
    i: Array
    j: Array
    size: tuple[int, int]
    right: Array
    """Numbers of the true pairs, i8."""
    none: tuple[Array, Array]
    """Functions of each program without a partner among the pairs."""

    @property
    def functions(self) -> int:
        """Return how many functions say something."""
        return 2 * len(self.right) + sum(map(len, self.none))


class Gathering(match_functions._Matcher):
    """A matcher that keeps what it sees at the later looks."""

    def look(self, pairs: Pairs, around: Array) -> Array:
        self.seen = [*getattr(self, "seen", []), (pairs, np.concatenate([self.table, around], 1))]
        return super().look(pairs, around)


def looks(case: Case) -> Iterator[Look]:
    given = case.arguments[-1]
    if case.pair.kind.startswith(tuple(EQUAL)):
        # Else only short functions would be learned from.
        given = Given(*(one[:0] for one in (given.i, given.j, given.reason)))
    matcher = Gathering(*case.arguments[:-1], given)
    matcher.run()
    for seen, evidence in matcher.seen[: match_functions.ROUNDS]:
        evidence[:, UNSEEN] = 0
        linear = evidence @ matcher.later + np.float32(LATER_BIAS)
        linear[np.searchsorted(seen.key, given.i * seen.columns + given.j)] = match_functions.SURE
        partner = [one.copy() for one in case.partner]
        partner[0][given.i] = partner[1][given.j] = SKIPPED
        has = np.flatnonzero(partner[0] >= 0)
        key = has * seen.columns + partner[0][has]
        right = np.searchsorted(seen.key, key)
        right = right[seen.key[np.minimum(right, len(seen) - 1)] == key]
        known = seen.i[right], seen.j[right]
        none = [
            np.setdiff1d(np.flatnonzero(one != SKIPPED), there)
            for one, there in zip(partner, known, strict=True)
        ]
        size = seen.rows, seen.columns
        yield Look(evidence, linear, seen.i, seen.j, size, right, (none[0], none[1]))


class Layer:
    """A hidden layer whose gradients are taken in pieces, as its units do not fit into a cache."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.parts = [torch.randn(COLUMNS, HIDDEN) / 6, torch.zeros(HIDDEN), torch.zeros(HIDDEN)]

    def units(self, evidence: Any) -> Any:
        hidden, bias, _ = self.parts
        return self.torch.addmm(bias, evidence, hidden).relu_()

    def forward(self, evidence: Any) -> Any:
        """Return what is added to the logit of pairs."""
        return self.torch.cat([self.units(part) @ self.parts[2] for part in evidence.split(PIECE)])

    def backward(self, evidence: Any, gradient: Any) -> None:
        """Set the gradients of the parts from that of what is added."""
        hidden, bias, out = found = [self.torch.zeros_like(part) for part in self.parts]
        for part, of in zip(evidence.split(PIECE), gradient.split(PIECE), strict=True):
            units = self.units(part)
            out += of @ units
            back = self.torch.outer(of, self.parts[2]).mul_(units > 0)
            hidden += part.T @ back
            bias += back.sum(0)
        for part, one in zip(self.parts, found, strict=True):
            part.grad = one


def loss_of(torch: Any, look: Look, added: Any) -> tuple[Any, int]:
    """Return the negative log likelihood of the truth, and of how many functions it is."""
    logit = torch.from_numpy(look.linear) + added
    logit = logit.clamp(-match_functions.SURE, match_functions.SURE)
    odds, right = logit.exp(), torch.from_numpy(look.right)
    total = logit.new_zeros(())
    for place, size, none in zip((look.i, look.j), look.size, look.none, strict=True):
        index = torch.from_numpy(place)
        share = torch.log1p(logit.new_zeros(size).index_add(0, index, odds))
        total = total + (share[index[right]] - logit[right]).sum()
        total = total + share[torch.from_numpy(none)].sum()
    return total, look.functions


def learn(train: Sequence[Look], stop: Sequence[Look], seed: int) -> Array:
    import torch

    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    layer = Layer(torch)
    by = torch.optim.AdamW(layer.parts, RATE, weight_decay=DECAY)
    best, table = float("inf"), ZERO
    for epoch in range(-1, EPOCHS):
        by.param_groups[0]["lr"] = RATE * (0.5 + 0.5 * np.cos(np.pi * epoch / EPOCHS))
        for number in random.permutation(len(train)).tolist() if epoch >= 0 else ():
            evidence = torch.from_numpy(train[number].evidence)
            added = layer.forward(evidence).requires_grad_()
            total, count = loss_of(torch, train[number], added)
            # Large programs count more, but not by as much as they are larger.
            (total / count**0.5 / 10).backward()
            layer.backward(evidence, added.grad)
            torch.nn.utils.clip_grad_norm_(layer.parts, 1.0)
            by.step()
        sums = [
            loss_of(torch, look, layer.forward(torch.from_numpy(look.evidence))) for look in stop
        ]
        value = float(np.mean([float(total) / count for total, count in sums]))
        print(f"epoch {epoch}: {value:.4f}", flush=True)
        if value < best:
            best = value
            table = np.rint(np.vstack([part.numpy() for part in layer.parts]) * UNIT)
            table = table.astype(np.int16)
            table[:COLUMNS][UNSEEN] = 0
    return table


def using(table: Array) -> None:
    """Let the matcher use a net."""
    match_functions.net = lambda: Net.of(table)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1], help="the mean of these")
    chosen = parser.parse_args(arguments)
    using(ZERO)
    train, stop = (
        [look for case in cases(chosen.cache, names, KINDS | EQUAL) for look in looks(case)]
        for names in (TRAIN, STOP)
    )
    train, stop = ([look for look in part if look.functions] for part in (train, stop))
    print(f"{len(train)} looks, {sum(len(look.i) for look in train):,} pairs", flush=True)
    found = np.hstack([learn(train, stop, seed) for seed in chosen.seed])
    found[-1] = np.rint(found[-1] / len(chosen.seed) * SHARE)
    np.save(chosen.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
