"""DeepSpeed's settings: the table `[engine.deepspeed]`, what other keys decide, and its file."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokmill import plugins
from tokmill.base.errors import UsageError, nearest
from tokmill.training.recipe.config import DataConfig, kinds_of
from tokmill.training.recipe.read_recipe import flatten
from tokmill.training.recipe.settings import tell

FILE = "ds_config.json"
"""File of a run that keeps them."""
STAGE = 2
"""Default stage of ZeRO: gradients and moments are split, weights are not."""
DECIDED = {
    "train_batch_size": "data.batch",
    "train_micro_batch_size_per_gpu": "run.micro_tokens",
    "gradient_accumulation_steps": "run.micro_tokens",
    "managed_gradient_accumulation": "run.micro_tokens",
    "gradient_clipping": "optim.clip",
    "optimizer": "the table [optim]",
    "scheduler": "optim.schedule",
    "fp16": "run.precision",
    "torch_autocast": "run.precision",
}
"""Key of DeepSpeed → the key of the recipe that decides it."""
HANDED = (
    "aio", "comms_logger", "communication_data_type", "compile", "csv_monitor",
    "data_types", "disable_allgather", "disable_python_gc", "dump_state", "flops_profiler",
    "gradient_allreduce_op", "gradient_predivide_factor", "log_level",
    "managed_gradient_accumulation", "memory_breakdown", "prescale_gradients",
    "seq_parallel_communication_data_type", "tensorboard", "timers", "torch_autocast",
    "wall_clock_breakdown", "wandb", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip
"""Names of DeepSpeed's file that become keys of `[engine.deepspeed]`, where some are refused."""
UNUSED = {
    "activation_checkpointing": "run.recompute",
    "autotuning": "run.micro_tokens",
    "checkpoint": "run.checkpoint_every",
    "data_efficiency": "the table [data]",
    **dict.fromkeys(("dataloader_drop_last", "dataloader_settings"), "the table [data]"),
    "logging": "run.log_every",
}
"""Names of DeepSpeed's file, or of scripts in it, without effect here → what has one."""
NAMES = {
    "bf16": (
        "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    ),
    "fp16": (
        "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window",
        "hysteresis", "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads",
    ),
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
}  # fmt: skip
"""Objects of DeepSpeed's file that it never sees here → their keys."""
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO = "auto"
"""A value that is decided elsewhere, as by the Trainer of transformers."""
ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
OPTIONS = ("adam_w_mode", "amsgrad", "bias_correction", "foreach", "set_grad_none", "torch_adam")
ONLY = {
    "adam_w_mode": True, "amsgrad": False, "bias_correction": True, "last_batch_iteration": -1,
}  # fmt: skip
"""Arguments that have to have this value."""
WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "optimizer": dict.fromkeys(("AdamW", "Adam"), ADAM | dict.fromkeys(OPTIONS, AUTO)),
    "scheduler": {
        "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": AUTO, **WARMUP},
        "WarmupDecayLR": {
            "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "total_num_steps": AUTO, **WARMUP,
        },
        "WarmupCosineLR": {
            "warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4, "total_num_steps": AUTO, **WARMUP,
        },
    },
}  # fmt: skip
"""DeepSpeed's optimisers and schedules that are read → their arguments with defaults."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
RATES = {"warmup_max_lr": "lr", "warmup_num_steps": "warmup", "cos_min_ratio": "floor"}
BUCKET = 500_000_000
"""Values of gradients that DeepSpeed exchanges at a time by default."""


def check_table(table: Mapping[str, Any], where: str = "") -> None:
    """Refuse settings that other keys of the recipe decide, and an unknown stage."""
    for key in table:
        if key in DECIDED:
            raise UsageError(
                f"engine.deepspeed.{key}: {DECIDED[key]} decides this, for every engine",
                where=where,
                hint=f"leave it out, and set {DECIDED[key]}",
            )
    zero = table.get("zero_optimization", {})
    if not isinstance(zero, Mapping) or zero.get("stage", STAGE) not in (0, 1, 2, 3):
        raise UsageError(
            "engine.deepspeed.zero_optimization.stage: it is 0, 1, 2 or 3",
            where=where,
            hint="--set engine.deepspeed.zero_optimization.stage=2",
        )
    if not zero.get("compute_grad_norm", True):
        raise UsageError(
            "engine.deepspeed.zero_optimization.compute_grad_norm: a run records the norm",
            where=where,
            hint="leave it out",
        )
    bf16 = table.get("bf16", {})
    if stage_of(table) == 0 and isinstance(bf16, Mapping) and bf16.get("enabled"):
        raise UsageError(
            "engine.deepspeed.bf16: stage 0 of ZeRO keeps no float32 weights beside those in bf16",
            where=where,
            hint='--set run.precision="bf16", or a stage from 1 on',
        )


def stage_of(table: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO that settings ask for."""
    return table.get("zero_optimization", {}).get("stage", STAGE)


