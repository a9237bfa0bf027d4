"""An environment for reinforcement learning: schedules of modules, rewarded by measured time.

A gymnasium environment. Operations are visited from the last to the first, so that a consumer is
cut before its producer is fused into it. An action is a row of numbers, of which only those of
its kind count:

- place 0: the kind (`ACTIONS`),
- the next `loops` places: a tile for each loop (an index into `legal.TILES`),
- the last `loops` places: for each place of an interchange the loop that comes there.

`info["action_mask"]` says what is legal: `kind` (8,), `tiles` (loops, tiles) and `parallel_tiles`
(the same, with reductions left whole). The reward is 0 until the module is complete, then log10
of the gain over the unscheduled module; what gave no result is rewarded `PENALTY`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from tokmill.errors import UsageError
from tokmill.mlir import legal, views
from tokmill.mlir import schedule as actions
from tokmill.mlir.features import Sizes
from tokmill.mlir.measure import Measurements, Result
from tokmill.mlir.problem import Problem

ACTIONS = ("stop", "tile", "parallel", "fuse", "interchange", "pack", "im2col", "vectorize")
PENALTY = -1.0
"""Reward of a schedule that was refused, computed something else, hung or crashed."""


class ScheduleEnv(gymnasium.Env[dict[str, Any], Any]):
    """Schedules of problems, one after the other; see the module."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self,
        problems: Sequence[Problem],
        measure: Measurements,
        sizes: Sizes | None = None,
        view: views.Wanted | str = "flat",
    ) -> None:
        """Make an environment; `view`: what an observation consists of (`views`)."""
        if not problems:
            raise UsageError("there is no module to schedule", hint="name one, or a folder")
        self.problems, self.measure = list(problems), measure
        self.sizes = sizes or Sizes.of(
            (each for problem in problems for each in problem.operations), normalize="log2"
        )
        loops = self.sizes.loops
        self.view = views.make(view, self.sizes, self.problems)
        self.observation_space = gymnasium.spaces.Dict({**self.view.spaces()})
        self.action_space = gymnasium.spaces.MultiDiscrete(
            [len(ACTIONS), *[len(legal.TILES)] * loops, *[loops] * loops]
        )
        self._states: list[legal.State] = []
        self._place = 0
        self._taken: list[actions.AnyAction] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a problem: `options["problem"]` is its number, else one is drawn."""
        super().reset(seed=seed)
        number = (options or {}).get("problem")
        if number is None:
            number = int(self.np_random.integers(len(self.problems)))
        self.problem = self.problems[number]
        self._states = [legal.begin(each) for each in self.problem.operations]
        self._place = len(self._states) - 1
        self._taken = []
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take an action on the operation that is visited; an illegal one ends the operation."""
        state = self._states[self._place]
        chosen = self.decode(np.asarray(action))
        illegal = False
        try:
            state = legal.take(state, chosen)
        except UsageError:
            illegal = True
            state = legal.take(state, actions.Stop(state.operation.tag))
        else:
            if not isinstance(chosen, actions.Stop):
                self._taken.append(chosen)
        self._states[self._place] = state
        if state.done and self._place == 0:
            result = self._result()
            return self._observation(), reward(result), True, False, self._info(illegal, result)
        if state.done:
            self._place -= 1
        return self._observation(), 0.0, False, False, self._info(illegal)

    @property
    def schedule(self) -> actions.Schedule:
        """Return the actions taken so far."""
        return tuple(self._taken)

    def decode(self, action: np.ndarray[Any, Any]) -> actions.AnyAction:
        """Return the action on the visited operation that a row of numbers means."""
        operation = self._states[self._place].operation
        loops = len(self._states[self._place].bounds)
        room = self.sizes.loops
        tag, kind = operation.tag, ACTIONS[int(action[0])]
        sizes = tuple(legal.TILES[int(index)] for index in action[1 : 1 + min(loops, room)])
        sizes += (0,) * (loops - len(sizes))
        if kind == "interchange":
            return actions.Interchange(tag, tuple(map(int, action[1 + room : 1 + room + loops])))
        if kind == "fuse":
            last = operation.producers[-1][1] if operation.producers else -1
            return actions.Fuse(tag, sizes, f"op_{last}")
        plain: dict[str, actions.AnyAction] = {
            "stop": actions.Stop(tag),
            "tile": actions.Tile(tag, sizes),
            "parallel": actions.Parallel(tag, sizes),
            "pack": actions.Pack(tag, sizes),
            "im2col": actions.Im2col(tag),
            "vectorize": actions.Vectorize(tag),
        }
        return plain[kind]

    def masks(self) -> dict[str, np.ndarray[Any, np.dtype[np.int8]]]:
        """Return what is legal now; see the module."""
        state = self._states[self._place]
        may = legal.allowed(state)
        tiles = np.zeros((self.sizes.loops, len(legal.TILES)), np.int8)
        tiles[:, 0] = 1
        free = tiles.copy()
        for loop in range(min(len(state.bounds), self.sizes.loops)):
            tiles[loop] = legal.tiles(state, loop)
            if state.parallel[loop]:
                free[loop] = tiles[loop]
        fits = len(state.bounds) <= self.sizes.loops
        kinds = [may[kind] and (fits or kind in ("stop", "vectorize")) for kind in ACTIONS]
        return {"kind": np.array(kinds, np.int8), "tiles": tiles, "parallel_tiles": free}

    def _result(self) -> Result:
        problem = self.problem
        return self.measure(
            problem.text, self.schedule, legal.decomposed(self._states), problem.length
        )

    def _observation(self) -> dict[str, Any]:
        state = self._states[self._place]
        return self.view(state, views.producer_of(self.problem, state.operation))

    def _info(self, illegal: bool = False, result: Result | None = None) -> dict[str, Any]:
        info: dict[str, Any] = {"action_mask": self.masks(), "illegal": illegal}
        return info if result is None else info | {"result": result, "schedule": self.schedule}


def reward(result: Result) -> float:
    """Return log10 of the gain of a result, or `PENALTY`."""
    return float(np.log10(result.gain)) if result.status == "ok" else PENALTY
