"""Recognise what tokmill itself writes: stores, their files, runs, checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.files import machine_errors
from tokmill.report.look import Facts, Look, shorten
from tokmill.store import manifest as layout
from tokmill.store.manifest import Manifest, Plan, Receipt
from tokmill.store.store import Store


def store(look: Look) -> Facts | None:
    """A token store, complete or partial."""
    if not any((look.path / name).exists() for name in ("manifest.json", "plan.json")):
        return None
    opened = Store(look.path)
    facts: Facts = {
        "kind": "store" if not opened.partial else "partial store",
        "what": "a token store"
        if not opened.partial
        else "a token store whose build has not finished; the figures are those of what is there",
        **_manifest_facts(opened.manifest),
    }
    if (look.path / "plan.json").exists():
        plan: Plan = layout.read_json(look.path / "plan.json", Plan)
        facts["recipe"] = plan.recipe
        facts["inputs"] = shorten(plan.roots)
        if opened.partial:
            facts["planned"] = {"shards": plan.shards, "input_bytes": plan.input_bytes}
    overlays = look.path / "overlays"
    if overlays.is_dir():
        facts["overlays"] = sorted(entry.name for entry in overlays.iterdir())
    if opened.partial:
        facts["next"] = "the same `tokmill build` continues it"
    else:
        facts["next"] = f"tokmill train {look.path} -o RUN"
    return facts


def run(look: Look) -> Facts | None:
    """The folder of a training."""
    if not (look.path / "recipe.json").exists() or not (look.path / "schema.json").exists():
        return None
    recipe = layout.read_json(look.path / "recipe.json", dict[str, Any])
    known = layout.read_json(look.path / "schema.json", dict[str, Any])
    latest = last_metrics(look.path)
    step = int(latest.pop("step", 0))
    finished = (look.path / "model/config.json").exists()
    saved = look.path / "checkpoints"
    return {
        "kind": "run",
        "what": "a finished training" if finished else "a training that has not finished",
        "step": step,
        "steps": _inside(recipe, "run", "steps"),
        "metrics": latest,
        "checkpoints": sorted(p.name for p in saved.glob("step-*")) if saved.is_dir() else [],
        "store": _inside(recipe, "data", "train"),
        "fingerprint": known.get("fingerprint"),
        "columns": known.get("columns"),
        "recipe": recipe,
        "next": f"tokmill sample {look.path} --prompt TEXT"
        if finished
        else f"tokmill train -o {look.path} --resume",
    }


def last_metrics(path: Path) -> Facts:
    """Return the last value of each metric of a run."""
    latest: Facts = {}
    for entry in metrics(path):
        latest.update(entry)
    return latest


def metrics(path: Path) -> list[Facts]:
    """Return the lines of a run's metrics.jsonl; none where there is no such file."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        return []
    with machine_errors("read", file):
        entries: list[Facts] = plugins.require("tokmill.train.track").read_metrics(file)
    return entries


def _inside(recipe: Facts, section: str, key: str) -> Any:
    keys = recipe.get(section)
    return keys.get(key) if isinstance(keys, dict) else None


def checkpoint(look: Look) -> Facts | None:
    """A checkpoint of a run, or its final weights."""
    for name, what in (("state.json", "a checkpoint"), ("config.json", "the weights of a run")):
        if (look.path / "model.safetensors").exists() and (look.path / name).exists():
            state = layout.read_json(look.path / name, dict[str, Any])
            return {"kind": "checkpoint", "what": what, **shorten(state)}
    return None


def shard(look: Look) -> Facts | None:
    """A safetensors file; a shard of a store if it has what each shard has."""
    if look.suffix != ".safetensors" or len(look.head) < 8:
        return None
    length = int.from_bytes(look.head[:8], "little")
    facts: Facts = {"kind": "safetensors", "what": "a safetensors file", "bytes": look.size}
    try:
        with machine_errors("read", look.path), open(look.path, "rb") as handle:
            raw = handle.read(8 + min(length, 100 << 20))[8:]
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = [
            {"name": name, "shape": entry["shape"], "dtype": entry["dtype"]}
            for name, entry in header.items()
        ]
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return {**facts, "problem": "its header cannot be read: it is damaged or cut off"}
    if {"offsets", "item", "start"} <= header.keys():
        facts |= {"kind": "shard", "what": "a shard of a token store"}
        facts["records"] = header["item"]["shape"][0]
        facts["committed"] = look.path.with_suffix(".json").exists()
    facts["tensors"] = shorten(tensors)
    if 8 + length + end != look.size:
        facts["problem"] = f"{look.size:,} bytes where {8 + length + end:,} are promised"
    return facts


def receipt(look: Look) -> Facts | None:
    """The receipt of a shard."""
    found = _as(look, Receipt, {"shard", "part", "items", "drops"})
    if found is None:
        return None
    facts = {"kind": "receipt", "what": "the receipt of a shard of a token store"}
    drops = Counter(reason for _, _, reason, _ in found.drops)
    return facts | {
        "shard": found.name,
        "there": look.path.with_suffix(".safetensors").exists(),
        "records": found.records,
        "tokens": found.tokens,
        "bytes": found.bytes,
        "sha256": found.sha256,
        "left_out": dict(drops),
        "items": shorten([item.name for item in found.items]),
    }


def manifest(look: Look) -> Facts | None:
    """The manifest of a store."""
    found = _as(look, Manifest, {"fingerprint", "shards", "schema"})
    return found and {
        "kind": "manifest", "what": "the manifest of a token store", **_manifest_facts(found)
    }  # fmt: skip


def plan(look: Look) -> Facts | None:
    """The plan of a build."""
    found = _as(look, Plan, {"plan_id", "recipe", "roots"})
    if found is None:
        return None
    facts: Facts = {"kind": "plan", "what": "the plan of a build"}
    return facts | {**shorten(msgspec.to_builtins(found))}


def _as(look: Look, kind: Any, keys: set[str]) -> Any:
    if not isinstance(look.json, dict) or not keys <= look.json.keys():
        return None
    try:
        return msgspec.convert(look.json, kind)
    except msgspec.ValidationError:
        return None


def _manifest_facts(found: Manifest) -> Facts:
    return {
        "complete": found.complete,
        "source": found.source,
        "records": found.records,
        "tokens": found.tokens,
        "shards": len(found.shards),
        "bytes": found.bytes,
        "input_bytes": found.input_bytes,
        "skipped": found.skipped,
        "rejected": found.rejected,
        "columns": [
            {
                "name": name,
                "dtype": column.dtype,
                "per": column.per,
                "vocabulary": column.vocab,
                "range": list(found.ranges[name]) if name in found.ranges else None,
            }
            for name, column in found.schema.items()
        ],
        "vocabularies": {
            name: {"size": v.size, "file": v.file, "roles": v.roles, "sha256": v.sha256}
            for name, v in found.vocabularies.items()
        },
        "fingerprint": found.fingerprint,
        "recipe_id": found.recipe_id,
        "producer": found.producer,
    }
