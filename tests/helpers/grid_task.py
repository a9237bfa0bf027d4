"""An environment without a store: a walk along cells, whose last one is to be reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.models.model import Group, Inputs, Tensors
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import Facts
from tokmill.training.data import Micro

CELLS, ACTIONS = 6, 2


class GridConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the walk is learned."""

    kind: Literal["grid"] = "grid"
    length: int = 1
    walkers: int = 8
    """Walks side by side in each process."""
    moves: int = 6
    """Moves of each walker a step of the training."""


class Grid(Task):
    """REINFORCE: moves with more reward than usual become more likely."""

    Config = GridConfig
    loop = "grid"

    def __init__(self, config: GridConfig, model: Any, inputs: Inputs) -> None:
        super().__init__(config, model, inputs)
        self.policy = nn.Linear(model.dim, ACTIONS)
        nn.init.zeros_(self.policy.weight)
        self.at, self.moved = torch.zeros(config.walkers, dtype=torch.int64), 0
        self.config = config

    @classmethod
    def inputs(cls, config: Any, facts: Facts) -> Inputs:
        """The cell that a walker is in; nothing of a store."""
        return Inputs(made={"cell": CELLS})

    def param_groups(self, weight_decay: float) -> list[Group]:
        """With the head."""
        head = {"params": list(self.policy.parameters()), "weight_decay": 0.0, "lr_scale": 1.0}
        return [*super().param_groups(weight_decay), head]

    def example(self, rows: int) -> Tensors:
        """Walkers that have moved."""
        batch = seen(torch.zeros(rows, dtype=torch.int64))
        batch.targets["action"] = torch.zeros(rows, dtype=torch.int64)
        batch.values = dict.fromkeys(("reward", "advantage"), torch.zeros(rows))
        return batch

    def act(self, batch: Tensors) -> dict[str, Tensor]:
        """Logits of the actions, (B, ACTIONS)."""
        return {"logits": self.policy(self.model(batch)[:, 0])}

    def forward(self, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of actions that were taken."""
        logits = self.act(batch)["logits"].float()
        taken = torch.log_softmax(logits, -1).gather(1, batch.targets["action"][:, None])[:, 0]
        loss = -(taken * batch.values["advantage"]).sum()
        return loss, {"loss": loss.detach(), "reward": batch.values["reward"].sum()}

    def extra_state(self) -> dict[str, Any]:
        """Where the walkers are, and how far they have come."""
        return {"at": self.at.clone(), "moved": self.moved, "nested": {"list": [1, None]}}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        assert state["nested"] == {"list": [1, None]}
        self.at, self.moved = state["at"].clone(), int(state["moved"])


def seen(cells: Tensor) -> Tensors:
    """What the model sees of walkers in these cells."""
    ids = cells[:, None].clone()
    return Tensors({"cell": ids}, ids * 0, ids * 0, whole=True, entry=torch.arange(len(cells)))


class GridLoop:
    """A step is some moves of each walker, and an update from what they brought."""

    reads_stores = False
    notes = ()
    unit = "moves"
    evaluates = True
    environment: Mapping[str, Any] = {}

    def __init__(
        self, config: Any, task: Grid, stores: Any, facts: Facts, engine: Any, out: Any
    ) -> None:
        assert not stores and not facts.columns
        self.task, self.engine = task, engine

    @staticmethod
    def rows_a_step(config: Any, world: int) -> int:
        """Walkers are rows."""
        return int(config.task.walkers * world)

    @staticmethod
    def check(config: Any) -> Mapping[str, Any]:
        """There is nothing to read."""
        return {}

    @contextmanager
    def steps(self, steps: range) -> Iterator[None]:
        """There is nothing to open."""
        yield

    def next(self) -> tuple[float, float]:
        """How many moves there will be; nothing has moved yet."""
        moves = float(self.task.config.walkers * self.task.config.moves)
        return moves, moves

    def learn(self, session: Any, total: int) -> tuple[dict[str, float], int]:
        """Move, then learn from it twice."""
        task = self.task
        cells, actions, rewards = [], [], []
        for _ in range(task.config.moves):
            logits = self.engine.act(seen(task.at))["logits"]
            action = torch.multinomial(torch.softmax(logits, -1), 1)[:, 0]
            cells.append(task.at)
            actions.append(action)
            there = (task.at + 2 * action - 1).clamp(0, CELLS - 1)
            reward = (there == CELLS - 1).float() - 0.1
            task.at = torch.where(there == CELLS - 1, 0, there)
            rewards.append(reward)
            task.moved += len(action)
        batch, reward = seen(torch.cat(cells)), torch.cat(rewards)
        togo = torch.stack(rewards).flip(0).cumsum(0).flip(0).flatten()
        batch.targets["action"] = torch.cat(actions)
        batch.values = {"reward": reward, "advantage": togo - togo.mean()}
        micro = Micro(np.arange(len(reward)), batch)
        session.update([micro], total)
        return session.update([micro], total), total

    def not_finite(self, step: int, norm: float, losses: Sequence[Any]) -> TokmillError:
        """Say that it is so."""
        return TokmillError(f"step {step + 1}: the gradient's norm is {norm}", hint="--set lr=1e-3")

    def measure(self, quiet: bool) -> dict[str, float]:
        """Moves that the most likely actions take to the last cell; `loss` is that too."""
        cell, moves = torch.zeros(1, dtype=torch.int64), 0
        while int(cell) < CELLS - 1 and moves < 4 * CELLS:
            action = self.engine.act(seen(cell))["logits"].argmax(-1)
            cell, moves = (cell + 2 * action - 1).clamp(0, CELLS - 1), moves + 1
        return {"loss": float(moves)}


TASK = plugins.Part("grid_task:Grid", "train", "a walk along cells")
LOOP = plugins.Part("grid_task:GridLoop", "train", "moves of walkers")