def all_settings(table: Mapping[str, Any], clip: float, weights: int) -> dict[str, Any]:
    """Return all settings. `clip`: largest norm of the gradient; `weights`: number of weights."""
    stage = stage_of(table)
    settings: dict[str, Any] = {
        # The engine marks the last micro-batch of a step itself, and divides the loss.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Torch's AdamW with the task's groups is used: DeepSpeed would compile its own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Stage 0 reports no norm in float32, so the engine measures and clips itself.
        "gradient_clipping": clip if stage else 0.0,
        **table,
    }
    # The memory of a bucket is allocated at once, 2 GB by default.
    zero = {"stage": stage, "reduce_bucket_size": max(1, min(BUCKET, weights))}
    settings["zero_optimization"] = zero | dict(table.get("zero_optimization", {}))
    return settings


def as_recipe(
    settings: Mapping[str, Any], whole: Mapping[str, Any], world: int, where: str
) -> dict[str, Any]:
    """Return DeepSpeed's own file as a recipe, and print on stderr what it says.

    What a recipe decides for every engine becomes keys of the recipe, the rest is
    `[engine.deepspeed]`; a value "auto" decides nothing.
    """
    names = (*HANDED, *UNUSED, *DECIDED, "bf16", "steps_per_print")
    _check_names(settings, names, where, "--set engine.deepspeed.NAME=… hands on any key")
    decided: dict[str, Any] = _decided(settings)
    optim, run = _rates(settings, where)
    data, micro = _batch(decided, whole, world, where)
    run |= micro
    if _of(whole, "run", "engine", AUTO) == AUTO:
        run["engine"] = "deepspeed"
    if "gradient_clipping" in decided:
        optim["clip"] = decided["gradient_clipping"]
    if "steps_per_print" in decided:
        run["log_every"] = decided["steps_per_print"]
    # DeepSpeed's default is stage 0, and that of a recipe is not.
    decided["zero_optimization"] = {"stage": 0} | _object(decided, "zero_optimization", where)
    unused = [f"{name} ({UNUSED[name]} has one)" for name in decided if name in UNUSED]
    for name in ("bf16", "fp16"):
        precision = _decided(_object(settings, name, where))
        if precision.pop("enabled", False):
            if name == "fp16":
                raise UsageError(
                    "fp16: matrix products are in fp32 or bf16",
                    where=where,
                    hint='"bf16": {"enabled": true} in its place',
                )
            run["precision"] = name
            unused += [f"{name}.{key}" for key in precision]
    table = {name: value for name, value in decided.items() if name in HANDED}
    recipe = {"run": run, "data": data, "optim": optim}
    keys = ", ".join(f"{key} = {value}" for key, value in flatten(recipe).items())
    tell(f"{where} is DeepSpeed's: {keys}; engine.deepspeed has {', '.join(table)}")
    if unused:
        tell(f"{where}: without effect here: {', '.join(unused)}")
    return {**recipe, "engine": {"deepspeed": table}}


def _decided(value: Any) -> Any:
    """Return nested dicts without the keys that are "auto"."""
    if not isinstance(value, dict):
        return value
    return {name: _decided(one) for name, one in value.items() if one != AUTO}


def _of(whole: Mapping[str, Any], table: str, key: str, default: Any) -> Any:
    """Return a key of a recipe that is not checked yet; of another type, its default."""
    keys = whole.get(table)
    value = keys.get(key) if isinstance(keys, Mapping) else None
    return value if isinstance(value, type(default)) else default


