"""Schedules of modules as a task: a policy acts in `mlir.env`, and PPO makes it better.

A training remembers of each module how its rewards are, and its best schedules.
Few evaluations find few good schedules, and PPO forgets them after a step. So the best ones are
imitated again and again, as much as they are better than the mean of their module (as in
self-imitation learning, Oh et al., 2018).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokmill.base.errors import UsageError
from tokmill.mlir.space import LOOPS
from tokmill.models.model import Group, Inputs, Tensors, decay_groups
from tokmill.rl import actions, ppo
from tokmill.rl.actions import Layout, Masks, Scores
from tokmill.rl.embedding.pretrained import take_encoder
from tokmill.rl.policy import ALLOWED, SEEN, Heads, Policy
from tokmill.tasks.measures import Measures
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import Facts

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
        self._digests: dict[str, set[str]] = {}
        """Digests of all schedules."""

    def see(
        self, module: str, reward: float, chosen: list[Array], schedule: tuple[Any, ...]
    ) -> None:
        """Take the reward of an episode, its actions (`ScheduleEnv`) and their schedule."""
        self._digests.setdefault(module, set()).add(_digest(schedule))
        count, mean = self._means.get(module, (0.0, 0.0))
        mean += (reward - mean) * max(1 / (count + 1), LEAST)
        self._means[module] = [count + 1, mean]
        actions = [[int(one) for one in row] for row in chosen]
        kept = self._best.setdefault(module, [])
        if all(actions != earlier for _, earlier in kept):
            kept.append((float(reward), actions))
            kept.sort(key=lambda one: -one[0])
            del kept[self.most :]

    def knows(self, module: str, schedule: tuple[Any, ...]) -> bool:
        return _digest(schedule) in self._digests.get(module, ())

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
        return {
            "means": {name: list(one) for name, one in self._means.items()},
            "best": {
                name: [[reward, actions] for reward, actions in kept]
                for name, kept in self._best.items()
            },
            "known": {name: sorted(digests) for name, digests in self._digests.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._means = {name: list(one) for name, one in state["means"].items()}
        self._best = {
            name: [(float(reward), [list(map(int, row)) for row in actions])
                   for reward, actions in kept]
            for name, kept in state["best"].items()
        }  # fmt: skip
        self._digests = {name: set(digests) for name, digests in state["known"].items()}


def _digest(schedule: tuple[Any, ...]) -> str:
    return hashlib.blake2b(repr(schedule).encode(), digest_size=8).hexdigest()


NUMBERS = ("advantage", "target", "logp", "acts", "judges", "imitates")
"""Each move's advantage, the return that the value learns, its old log-probability, and how
much it counts for the policy, for the value, and as one to imitate."""


class SchedulesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Modules, PPO, and how schedules are measured."""

    kind: Literal["schedules"] = "schedules"
    modules: tuple[str, ...] = ()
    """Sizes of modules to learn from, such as "matmul 64 64 64, relu"."""
    benchmarks_folder_path: str = ""
    """A folder of .mlir files to learn from."""
    held_out: tuple[str, ...] = ()
    """Sizes of modules that are measured and never learned from."""
    held_out_folder_path: str = ""
    """A folder of .mlir files that are measured and never learned from."""
    bench_count: int = 16
    """Episodes a step: modules that are scheduled and measured."""
    ppo_batch_size: int = 64
    """Moves of an update of the policy."""
    value_batch_size: int = 0
    """Moves of an update of the value alone, after those of the policy; 0: the value learns with
    the policy only."""
    ppo_epochs: int = 4
    """Passes over the moves of a step."""
    value_epochs: int = 1
    """Passes of the value alone, if value_batch_size is not 0."""
    gamma: float = 1.0
    """Discount of rewards."""
    gae_lambda: float = 0.95
    """How far advantages look ahead."""
    clip: float = 0.2
    """Largest change of a probability's ratio that is learned from."""
    value_coef: float = 0.5
    """Weight of the value's loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy."""
    entropy_floor: float = 0.1
    """Share of the largest possible entropy below which its weight grows; half of it: an alarm."""
    imitation_coef: float = 0.0
    """Weight of imitating the best schedules so far; 0: none."""
    imitated: int = 4
    """How many schedules of each module are kept to be imitated."""
    redraws: int = 0
    """How often a schedule that was measured before is drawn again, before it is measured again."""
    max_kl: float = 0.05
    """Divergence from the policy that acted at which the passes of a step end; 0: they never do."""
    cache: str = ""
    """A file of measurements, which several runs may share; "": one in the run's folder."""
    runs: int = 5
    """Runs of each schedule; the minimum time counts."""
    seconds: float = 30.0
    """Seconds that compiling one schedule may take; those of its runs are added."""
    most_seconds: float = 2.0
    """CPU seconds after which no further run is begun."""
    memory_mb: int = 4096
    """MiB that a schedule may take."""

    @property
    def length(self) -> int:
        """Return 1: a row is one observation."""
        return 1

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "bench_count": 1, "ppo_batch_size": 1, "value_batch_size": 0, "ppo_epochs": 1,
            "value_epochs": 0, "gamma": 0, "gae_lambda": 0, "clip": 0, "value_coef": 0,
            "entropy_coef": 0, "entropy_floor": 0, "max_kl": 0, "runs": 1, "seconds": 1,
            "most_seconds": 0, "memory_mb": 256, "imitation_coef": 0, "imitated": 1,
            "redraws": 0,
        }  # fmt: skip
        most = {"gamma": 1.0, "gae_lambda": 1.0, "entropy_floor": 1.0, "bench_count": 1 << 20}
        for name, low in least.items():
            value, high = getattr(self, name), most.get(name, 1e9)
            if not low <= value <= high:
                raise UsageError(
                    f"task.{name}: {value} is not from {low:,.15g} to {high:,.15g}",
                    hint=f"--set task.{name}={getattr(type(self)(), name)} is the default",
                )


