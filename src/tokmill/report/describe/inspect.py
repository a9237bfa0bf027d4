"""Describes a file or folder of any kind: a table of recognisers, one for each kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tokmill.base.errors import TokmillError, shell_word
from tokmill.base.files import address_of, machine_errors, read_file, reading
from tokmill.base.headers import loads_toml, read_header
from tokmill.base.progress import human_count
from tokmill.builds.scan import in_words
from tokmill.report.comparison.run_summaries import is_run, listing, read_run
from tokmill.report.describe.foreign import (
    FOREIGN,
    LOOSE,
    graph,
    program,
    vocabulary,
    vocabulary_folder,
)
from tokmill.report.describe.recogniser import ENTRIES, Facts, Look, Recogniser, open_look, shorten
from tokmill.store import manifest as layout
from tokmill.store.manifest import Manifest, Overlay, Plan
from tokmill.store.marks import has_store_files
from tokmill.store.overlay import find_overlays, overlay_names
from tokmill.store.store import Store
from tokmill.store.vocab import find_roles
from tokmill.text.jsonl import how_to_split


def store(look: Look) -> Facts | None:
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
        plan: Plan = layout.read_checked(look.path / "plan.json", Plan)
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
        "fingerprint": summary.facts.fingerprint,
        "columns": summary.facts.columns,
        "recipe": summary.recipe,
        "next": summary.sampling or None if summary.finished else f"tokmill train -o {look.quoted}",
    }


def checkpoint(look: Look) -> Facts | None:
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
    sibling, what = LOGS.get(look.path.name, ("", ""))
    if not sibling or not look.path.with_name(sibling).is_file():
        return None
    with reading(look.path) as file:
        lines = sum(1 for _ in file)
    command = "compare" if sibling == "recipe.json" else "inspect"
    return {
        "kind": look.path.stem,
        "what": what,
        "bytes": look.size,
        "lines": lines,
        "next": f"tokmill {command} {shell_word(look.path.parent)}",
    }


def _refers_to(manifest: Manifest, ref: str | None) -> Facts:
    if ref is None or not isinstance(manifest.references, dict) or ref not in manifest.references:
        return {}
    stated = manifest.references[ref]
    return {"refers_to": {"path": stated.path, "fingerprint": stated.fingerprint}}


def _manifest_facts(manifest: Manifest) -> Facts:
    return {
        "complete": manifest.complete,
        "source": manifest.source,
        **manifest.counts(),
        "columns": [
            {
                "name": name,
                "dtype": column.dtype,
                "per": column.per,
                "vocabulary": column.vocab,
                "range": list(manifest.ranges[name]) if name in manifest.ranges else None,
                **_refers_to(manifest, column.ref),
            }
            for name, column in manifest.schema.items()
        ],
        "vocabularies": {
            name: {"size": v.size, "file": v.file, "roles": v.roles, "sha256": v.sha256}
            for name, v in manifest.vocabularies.items()
        },
        "fingerprint": manifest.fingerprint,
        "recipe_id": manifest.recipe_id,
        "producer": manifest.producer,
    }


COMMANDS = {"diff": "diff", "similarity": "similarity eval"}
"""Value of `format` in JSON that tokmill writes → the command."""
KINDS = {
    **dict.fromkeys([".jsonl", ".ndjson"], "jsonl"),
    **dict.fromkeys([".parquet", ".arrow", ".feather"], "parquet"),
    **dict.fromkeys([".txt", ".md", ".rst", ".py", ".c", ".h", ".rs", ".go", ".js"], "text"),
}
"""Suffix of most files in a folder → the kind of build that reads them."""


def describe(path: Path | str, entries: int = ENTRIES, *, quiet: bool = True) -> Facts:
    """Return the description of a path: `kind`, `what` in words, and the facts of that kind.

    `problem` is present if something is wrong, `next` if a command can use it. `entries`: number of
    entries of a pickle that are shown. Nothing is changed, and no code of a pickle is run. Unless
    `quiet`, progress is shown for long pickles.
    """
    if address := address_of(path):
        facts = store(Look(Store(address).path))
        assert facts is not None
        return {**facts, "path": address, "next": f"tokmill train {shell_word(address)} -o RUN"}
    path = Path(path)
    if not path.exists():
        raise TokmillError(
            "there is no such file or folder",
            where=str(path),
            hint="relative paths begin at the working directory",
        )
    if not path.is_dir() and not path.is_file():
        raise TokmillError(
            "is neither a file nor a folder",
            where=str(path),
            hint="write the data of a pipe or a device to a file first",
        )
    look = replace(Look(path) if path.is_dir() else open_look(path), entries=entries, quiet=quiet)
    for recogniser in FOLDERS if path.is_dir() else FILES:
        facts = recogniser(look)
        if facts is not None:
            return {"kind": facts.pop("kind"), "path": str(path), **facts}
    return {
        "kind": "unknown",
        "path": str(path),
        "what": "unknown to tokmill: neither text nor one of the token formats",
        "bytes": look.size,
        "first_bytes": look.head[:16].hex(" "),
    }


def tokenizer_folder(look: Look) -> Facts | None:
    """A folder with a tokenizer in it, and what else tokmill knows there."""
    facts = tokenizer_in(look.path)
    if facts is None:
        return None
    inside = contents(look.path)
    more = f", beside {in_numbers(inside)}" if inside else ""
    return {**facts, "what": f"{facts['what']}, in its folder{more}", **inside}


def tokenizer_in(folder: Path) -> Facts | None:
    if (folder / "tokenizer.json").is_file():
        return tokenizer(open_look(folder / "tokenizer.json"))
    return None


def contents(folder: Path) -> Facts:
    """Return lists `stores`, `tokenizers` and `runs` of what is in a folder, without empty ones."""
    with machine_errors("read", folder):
        inside = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    stores, tokenizers = [], []
    for path in inside:
        row: Facts = {"name": path.name}
        try:
            if facts := store(Look(path)):
                stores.append(row | {key: facts[key] for key in ("kind", "records", "tokens")})
            elif facts := tokenizer_in(path):
                kept = ("model", "size", "merges", "problem")
                tokenizers.append(row | {key: facts[key] for key in kept if key in facts})
        except TokmillError as error:
            stores.append({**row, "kind": "damaged", "problem": error.what})
    lists = {"stores": stores, "tokenizers": tokenizers, "runs": listing(folder)}
    return {name: rows for name, rows in lists.items() if rows}


def in_numbers(inside: Facts) -> str:
    """Return a text such as "2 stores, 1 tokenizer" for these lists."""
    return ", ".join(human_count(len(rows), name[:-1]) for name, rows in inside.items())


def other_folder(look: Look) -> Facts:
    """A folder of something else: the stores, tokenizers and runs in it, and names by suffix."""
    with machine_errors("read", look.path):
        names = sorted(entry.name for entry in look.path.iterdir())
    inside = contents(look.path)
    facts: Facts = {"kind": "folder", "what": "an empty folder"}
    if inside:
        facts["what"] = f"a folder of {in_numbers(inside)}"
    elif names:
        facts["what"] = "a folder that is neither a store nor a run"
    roots = {Path(row["name"]).parts[0] for row in inside.get("runs", [])}
    if roots and roots == set(names):
        facts["kind"] = "runs"
    else:
        suffixes = Counter(Path(name).suffix or "no suffix" for name in names)
        facts["entries"] = len(names)
        facts["suffixes"] = dict(suffixes.most_common(10))
        facts["first"] = names[:10]
    if roots:
        facts["next"] = f"tokmill compare {look.quoted}"
    elif not inside:
        most = Counter(Path(name).suffix.lower() for name in names).most_common(1)
        if most and (kind := KINDS.get(most[0][0])):
            first = next(name for name in names if name.lower().endswith(most[0][0]))
            how = f"{kind} {look.quoted} --vocab-size 8192"
            if kind == "parquet" and graph(open_look(look.path / first)):
                how = f"x86 {look.quoted}"
            facts["next"] = f"tokmill build {how} -o STORE"
        elif any(_is_program(look.path / name) for name in names[:10]):
            facts["next"] = f"tokmill build x86 {look.quoted} -o STORE"
    return {**facts, **inside}


def _is_program(path: Path) -> bool:
    try:
        facts = program(open_look(path)) if path.is_file() else None
    except TokmillError:
        return False
    return bool(facts and "next" in facts)


def tokenizer(look: Look) -> Facts | None:
    if not isinstance(look.json, dict) or not isinstance(look.json.get("model"), dict):
        return None
    model = look.json["model"]
    vocab = model.get("vocab")
    if not isinstance(vocab, dict | list):
        return None
    added = {
        token["content"]: token["id"]
        for token in look.json.get("added_tokens") or []
        if isinstance(token, dict)
        and isinstance(token.get("id"), int)
        and isinstance(token.get("content"), str)
    }
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    facts: Facts = {
        "kind": "tokenizer",
        "what": "a tokenizer (tokenizer.json)",
        "model": model.get("type") or "BPE",
        "size": max([*(i for i in ids if isinstance(i, int)), *added.values()], default=-1) + 1,
        "merges": len(model.get("merges") or []),
        "added_tokens": shorten(dict(sorted(added.items(), key=lambda pair: pair[1])[:50])),
    }
    try:
        facts["roles"] = find_roles(added)
    except TokmillError as error:
        facts["problem"] = error.what
    return {**facts, "next": f"tokmill build text INPUT --tokenizer {look.quoted} -o STORE"}


def other_json(look: Look) -> Facts | None:
    if look.json is None:
        if look.suffix != ".json":
            return None
        return {"kind": "json", "what": "JSON by its name", "bytes": look.size,
                "problem": "it cannot be read: it is damaged or cut off"}  # fmt: skip
    if isinstance(look.json, dict) and ".jsonl" not in look.path.suffixes:
        keys = list(look.json)
        kind = str(look.json.get("format")).removeprefix("tokmill.")
        what = f"what `tokmill {COMMANDS[kind]}` found" if kind in COMMANDS else "a JSON object"
        return {
            "kind": kind if kind in COMMANDS else "json",
            "what": what,
            "bytes": look.size,
            "keys": keys[:30],
        }
    if isinstance(look.json, list):
        facts = {"kind": "json", "what": "a JSON list", "bytes": look.size,
                 "entries": len(look.json)}  # fmt: skip
        if look.json and isinstance(look.json[0], dict):
            facts["next"] = how_to_split(str(look.path))
        return facts
    return None


def recipe(look: Look) -> Facts | None:
    if look.suffix != ".toml":
        return None
    facts: Facts = {"kind": "toml", "what": "TOML, but not a recipe", "bytes": look.size}
    try:
        value = loads_toml(read_file(look.path).decode())
    except ValueError as error:
        return {**facts, "what": "TOML by its name", "problem": str(error)}
    if "source" in value:
        facts |= {"kind": "recipe", "what": f"a recipe of a {value['source']} build",
                  "next": f"tokmill build {look.quoted} -o STORE"}  # fmt: skip
    elif value.keys() & {"data", "model", "task", "optim", "run"}:
        facts |= {"kind": "recipe", "what": "a recipe of a training",
                  "next": f"tokmill train {look.quoted} -o RUN"}  # fmt: skip
    elif "extends" in value:
        facts |= {"kind": "recipe", "what": f"a recipe that extends {value['extends']}",
                  "next": f"tokmill train {look.quoted} --dry-run"}  # fmt: skip
    return {**facts, "content": shorten(value)}


FOLDERS: list[Recogniser] = [
    store, run, checkpoint, tokenizer_folder, vocabulary_folder, other_folder,
]  # fmt: skip
FILES: list[Recogniser] = [
    log, *FOREIGN, shard, tokenizer, vocabulary,
    other_json, recipe, *LOOSE,
]  # fmt: skip
"""The first recogniser that does not return None decides."""
