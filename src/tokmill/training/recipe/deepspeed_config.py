"""The settings that DeepSpeed gets: the table `[engine.deepspeed]`, and what the recipe decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokmill.errors import UsageError

FILE = "ds_config.json"
"""Where a run keeps them."""
STAGE = 2
"""Of ZeRO, where the table names none: gradients and moments are split, weights are not."""
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
"""Keys of DeepSpeed that other keys of the recipe stand for."""
BUCKET = 500_000_000
"""Gradients that DeepSpeed exchanges at a time by default."""


def check_table(table: Mapping[str, Any], where: str = "") -> None:
    """Refuse settings that the recipe decides elsewhere, and a stage that there is not."""
    for key in table:
        if key in DECIDED:
            raise UsageError(
                f"engine.deepspeed.{key}: {DECIDED[key]} says this, for every engine",
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


def settings(table: Mapping[str, Any], clip: float, weights: int) -> dict[str, Any]:
    """Return all settings: `clip` is the largest norm of the gradient, `weights` their number."""
    stage = stage_of(table)
    made: dict[str, Any] = {
        # The engine says at each micro-batch whether it is the last one, and divides the loss.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # AdamW is torch's, with the groups of the task: DeepSpeed would compile one of its own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Stage 0 reports no norm in float32, so there the engine measures and clips.
        "gradient_clipping": clip if stage else 0.0,
        **table,
    }
    # A bucket is memory that is taken at once, 2 GB by default.
    zero = {"stage": stage, "reduce_bucket_size": max(1, min(BUCKET, weights))}
    made["zero_optimization"] = zero | dict(table.get("zero_optimization", {}))
    return made
