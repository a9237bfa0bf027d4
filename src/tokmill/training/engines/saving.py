"""Files of weights and moments: whole tensors by name in float32, the same for every engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from tokmill.base.errors import TokmillError
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.precision import Precision
from tokmill.training.engines.optimisers.average import AVERAGE, Average
from tokmill.training.engines.optimisers.optim import STEP
from tokmill.training.engines.tensors import read_tensors, write_tensors

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


class Saved:
    """Writes and reads the tensors of an engine; `_whole` and `_part` are for split tensors."""

    rank: int
    task: Task
    optimizer: torch.optim.Optimizer
    precision: Precision
    average: Average | None = None
    shapes: dict[str, torch.Size]
    """Shapes of all weights and buffers, by name."""
    names: list[str]
    """Names of the weights that are trained."""
    parameters: list[nn.Parameter]
    """Those weights, in the same order."""
    kept: dict[str, tuple[str, ...]]
    """Name of a weight → names of the states that the optimiser keeps of it."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context in which the average is in the place of the weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights by name."""
        return {name: self._whole(value) for name, value in self.task.state_dict().items()}

    def moments(self) -> dict[str, Tensor]:
        """Return the optimiser's state by its kind and the name of the weight."""
        name_of = dict(zip(map(id, self.parameters), self.names, strict=True))
        return {
            f"{key}.{name_of[id(parameter)]}": self._whole(value)
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }

    def save(self, folder: Path) -> dict[str, str]:
        """Write weights, each parameter's moments, and the average; return file → digest."""
        digests: dict[str, str] = {}
        # One after the other, so that they are not in memory together.
        for file, gathered in ((MODEL, self.weights), (OPTIMIZER, self.moments)):
            tensors = gathered()
            if self.rank == 0:
                digests[file] = write_tensors(folder / file, tensors)
        if self.average:
            with self.averaged():
                tensors = self.weights()
                if self.rank == 0:
                    said = self.average.metadata()
                    digests[AVERAGE] = write_tensors(folder / AVERAGE, tensors, said)
        return digests | self.precision.save(folder) if self.rank == 0 else {}

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        self._set_weights(read_weights(folder / MODEL, self.shapes))
        self._set_moments(self._read_moments(folder / OPTIMIZER))
        if self.average:
            with self.averaged():
                self._set_weights(read_weights(folder / AVERAGE, self.shapes))
            self.average.load(folder / AVERAGE)
        self.precision.load(folder)

    def _read_moments(self, path: Path) -> dict[str, dict[str, Tensor]]:
        """Return weight → kind → moment; a weight has either all kinds of moments, or none."""
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in read_tensors(path).items():
            kind, _, name = key.partition(".")
            wanted = () if kind == STEP else self.shapes.get(name)
            if kind not in self.kept.get(name, ()) or value.shape != wanted:
                raise _unfit(path, key)
            state.setdefault(name, {})[kind] = value
        for name, kinds in state.items():
            if kinds.keys() != {*self.kept[name]}:
                raise _unfit(path, name)
        return state

    def _whole(self, value: Tensor) -> Tensor:
        """Return a whole weight or moment, of which this process may hold only a part."""
        return value

    def _part(self, value: Tensor, like: Tensor) -> Tensor:
        """Return this process's part of a weight or moment; `like`: the weight."""
        return value

    def _parts(self) -> list[Tensor]:
        """Return what this process holds of the weights that are trained."""
        return [weight.detach() for weight in self.parameters]

    def _swap(self) -> None:
        """Swap weights and average."""
        assert self.average is not None
        self.average.swap()

    def _set_weights(self, tensors: dict[str, Tensor]) -> None:
        own = self.task.state_dict()
        self.task.load_state_dict(
            {name: self._part(value, own[name]) for name, value in tensors.items()}
        )

    def _set_moments(self, state: dict[str, dict[str, Tensor]]) -> None:
        name_of = dict(zip(map(id, self.parameters), self.names, strict=True))
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        known = {
            number: {
                kind: self._part(value, parameter)
                for kind, value in state[name_of[id(parameter)]].items()
            }
            for number, parameter in enumerate(ordered)
            if name_of[id(parameter)] in state
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": known, "param_groups": groups})


def shapes_of(task: Task) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in task.state_dict().items()}


def load_weights(task: Task, path: Path, seal: str = "") -> None:
    """Read weights into a task; names and shapes must be equal. `seal`: as in `read_tensors`."""
    task.load_state_dict(read_weights(path, shapes_of(task), seal))


def read_weights(path: Path, shapes: Mapping[str, torch.Size], seal: str = "") -> dict[str, Tensor]:
    tensors = read_tensors(path, seal)
    for name in shapes.keys() | tensors.keys():
        if name not in shapes or name not in tensors or shapes[name] != tensors[name].shape:
            raise _unfit(path, name)
    return tensors


def _unfit(path: Path, name: str) -> TokmillError:
    return TokmillError(
        f"the tensor {name!r} does not fit the model of the recipe",
        where=str(path),
        hint="the file belongs to another recipe, or another version of tokmill made it",
    )