def _object(settings: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return an object of DeepSpeed's file; one that is not there, or "auto", is empty."""
    value = settings.get(name, AUTO)
    if value != AUTO and not isinstance(value, dict):
        raise UsageError(f"{name}: {value!r} is no object", where=where, hint=f'"{name}": {{…}}')
    if value != AUTO and name in NAMES:
        _check_names(value, NAMES[name], where, before=f"{name}.")
    return {} if value == AUTO else value


def _check_names(
    settings: Mapping[str, Any], names: Sequence[str], where: str, hint: str = "", before: str = ""
) -> None:
    for name in settings:
        if name not in names:
            raise UsageError(
                f"{before}{name}: DeepSpeed 0.19 has no such key",
                where=where,
                hint=nearest(name, names, hint),
            )


def _batch(
    given: Mapping[str, Any], whole: Mapping[str, Any], world: int, where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return keys of [data] and of [run]: the batch, and the rows of a micro-batch as tokens.

    The batch is micro-batch × accumulation × processes. As in DeepSpeed, two of them say the third.
    """
    for name in SIZES:
        if name in given and (type(given[name]) is not int or given[name] < 1):
            raise UsageError(
                f"{name}: {given[name]!r} is not a whole number above 0",
                where=where,
                hint=f'"{name}": 8',
            )
    batch, micro, steps = (given.get(name, 0) for name in SIZES)
    batch = batch or micro * (steps or 1) * world
    if not batch and not steps:
        return {}, {}
    batch = batch or _of(whole, "data", "batch", DataConfig().batch)
    data = {"batch": batch}
    if _of(whole, "data", "batch_tokens", 0):
        data["batch_tokens"] = 0
    if not micro and not steps:
        return data, {}
    micro = micro or batch // (steps * world)
    steps = steps or batch // (micro * world)
    if micro * steps * world != batch:
        processes, rest = divmod(batch, micro * steps or batch + 1)
        raise UsageError(
            f"a batch of {batch} rows is not {micro} rows × {steps} micro-batches × "
            f"{world} process{'es' if world > 1 else ''}",
            where=where,
            hint=f"{'' if rest else f'--processes {processes}, or '}take one of "
            f"{', '.join(SIZES)} out of the file",
        )
    task = plugins.load(plugins.TASKS, kinds_of(whole)["task"]).Config()
    return data, {"micro_tokens": micro * _of(whole, "task", "length", task.length)}


def _rates(settings: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    optim: dict[str, Any] = {}
    run: dict[str, Any] = {}
    kind, adam = _arguments(settings, "optimizer", where)
    if kind:
        optim = {"kind": "adamw", **{name: adam[name] for name in ADAM if name in adam}}
    kind, arguments = _arguments(settings, "scheduler", where)
    if kind:
        optim |= {key: arguments[name] for name, key in RATES.items() if name in arguments}
        optim["schedule"] = SCHEDULES[kind]
    if "total_num_steps" in arguments:
        run["steps"] = arguments["total_num_steps"]
    least = arguments.get("warmup_min_lr") or arguments.get("warmup_min_ratio")
    if kind and (least or arguments.get("warmup_type") == "log"):
        tell(f"{where}: the rate rises linearly from 0: warmup_type and warmup_min_… are not used")
    if kind == "WarmupDecayLR":
        most = arguments.get("warmup_max_lr")
        numbers = isinstance(least, int | float) and isinstance(most, int | float)
        optim["floor"] = least / most if numbers and most else 0.0
    return optim, run


def _arguments(settings: Mapping[str, Any], name: str, where: str) -> tuple[str, dict[str, Any]]:
    """Return the type and the arguments of `optimizer` or `scheduler`, without those that are auto.

    What is missing has DeepSpeed's default. Raises `UsageError` for what no recipe can say.
    """
    if not (block := _object(settings, name, where)):
        return "", {}
    kind, params = str(block.get("type")), _object(block, "params", where)
    defaults = ARGUMENTS[name].get(kind, {})
    wrong = [
        f"{one} = {value!r}"
        for one, value in params.items()
        if one not in defaults or value not in (AUTO, ONLY.get(one, value))
    ]
    if wrong or not defaults:
        raise UsageError(
            f"{name}: {', '.join([kind, *wrong])} cannot be read",
            where=where,
            hint=f"take it out, and set [optim]; {', '.join(ARGUMENTS[name])} can be read",
        )
    if params.get("torch_adam"):
        params = {"weight_decay": 0.01, **params}
    return kind, _decided(defaults | params)
