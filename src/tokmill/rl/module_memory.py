"""What a training remembers of each module: how its rewards are, and its best schedules.

Few evaluations find few good schedules, and PPO forgets them after a step. So the best ones are
imitated again and again, as much as they are better than the mean of their module (as in
self-imitation learning, Oh et al., 2018).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LEAST = 0.1
"""Weight of a new reward in the mean of many."""


class Memory:
    """Means of rewards, and the `most` best schedules, by the name of a module."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._means: dict[str, list[float]] = {}
        """How many rewards there were, and their mean, in which late ones count more."""
        self._best: dict[str, list[tuple[float, list[list[int]]]]] = {}
        """Rewards and actions, the best one first."""
        self._known: dict[str, set[str]] = {}
        """Digests of all schedules."""

    def see(
        self, module: str, reward: float, chosen: list[Array], schedule: tuple[Any, ...]
    ) -> None:
        """Take the reward of an episode, its actions (`ScheduleEnv`) and their schedule."""
        self._known.setdefault(module, set()).add(_digest(schedule))
        count, mean = self._means.get(module, (0.0, 0.0))
        mean += (reward - mean) * max(1 / (count + 1), LEAST)
        self._means[module] = [count + 1, mean]
        actions = [[int(one) for one in row] for row in chosen]
        kept = self._best.setdefault(module, [])
        if all(actions != known for _, known in kept):
            kept.append((float(reward), actions))
            kept.sort(key=lambda one: -one[0])
            del kept[self.most :]

    def knows(self, module: str, schedule: tuple[Any, ...]) -> bool:
        """Return whether a schedule was measured before."""
        return _digest(schedule) in self._known.get(module, ())

    def mean(self, module: str) -> float | None:
        """Return the mean of a module's rewards; None before the first."""
        return self._means[module][1] if module in self._means else None

    def best(self, module: str) -> list[tuple[float, list[Array]]]:
        """Return rewards and actions of the best schedules that are above the mean."""
        mean = self.mean(module) or 0.0
        return [
            (reward - mean, [np.array(row, np.int64) for row in actions])
            for reward, actions in self._best.get(module, [])
            if reward > mean
        ]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "means": {name: list(one) for name, one in self._means.items()},
            "best": {
                name: [[reward, actions] for reward, actions in kept]
                for name, kept in self._best.items()
            },
            "known": {name: sorted(known) for name, known in self._known.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        self._means = {name: list(one) for name, one in state["means"].items()}
        self._best = {
            name: [(float(reward), [list(map(int, row)) for row in actions])
                   for reward, actions in kept]
            for name, kept in state["best"].items()
        }  # fmt: skip
        self._known = {name: set(known) for name, known in state["known"].items()}


def _digest(schedule: tuple[Any, ...]) -> str:
    return hashlib.blake2b(repr(schedule).encode(), digest_size=8).hexdigest()
