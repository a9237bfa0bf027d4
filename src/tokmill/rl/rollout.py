"""Episodes: a policy acts in environments side by side; each episode ends with a measurement."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from tokmill.mlir.env import ScheduleEnv
from tokmill.mlir.measure import Result, reward
from tokmill.models.model import Tensors
from tokmill.rl import actions
from tokmill.rl.actions import Layout, Scores
from tokmill.rl.embedding import embeddings
from tokmill.rl.schedule_task import batch_of

Array = np.ndarray[Any, Any]
Act = Callable[[Tensors], dict[str, Tensor]]
"""`Engine.act`: scores of a batch."""


@dataclass
class Episode:
    """A module from the first action to its measurement; lists are by move."""

    problem: int
    seen: list[Mapping[str, Array]] = field(default_factory=list)
    masks: list[Mapping[str, Array]] = field(default_factory=list)
    chosen: list[Array] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    illegal: int = 0
    result: Result = field(default_factory=lambda: Result(status="crashed"))
    schedule: tuple[Any, ...] = ()

    @property
    def gain(self) -> float:
        """Return the speed-up, 1 for what gave no result: the module without a schedule runs."""
        return self.result.gain if self.result.status == "ok" else 1.0


def play(
    act: Act,
    env: ScheduleEnv,
    problems: Sequence[int],
    layout: Layout,
    *,
    greedy: bool = False,
    measured: bool = True,
    done: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Return an episode of each problem, by its number in the environment `env`.

    All of them move together, so that a step of all is one batch; `done` is called after each
    measurement. Nothing but torch's random numbers is drawn, and with `greedy` none. Without
    `measured` their results are those of `Episode()`.
    """
    episodes = [Episode(problem) for problem in problems]
    # Copies share what does not change; `reset` makes the rest.
    envs = [copy.copy(env) for _ in episodes]
    states = [
        one.reset(seed=0, options={"problem": episode.problem, "measured": measured})
        for one, episode in zip(envs, episodes, strict=True)
    ]
    going = list(range(len(episodes)))
    while going:
        seen = [states[number][0] for number in going]
        allowed = [states[number][1]["action_mask"] for number in going]
        chosen, logp, values = _decide(act, seen, allowed, layout, greedy)
        still = []
        for place, number in enumerate(going):
            episode = episodes[number]
            observation, reward, over, _, info = envs[number].step(chosen[place])
            episode.seen.append(seen[place])
            episode.masks.append(allowed[place])
            episode.chosen.append(chosen[place])
            episode.logp.append(logp[place])
            episode.values.append(values[place])
            episode.rewards.append(reward)
            episode.illegal += info["illegal"]
            states[number] = (observation, info)
            if over:
                episode.schedule = info["schedule"]
                if measured:
                    episode.result = info["result"]
                    done()
            else:
                still.append(number)
        going = still
    return episodes


def play_new_schedules(
    act: Act,
    env: ScheduleEnv,
    problems: Sequence[int],
    layout: Layout,
    was_played: Callable[[int, tuple[Any, ...]], bool],
    redraws: int,
    done: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Return episodes as `play` does, of new schedules where they can be drawn.

    One that `was_played`, or is like another of these episodes, is drawn again before anything is
    measured, at most `redraws` times. What is still known or equal then is measured nevertheless.
    """
    drawn = play(act, env, problems, layout, measured=False)
    for _ in range(redraws):
        met: set[tuple[int, tuple[Any, ...]]] = set()
        old = []
        for place, one in enumerate(drawn):
            if was_played(one.problem, one.schedule) or (one.problem, one.schedule) in met:
                old.append(place)
            met.add((one.problem, one.schedule))
        if not old:
            break
        fresh = play(act, env, [problems[place] for place in old], layout, measured=False)
        for place, one in zip(old, fresh, strict=True):
            drawn[place] = one
    for one in drawn:
        one.result = env.measure(env.problems[one.problem], one.schedule)
        one.rewards[-1] = reward(one.result)
        done()
    return drawn


def again(env: ScheduleEnv, problem: int, chosen: Sequence[Array], weight: float) -> Episode:
    """Return an episode of actions that were taken before, without a measurement.

    Its last reward is `weight`, and it has no probabilities and values.
    """
    episode, own = Episode(problem), copy.copy(env)
    observation, info = own.reset(seed=0, options={"problem": problem, "measured": False})
    for action in chosen:
        episode.seen.append(observation)
        episode.masks.append(info["action_mask"])
        episode.chosen.append(action)
        episode.rewards.append(0.0)
        observation, _, _, _, info = own.step(action)
    episode.rewards[-1] = weight
    return episode


def _decide(
    act: Act,
    seen: Sequence[Mapping[str, Array]],
    allowed: Sequence[Mapping[str, Array]],
    layout: Layout,
    greedy: bool,
) -> tuple[Array, list[float], list[float]]:
    masks = actions.masks_of(allowed)
    outputs = {
        name: value.cpu() for name, value in act(batch_of(embeddings.batch(seen), masks)).items()
    }
    scores = Scores(*(outputs[name] for name in Scores._fields))
    chosen = actions.choose(scores, masks, layout, greedy=greedy)
    judged = actions.evaluate(scores, masks, chosen, layout)
    return chosen.numpy(), judged.logp.tolist(), outputs["value"].tolist()
