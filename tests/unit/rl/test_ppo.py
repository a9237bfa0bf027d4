"""PPO beside formulas that are written out, number by number."""

import math

import numpy as np
import pytest
import torch

from tokmill.rl import ppo


def written_out(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Σ_k (γ λ)^k δ_{t+k}, as in the paper."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0.0)])
def test_advantages_are_those_of_the_sum(gamma: float, lam: float) -> None:
    random = np.random.default_rng(0)
    for moves in (1, 2, 7):
        rewards, values = random.normal(size=(2, moves)).tolist()
        found, returns = ppo.advantages(rewards, values, gamma, lam)
        assert found == pytest.approx(written_out(rewards, values, gamma, lam))
        assert returns == pytest.approx(found + np.array(values))
    if gamma == lam == 1:
        assert returns == pytest.approx(np.cumsum(rewards[::-1])[::-1])


def test_the_clipped_loss_is_that_of_numpy() -> None:
    random = np.random.default_rng(1)
    logp, old, advantage, value, target = random.normal(size=(5, 50)) * 0.4
    losses = ppo.clipped_loss(*map(torch.from_numpy, (logp, old, advantage, value, target)), 0.2)
    policy = worth = kl = 0.0
    clipped = 0
    for row in range(50):
        ratio = math.exp(logp[row] - old[row])
        held = min(max(ratio, 0.8), 1.2)
        policy -= min(ratio * advantage[row], held * advantage[row])
        worth += (value[row] - target[row]) ** 2 / 2
        kl += ratio - 1 - (logp[row] - old[row])
        clipped += abs(ratio - 1) > 0.2
    assert float(losses.policy) == pytest.approx(policy)
    assert float(losses.value) == pytest.approx(worth)
    assert float(losses.kl) == pytest.approx(kl)
    assert int(losses.clipped) == clipped > 0


def test_what_is_clipped_has_no_gradient() -> None:
    logp = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    nothing = torch.zeros(4)
    losses = ppo.clipped_loss(logp, nothing, torch.tensor([1.0, -1, 1, -1]), nothing, nothing, 0.2)
    losses.policy.backward()
    assert logp.grad is not None
    assert (logp.grad != 0).tolist() == [False, True, True, False]


def test_normalised_advantages() -> None:
    found = ppo.normalised(np.array([1.0, 2, 3, 10]))
    assert found.mean() == pytest.approx(0) and found.std() == pytest.approx(1)
    assert ppo.normalised(np.array([5.0])).tolist() == [0]
    assert ppo.normalised(np.array([2.0, 2.0])).tolist() == [0, 0]


def test_the_entropy_is_held_up_and_its_collapse_is_told_once() -> None:
    entropy = ppo.Entropy(0.01, 0.2)
    told = [entropy.see(share) for share in (0.5, 0.15, 0.05, 0.04, 0.15)]
    assert told == [False, False, True, False, False]
    assert entropy.now == pytest.approx(0.16) and not entropy.alarmed
    assert entropy.see(0.01)
    again = ppo.Entropy(0.01, 0.2)
    again.load(entropy.state())
    assert (again.now, again.alarmed) == (entropy.now, True)
    for _ in range(10):
        entropy.see(0.9)
    assert entropy.now == 0.01
    for _ in range(10):
        entropy.see(0.0)
    assert entropy.now == pytest.approx(0.01 * ppo.STRONGEST)


def test_minibatches_hold_every_row_once() -> None:
    torch.manual_seed(0)
    for rows, size in ((1, 8), (17, 8), (16, 8), (5, 1)):
        passes = ppo.minibatches(rows, size, 3)
        assert len(passes) == 3
        for parts in passes:
            assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
            lengths = [len(part) for part in parts]
            assert max(lengths) - min(lengths) <= 1 and max(lengths) <= size
