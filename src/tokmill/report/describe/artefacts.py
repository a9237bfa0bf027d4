"""Recognises files and folders of tokmill: stores, their files, runs, checkpoints."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from tokmill.base.files import reading
from tokmill.base.headers import read_header
from tokmill.builds.scan import in_words
from tokmill.report.comparison.run_summaries import is_run, read_run
from tokmill.report.describe.recogniser import Facts, Look, shorten
from tokmill.store import manifest as layout
from tokmill.store.manifest import Manifest, Overlay, Plan
from tokmill.store.marks import has_store_files
from tokmill.store.overlay import find_overlays, overlay_names
from tokmill.store.store import Store


def store(look: Look) -> Facts | None:
    """A token store, complete or partial."""
    if not has_store_files(look.path):
        return None
    opened = Store(look.path)
    facts: Facts = {
        "kind": "store" if not opened.partial else "partial store",
        "what": "a token store"
        if not opened.partial
        else "a token store whose build has not finished; figures are of the finished part",
        **_manifest_facts(opened.manifest),
    }
    if (look.path / "plan.json").exists():
        plan: Plan = layout.read_sealed(look.path / "plan.json", Plan)
        facts["recipe"] = plan.recipe
        facts["inputs"] = shorten(plan.roots)
        if isinstance(plan.left_out, dict):
            facts["left_out_of_folders"] = in_words(plan.left_out)
        if isinstance(plan.not_text, list):
            facts["not_text"] = plan.not_text
        if opened.partial:
            facts["planned"] = {"shards": plan.shards, "input_bytes": plan.input_bytes}
    if overlay_names(look.path):
        facts["overlays"] = msgspec.to_builtins(find_overlays(opened))
    overlay = opened.manifest.overlay
    if isinstance(overlay, Overlay):
        facts["what"] = "an overlay: columns for the store in whose folder it is"
        facts |= {"over": overlay.base, "made_by": overlay.about}
    elif opened.partial:
        facts["next"] = "the same `tokmill build` continues it"
    else:
        labels = "label" in opened.schema and opened.manifest.source == "tsv"
        facts["next"] = f"tokmill train {look.quoted} -o RUN"
        if labels:
            facts["next"] = f"tokmill train classify --data {look.quoted} --from BERT_RUN -o RUN"
    return facts


def run(look: Look) -> Facts | None:
    """The folder of a training."""
    if not is_run(look.path):
        return None
    summary = read_run(look.path)
    keys, saved = summary.flat, summary.checkpoint
    return {
        "kind": "run",
        "what": "a finished training" if summary.finished else "a training that has not finished",
        "step": summary.step,
        "steps": summary.steps,
        "metrics": summary.latest,
        "best": summary.best,
        "model": keys["model.kind"],
        "parameters": summary.parameters,
        "task": keys["task.kind"],
        "engine": keys["run.engine"],
        "precision": keys["run.precision"],
        "machine": saved.get("machine"),
        "processes": saved.get("world"),
        "checkpoints": summary.checkpoints,
        "store": keys["data.train"],
        "validation_store": keys["data.val"] or None,
        "start": keys["run.start"] or None,
        "fingerprint": summary.known.fingerprint,
        "columns": summary.known.columns,
        "recipe": summary.recipe,
        "next": summary.sampling or None if summary.finished else f"tokmill train -o {look.quoted}",
    }


def checkpoint(look: Look) -> Facts | None:
    """A checkpoint of a run, or its final weights."""
    for name, what in (("state.json", "a checkpoint"), ("config.json", "the weights of a run")):
        if (look.path / "model.safetensors").exists() and (look.path / name).exists():
            state = layout.read_json(look.path / name, dict[str, Any])
            return {"kind": "checkpoint", "what": what, **shorten(state)}
    return None


def shard(look: Look) -> Facts | None:
    """A safetensors file; a shard of a store if it has the tensors of every shard."""
    if look.suffix != ".safetensors" or len(look.head) < 8:
        return None
    facts: Facts = {"kind": "safetensors", "what": "a safetensors file", "bytes": look.size}
    try:
        length, header = read_header(look.path)
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
        facts["problem"] = f"it has {look.size:,} bytes, and its header says {8 + length + end:,}"
    return facts


LOGS = {
    "inputs.jsonl": ("plan.json", "the items of the inputs of a store, and the shard of each"),
    "events.jsonl": ("plan.json", "the log of the builds of a store"),
    "metrics.jsonl": (
        "recipe.json",
        "the metrics of a run, one line for each step that was logged",
    ),
}
"""Name → the file that must be beside it in a folder of tokmill, and a description."""


def log(look: Look) -> Facts | None:
    """A file of lines in a store or a run."""
    beside, what = LOGS.get(look.path.name, ("", ""))
    if not beside or not look.path.with_name(beside).is_file():
        return None
    with reading(look.path) as file:
        lines = sum(1 for _ in file)
    command = "compare" if beside == "recipe.json" else "inspect"
    return {
        "kind": look.path.stem,
        "what": what,
        "bytes": look.size,
        "lines": lines,
        "next": f"tokmill {command} {shlex.quote(str(look.path.parent))}",
    }


def _refers_to(found: Manifest, ref: str | None) -> Facts:
    if ref is None or not isinstance(found.references, dict) or ref not in found.references:
        return {}
    stated = found.references[ref]
    return {"refers_to": {"path": stated.path, "fingerprint": stated.fingerprint}}


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
        "notes": found.notes,
        "columns": [
            {
                "name": name,
                "dtype": column.dtype,
                "per": column.per,
                "vocabulary": column.vocab,
                "range": list(found.ranges[name]) if name in found.ranges else None,
                **_refers_to(found, column.ref),
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
