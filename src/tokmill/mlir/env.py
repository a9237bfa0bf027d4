"""An environment for reinforcement learning: schedules of modules, rewarded by measured time.

A gymnasium environment. Operations are visited from the last to the first, so that a consumer is
cut before its producer is fused into it. An action is a row of numbers, of which only those of
its kind count:

- place 0: the kind (an index into `LOOPS.kinds`),
- the next `loops` places: a tile for each loop (an index into `LOOPS.sizes`),
- the last `loops` places: for each place of an interchange the loop that comes there.

`info["action_mask"]` says what is legal: `kind` (kinds,),
`cuts` (kinds, loops, tiles): the tiles that each kind allows for each loop; and `loops` (loops,):
which loops the operation has. Two rules are not in the masks: a tiling cuts at
least one loop, and an interchange names each loop once. The reward is 0 until the module is
complete. Then it is log10 of the gain over the unscheduled module, or `measure.PENALTY` if there
is no result.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from tokmill.base.errors import UsageError
from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.loops.legal import State
from tokmill.mlir.measure import Measurements, reward
from tokmill.mlir.modules.problem import Problem
from tokmill.mlir.space import LOOPS, cuts
from tokmill.mlir.tokens import views
from tokmill.mlir.tokens.features import Sizes


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
        self.measure = measure
        self.problems = list(problems)
        self.sizes = sizes or Sizes.of(
            (each for problem in self.problems for each in problem.operations),
            normalize="log2",
            tiles=LOOPS.sizes,
        )
        loops = self.sizes.loops
        self.view = views.make(view, self.sizes, self.problems)
        self.observation_space = gymnasium.spaces.Dict({**self.view.spaces()})
        self.action_space = gymnasium.spaces.MultiDiscrete(
            [len(LOOPS.kinds), *[len(LOOPS.sizes)] * loops, *[loops] * loops]
        )
        self._states: list[State] = []
        self._place = 0
        self._taken: list[Any] = []
        self._measured = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a problem: `options["problem"]` is its number, else one is drawn.

        With `options["measured"] = False` nothing is measured at its end: the reward is 0 and
        `info` has no result.
        """
        super().reset(seed=seed)
        self._measured = (options or {}).get("measured", True)
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
            result = self.measure(self.problem, self.schedule) if self._measured else None
            worth = 0.0 if result is None else reward(result)
            info = self._info(illegal) | {"schedule": self.schedule}
            if result is not None:
                info["result"] = result
            return self._observation(), worth, True, False, info
        if state.done:
            self._place -= 1
            self._states[self._place] = legal.reached(self._states[self._place], self._taken)
        return self._observation(), 0.0, False, False, self._info(illegal)

    @property
    def schedule(self) -> tuple[Any, ...]:
        """Return the actions taken so far."""
        return tuple(self._taken)

    def decode(self, action: np.ndarray[Any, Any]) -> Any:
        """Return the action on the visited operation that a row of numbers means."""
        state, most = self._states[self._place], self.sizes.loops
        loops = len(state.bounds)
        sizes = tuple(LOOPS.sizes[int(index)] for index in action[1 : 1 + min(loops, most)])
        sizes += (0,) * (loops - len(sizes))
        order = tuple(map(int, action[1 + most : 1 + most + loops]))
        return LOOPS.action(state, LOOPS.kinds[int(action[0])], sizes, order)

    def masks(self) -> dict[str, np.ndarray[Any, np.dtype[np.int8]]]:
        """Return what is legal now; see the module."""
        state, loops = self._states[self._place], self.sizes.loops
        may, parts = legal.allowed(state), LOOPS.parts
        # An operation with more loops than there is room for can be changed as a whole alone.
        fits = len(state.bounds) <= loops
        kinds = [may[kind] and (fits or kind not in parts) for kind in LOOPS.kinds]
        return {
            "kind": np.array(kinds, np.int8),
            "cuts": cuts(state, loops),
            "loops": (np.arange(loops) < len(state.bounds)).astype(np.int8),
        }

    def _observation(self) -> dict[str, Any]:
        state = self._states[self._place]
        return self.view(state, views.producer_of(self.problem, state.operation))

    def _info(self, illegal: bool = False) -> dict[str, Any]:
        return {"action_mask": self.masks(), "illegal": illegal}
