"""Which keys of a recipe may change when a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokmill.training.recipe.config import TrainConfig

FREE = {
    "data.train", "data.val", "data.verify", "run.device", "run.log_every", "run.eval_every",
    "run.eval_rows", "run.checkpoint_every", "run.keep", "run.max_time", "run.prefetch",
    "run.best", "run.track", "run.peak_flops", "run.recompute", "run.engine", "run.over_memory",
}  # fmt: skip
"""Keys that may change on `--resume`, because they do not decide the weights. The content of
`data.train` is checked by its fingerprint; another device changes only rounding, and is
reported."""

ENGINE = "engine."
"""Keys with this prefix (settings of engines) may change too."""

RATE = {
    "run.steps", "run.epochs",
    "optim.lr", "optim.schedule", "optim.warmup", "optim.warmup_share", "optim.decay",
    "optim.floor",
}  # fmt: skip
"""Keys that decide only the learning rates: they may change on `--resume` if the steps that are
done had the same rates."""


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one: {"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat.update(flatten(inner, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def is_free(key: str) -> bool:
    """Say whether a key may change on `--resume`."""
    return key in FREE or key.startswith(ENGINE)


def differences(before: Mapping[str, Any], after: TrainConfig) -> dict[str, str]:
    """Return key → "old → new" for the keys that decide the weights and differ."""
    # `before` was read from JSON, which turns tuples into lists.
    old, new = flatten(before), flatten(msgspec.json.decode(msgspec.json.encode(after)))
    return {
        key: f"{old.get(key)!r} → {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if not is_free(key) and old.get(key) != new.get(key)
    }
