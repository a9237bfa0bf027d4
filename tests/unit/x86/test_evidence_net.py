"""The logit of pairs, beside the same sum in whole numbers."""

import hashlib
from pathlib import Path

import numpy as np

from tokmill.x86.diff import evidence_net
from tokmill.x86.diff.evidence_net import FILE, UNIT, Net, net
from tokmill.x86.diff.evidence_weights import WEIGHTS
from tokmill.x86.diff.match_functions import EVIDENCE


def whole(value: float) -> int:
    """Round to whole units, halves to even."""
    return round(value * UNIT)


def test_the_logit_is_the_sum_of_whole_numbers() -> None:
    random = np.random.default_rng(3)
    table = random.integers(-4000, 4000, (7 + 2, 5)).astype(np.int16)
    weights = random.normal(size=7).astype(np.float32)
    evidence = random.normal(size=(40, 7)).astype(np.float32) * 3
    wanted = []
    for row in evidence.tolist():
        units = [
            sum(whole(x) * int(w) for x, w in zip(row, column, strict=True)) + int(bias) * UNIT
            for column, bias in zip(table[:-2].T, table[-2], strict=True)
        ]
        layer = sum(
            whole(max(one, 0) / UNIT**2) * int(out)
            for one, out in zip(units, table[-1], strict=True)
        )
        linear = sum(whole(x) * whole(w) for x, w in zip(row, weights.tolist(), strict=True))
        wanted.append((linear / UNIT**2, layer / UNIT**2))
    assert np.array_equal(
        Net.of(table).terms(weights, evidence[:, :3], evidence[:, 3:]),
        np.asarray(wanted, np.float32).T,
    )


def test_the_order_of_evidence_changes_no_bit() -> None:
    random = np.random.default_rng(4)
    weights = random.normal(size=len(EVIDENCE)).astype(np.float32)
    evidence = random.random((5000, len(EVIDENCE))).astype(np.float32)
    first = net().terms(weights, evidence)
    turned = Net(net().hidden[::-1, ::-1], net().bias[::-1], net().out[::-1])
    assert np.array_equal(turned.terms(weights[::-1], evidence[:, ::-1]), first)
    one = [net().terms(weights, evidence[n : n + 7]) for n in range(0, 5000, 7)]
    assert np.array_equal(np.concatenate(one, 1), first)


def test_the_net_of_the_package_fits_the_evidence(repository: Path) -> None:
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    assert digest in (repository / "docs/diffing.md").read_text()
    table = np.load(FILE)
    assert table.dtype == np.int16 and table.shape == (len(EVIDENCE) + 2, 128)
    assert set(WEIGHTS) == set(EVIDENCE) - {"code"}
    # Sums of this size are exact in an f8.
    assert (128 * float(abs(table).max()) * evidence_net.UNIT**2 * len(EVIDENCE)) < 2**53
