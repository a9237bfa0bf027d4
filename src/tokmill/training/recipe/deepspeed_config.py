"""DeepSpeed's settings: the table `[engine.deepspeed]`, and those that other keys decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokmill.errors import UsageError

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
    stage: int = table.get("zero_optimization", {}).get("stage", STAGE)
    return stage


def all_settings(table: Mapping[str, Any], clip: float, weights: int) -> dict[str, Any]:
    """Return all settings. `clip`: largest norm of the gradient; `weights`: number of weights."""
    stage = stage_of(table)
    made: dict[str, Any] = {
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
    made["zero_optimization"] = zero | dict(table.get("zero_optimization", {}))
    return made
