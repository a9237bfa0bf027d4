"""Several processes that share each step, through DeepSpeed: ZeRO, stages 0 to 3.

Stage 1 splits the moments over the processes, 2 the gradients too, 3 also the weights (Rajbhandari
et al. 2020, "ZeRO"). Other settings of DeepSpeed come from the table `[engine.deepspeed]`. Its own
checkpoints are not used: weights and moments are gathered by name into the files that every engine
writes.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.models.model import Tensors
from tokmill.store.manifest import encode
from tokmill.tasks.task import Task
from tokmill.training.engines.devices.device import Precision, moved, pick_device
from tokmill.training.engines.engine import Learner, Pull
from tokmill.training.engines.optimisers.optim import STEP
from tokmill.training.engines.several import Several, peers
from tokmill.training.launch import one_error_per_machine, place
from tokmill.training.recipe.config import EngineConfig, OptimConfig, RunConfig
from tokmill.training.recipe.deepspeed_config import FILE, all_settings, stage_of


class DeepSpeed(Several):
    """One of `world` processes; `stage` says what each of them holds."""

    name = "deepspeed"
    model: Any = None
    """DeepSpeed's engine, around the task."""

    def __init__(self, config: RunConfig, settings: EngineConfig | None = None) -> None:
        table = (settings or EngineConfig()).deepspeed
        if config.compile:
            raise UsageError(
                "DeepSpeed replaces the blocks that would be compiled",
                where="run.compile",
                hint="--engine ddp, or --set run.compile=false",
            )
        with one_error_per_machine():
            self.package = load_deepspeed(pick_device(config.device, place()))
        self.table, self.stage = table, stage_of(table)
        super().__init__(config, settings)

    def prepare(self, task: Task, optim: OptimConfig) -> None:
        super().prepare(task, optim)
        self.weights_of = dict(task.named_parameters())
        settings = all_settings(self.table, optim.clip, sum(p.numel() for p in self.parameters))
        self.files = {FILE: encode(settings)}
        with peers(), quiet(), refusals():
            # DeepSpeed prints a warning on stdout for classes that are not torch's. Optimisers that
            # do not work with it were refused before (`check_optimizer`).
            supported = plugins.require("deepspeed.runtime.zero.utils").ZERO_SUPPORTED_OPTIMIZERS
            if type(self.optimizer) not in supported:
                supported.append(type(self.optimizer))
            self.model, *_ = self.package.initialize(
                model=self.learner,
                optimizer=self.optimizer,
                config=settings,
                dist_init_required=False,
            )
        if self.stage:
            self._make_moments()

    def micro(
        self, batch: Tensors, last: bool, scale: float, pull: Pull | None = None
    ) -> dict[str, Tensor]:
        with peers():
            self.model.train()
            self.model.set_gradient_accumulation_boundary(last)
            loss, sums = self._loss(self.model, batch, pull)
            # DeepSpeed divides by the number of processes.
            self.model.backward(loss * (scale * self.world), scale_wrt_gas=False)
        return sums

    def step(self, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        with peers():
            if self.stage == 0:
                norm = self._clip()
                if math.isfinite(norm):
                    self.model.step()
                return norm
            # It skips the update if the norm is not finite.
            self.model.step()
            return float(self.model.get_global_grad_norm())

    def bad_gradients(self) -> list[str]:
        """Return the weights whose gradient is not finite; from stage 1 on, gradients are gone."""
        return super().bad_gradients() if self.stage == 0 else []

    def evaluate(self, batch: Tensors) -> dict[str, Tensor]:
        self.model.eval()
        with torch.no_grad(), peers():
            return dict(self._forward(self.model, batch)[1])

    def act(self, batch: Tensors, train: bool = False) -> dict[str, Tensor]:
        self.model.train(train)
        with torch.no_grad(), peers():
            return dict(self._forward(self.model, batch, act=True))

    def weights(self) -> dict[str, Tensor]:
        tensors = self.task.state_dict()
        with peers():
            for name, weight in self.weights_of.items():
                tensors[name] = self._kept(self._gathered(weight))
        return tensors

    def moments(self) -> dict[str, Tensor]:
        if self.stage == 0:
            return super().moments()
        moments = {}
        state: dict[str, Tensor] = next(iter(self.optimizer.state.values()), {})
        with peers():
            for name, weight in zip(self.names, self.parameters, strict=True):
                for kind, value in state.items():
                    if kind != STEP:
                        value = self.package.utils.safe_get_full_optimizer_state(weight, kind)
                    moments[f"{kind}.{name}"] = self._kept(value)
        return moments

    def _place(self, task: Task) -> None:
        super()._place(task)
        self.learner = Precise(task, self.precision)

    def _forward(self, module: nn.Module, batch: Tensors, act: bool = False) -> Any:
        return module(moved(batch, self.device), act)

    def _kept(self, value: Tensor) -> Tensor:
        """Keep a gathered tensor on rank 0 only, in CPU memory."""
        return value.detach().cpu() if self.rank == 0 else value.new_empty(0)

    def _gathered(self, weight: nn.Parameter) -> Tensor:
        if self.stage and weight.requires_grad:
            return self.package.utils.safe_get_full_fp32_param(weight)
        if self.stage < 3:
            return weight.float()
        with self.package.zero.GatheredParameters([weight]):
            return weight.detach().float().clone()

    def _set_weights(self, tensors: dict[str, Tensor]) -> None:
        buffers = {n: value for n, value in tensors.items() if n not in self.weights_of}
        self.task.load_state_dict(buffers, strict=False)
        with peers(), torch.no_grad():
            for name, weight in self.weights_of.items():
                value = tensors[name].to(self.device)
                with self._whole_weight(weight):
                    weight.copy_(value)
                if self.stage and weight.requires_grad:
                    self._set_part(weight, value)

    def _set_moments(self, state: dict[str, dict[str, Tensor]]) -> None:
        if self.stage == 0:
            super()._set_moments(state)
            return
        steps = [moments[STEP] for moments in state.values()]
        with peers():
            for name, weight in zip(self.names, self.parameters, strict=True):
                for kind, value in state.get(name, {}).items():
                    if kind != STEP:
                        self._set_part(weight, value.to(self.device), kind)
        for own in self.optimizer.state.values():
            own[STEP].fill_(max(steps, default=0))

    def _make_moments(self) -> None:
        """Make the moments that AdamW would make in its first step.

        DeepSpeed connects moments and weights when the first of several groups has moments, and
        would never find those of the other groups.
        """
        zero = self.model.optimizer
        parts = (
            zero.single_partition_of_fp32_groups
            if self.stage < 3
            else zero.fp32_partitioned_groups_flat
        )
        for part in parts:
            self.optimizer.state[part] = {
                STEP: torch.zeros((), dtype=torch.float32, device=part.device),
                "exp_avg": torch.zeros_like(part),
                "exp_avg_sq": torch.zeros_like(part),
            }
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()

    def _whole_weight(self, weight: nn.Parameter) -> contextlib.AbstractContextManager[None]:
        """Gather a split weight; rank 0's changes to it are kept."""
        if self.stage < 3:
            return contextlib.nullcontext()
        return self.package.zero.GatheredParameters([weight], modifier_rank=0)

    def _set_part(self, weight: nn.Parameter, value: Tensor, kind: str = "") -> None:
        """Copy this process's part of a whole tensor into the optimiser's part."""
        tools = self.package.utils
        if self.stage < 3:
            if kind:
                tools.safe_set_full_optimizer_state(weight, value, kind)
            else:
                tools.safe_set_full_fp32_param(weight, value)
            return
        # Stage 3 pads the last part, but its setters for whole tensors do not.
        split: Any = weight
        size = split.ds_tensor.numel()
        padded = value.new_zeros(size * self.world)
        padded[: value.numel()] = value.flatten()
        part = padded[size * self.rank : size * (self.rank + 1)]
        if kind:
            tools.safe_set_local_optimizer_state(weight, part, kind)
        else:
            tools.safe_set_local_fp32_param(weight, part)

    def _part_ways(self) -> None:
        """End the groups of processes; else DeepSpeed would use them in the next training."""
        if self.model is not None:
            self.model.destroy()
        super()._part_ways()
        self.package.utils.groups._release_process_group_references()


class Precise(Learner):
    """A task with its own autocast: DeepSpeed switches off one that is entered outside."""

    def __init__(self, task: Task, precision: Precision) -> None:
        super().__init__(task)
        self.precision = precision

    def forward(self, batch: Tensors, act: bool = False) -> Any:
        with self.precision.autocast():
            return super().forward(batch, act)


def load_deepspeed(device: torch.device) -> Any:
    # Otherwise DeepSpeed looks for accelerators itself, and prints the result.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # It needs this variable even in a single process.
    os.environ.setdefault("LOCAL_RANK", str(place().local_rank))
    # What it compiles to see what there is would be linked with files of the working directory.
    with quiet(), contextlib.chdir("/"):
        package = plugins.require("deepspeed")
        # On a CPU it compiles an operation for messages through shared memory. That takes half a
        # minute, and fails without a compiler. Without this operation it uses gloo.
        ops = plugins.require("deepspeed.ops")
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Its steps call deprecated names too.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return package


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings about names of torch that are going away."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn DeepSpeed's errors about settings into `UsageError`."""
    own = (plugins.require("deepspeed.runtime.config").DeepSpeedConfigError,)
    try:
        yield
    except (*own, ValueError, AssertionError, NotImplementedError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UsageError(
            f"DeepSpeed refuses its settings: {'; '.join(lines[:3]) or type(error).__name__}",
            where="engine.deepspeed",
            hint="its documentation lists the keys: https://www.deepspeed.ai/docs/config-json",
        ) from error