class Schedules(Task):
    """The heads of a policy, and the loss of PPO."""

    Config = SchedulesConfig
    loop = "schedules"
    runs_without_numbers: ClassVar[bool] = False
    model: Policy

    def __init__(self, config: SchedulesConfig, model: Any, inputs: Inputs) -> None:
        if not isinstance(model, Policy):
            raise UsageError(
                "the task schedules needs a policy",
                where="model.kind",
                hint="--set model.kind=policy",
            )
        super().__init__(config, model, inputs)
        self.layout = Layout(LOOPS.kinds, LOOPS.parts, model.config.loops, len(LOOPS.sizes))
        self.heads = Heads(model.dim, self.layout)
        self.entropy = ppo.Entropy(config.entropy_coef, config.entropy_floor)
        self.best: dict[str, Any] = {}
        """Module → the best schedule so far: its text, and its gain by one measurement."""
        self.memory = Memory(config.imitated)

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        # Other models are made of it too; then `__init__` says what is wrong.
        return Inputs(made={"operation": 1})

    @classmethod
    def measures(cls, config: Any, inputs: Inputs) -> Measures:
        return Measures(higher=("speedup", "reward", "entropy", "best_speedup"))

    def train(self, mode: bool = True) -> Self:
        """Never drop values: PPO compares the policy with the one that acted."""
        super().train(mode)
        for part in self.modules():
            # cuDNN's LSTM goes backward in training alone.
            part.training = mode and isinstance(part, nn.RNNBase)
        return self

    def param_groups(self, weight_decay: float) -> list[Group]:
        return decay_groups(self.parameters(), weight_decay)

    def flops_per_token(self, length: int) -> float:
        return 6.0 * self.parameter_count()

    def example(self, rows: int) -> Tensors:
        seen = {
            name: torch.zeros((rows, *space.shape), dtype=getattr(torch, space.dtype.name))
            for name, space in self.model.spaces.items()
        }
        if "mask" in seen:
            seen["mask"] += 1
        layout = self.layout
        kinds = len(layout.kinds)
        shapes = ((kinds,), (kinds, layout.loops, layout.tiles), (layout.loops,))
        masks = Masks(*(torch.ones(rows, *shape, dtype=torch.bool) for shape in shapes))
        batch = batch_of(seen, masks)
        batch.targets["action"] = torch.zeros(rows, layout.width, dtype=torch.int64)
        batch.values |= {name: torch.zeros(rows) for name in NUMBERS}
        batch.values |= {name: torch.ones(rows) for name in ("acts", "judges")}
        return batch

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        """Return the scores of all parts of an action, and the value (B,)."""
        scores, value = self.heads(self.model(batch)[:, 0])
        return {**scores._asdict(), "value": value}

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of PPO, and of imitation: each row counts as `NUMBERS` say."""
        config, values = self.config, batch.values
        results = self.act(batch)
        scores = Scores(*(results[name] for name in Scores._fields))
        masks = Masks(*(values[ALLOWED + name] for name in Masks._fields))
        judged = actions.evaluate(scores, masks, batch.targets["action"], self.layout)
        acts = values["acts"]
        losses = ppo.clipped_loss(
            torch.where(acts > 0, judged.logp, values["logp"]),
            values["logp"],
            values["advantage"] * acts,
            torch.where(values["judges"] > 0, results["value"], values["target"]),
            values["target"],
            config.clip,
        )
        entropy = (judged.entropy * acts).sum()
        imitation = -(judged.logp * values["imitates"]).sum()
        loss = losses.policy + config.value_coef * losses.value - self.entropy.now * entropy
        loss = loss + config.imitation_coef * imitation
        return loss, {
            "loss": loss.detach(),
            "policy_loss": losses.policy.detach(),
            "value_loss": losses.value.detach(),
            "imitation_loss": imitation.detach(),
            "entropy": entropy.detach(),
            "most_entropy": (judged.most * acts).sum().detach(),
            "kl": losses.kl,
            "clipped": losses.clipped,
        }

    def report(
        self, sums: Mapping[str, float], count: float, bytes_per_token: float = 0.0
    ) -> dict[str, float]:
        return dict(sums)

    def start_from(self, place: Path) -> list[str] | None:
        return take_encoder(self.model.embedding, place)

    def extra_state(self) -> dict[str, Any]:
        return {"best": {name: dict(one) for name, one in self.best.items()},
                "entropy": self.entropy.state(), "memory": self.memory.state()}  # fmt: skip

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.best = {name: dict(one) for name, one in state["best"].items()}
        self.entropy.load(state["entropy"])
        self.memory.load(state["memory"])


def batch_of(seen: Mapping[str, Tensor], masks: Masks) -> Tensors:
    """Return what a policy sees of some operations, and what is allowed."""
    values = {SEEN + name: value for name, value in seen.items()}
    values |= {ALLOWED + name: value for name, value in masks._asdict().items()}
    rows = torch.zeros(len(masks.kind), 1, dtype=torch.int64)
    return Tensors({}, rows, rows, whole=True, values=values, entry=torch.arange(len(masks.kind)))
