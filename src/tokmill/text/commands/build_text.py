"""What `tokmill build text|jsonl|parquet` does before it builds, by options of its own.

They train a tokenizer first, make a training and a validation store in one command, or explain how
a record is encoded (`--explain`).
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.base.files import new_folder
from tokmill.base.progress import human_count
from tokmill.builds.build import run
from tokmill.builds.folder import check_folder, claimed
from tokmill.builds.plan import BuildRecipe, How
from tokmill.cli.build_report import report, summary
from tokmill.formats.notes import is_written
from tokmill.store.vocab import Learned
from tokmill.terminal.output import print_json, say, say_not_reached

VOCABULARY = 50_257
"""Ids of a tokenizer that is trained with --train: that of GPT-2, and of CS336's script."""


def before(
    chosen: BuildRecipe, how: How, more: dict[str, Any], *, dry_run: bool, json: bool
) -> BuildRecipe | None:
    """Carry out these options; return the recipe to build, or None if nothing is left to build."""
    of_new = [f"--{flag}" for flag in ("vocab-size", "special") if more.get(flag.replace("-", "_"))]
    if of_new and chosen.tokenizer:
        raise UsageError(
            f"--tokenizer and {of_new[0]} exclude each other",
            hint="--tokenizer uses an existing one, --vocab-size trains one",
        )
    if more.get("train") and more.get("val") and not (more.get("vocab_size") or chosen.tokenizer):
        more = {**more, "vocab_size": VOCABULARY}
        say(f"vocabulary size: {VOCABULARY:,}, the default (--vocab-size N trains another)")
    looking = "--dry-run" if dry_run else "--explain" if more.get("explain") else ""
    if looking and (more.get("train") or more.get("val")):
        raise UsageError(
            f"{looking} is for a single build", hint="name the INPUT instead of --train and --val"
        )
    if more.get("train") or more.get("val"):
        _two_parts(chosen, how, more, json=json)
        return None
    for flag in ("bin", "train_bin", "val_bin"):
        if more.get(flag):
            raise UsageError(
                f"--{flag.replace('_', '-')} goes with --train and --val",
                hint="else: tokmill store export bin STORE -o NAME.bin",
            )
    if more.get("explain"):
        _explain(chosen, how, more, json=json)
        return None
    if more.get("vocab_size"):
        if not chosen.out:
            raise UsageError("no folder for the store is named", hint="-o STORE")
        check_folder(Path(chosen.out))
        folder = Path(chosen.out) / "vocab"
        if dry_run and not (folder / "tokenizer.json").exists():
            raise UsageError(
                "--dry-run writes nothing, and there is no tokenizer yet",
                hint="`tokmill tokenizer train INPUT -o tokenizer.json`, then --tokenizer",
            )
        with claimed(Path(chosen.out)), new_folder(folder):
            tokenizer = _learn(folder, chosen, list(chosen.inputs), more, how)
        chosen = msgspec.structs.replace(chosen, tokenizer=str(tokenizer))
    return chosen


def _explain(chosen: BuildRecipe, how: How, more: dict[str, Any], *, json: bool) -> None:
    """Print every stage of one record; a tokenizer that is trained for it is not kept."""
    from tokmill.text.explain import explain

    kept = Path(chosen.out, "vocab", "tokenizer.json")
    with tempfile.TemporaryDirectory(prefix="tokmill-explain-") as folder:
        if more.get("vocab_size"):
            if chosen.out and kept.exists() and not how.fresh:
                tokenizer = _learn(kept.parent, chosen, list(chosen.inputs), more, how)
            else:
                inputs = list(chosen.inputs) or [more["explain"].rpartition(":")[0]]
                tokenizer = _learn(Path(folder), chosen, inputs, more, how)
                say("(it is not kept: --explain writes nothing)")
            chosen = msgspec.structs.replace(chosen, tokenizer=str(tokenizer))
        explanation = explain(chosen, more["explain"])
    if json:
        print_json(explanation)
        return
    for stage, text in explanation.items():
        print(f"{stage:<10} {text}")


def _learn(
    folder: Path, chosen: BuildRecipe, inputs: list[str], more: dict[str, Any], how: How
) -> Path:
    from tokmill.text.learning.train_tokenizer import learned_tokenizer
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    given = more.get("special") or ["<|endoftext|>"]
    options = Learned(vocab_size=more["vocab_size"], specials=tuple(dict.fromkeys(given)))
    path, is_new = learned_tokenizer(
        folder, chosen.source, inputs, chosen.options, options, again=how.fresh
    )
    say(f"tokenizer: {path} ({'trained now' if is_new else 'unchanged'})")
    if is_new:
        say_not_reached(Tokenizer.from_file(path).size, options.vocab_size)
    return path


def _two_parts(chosen: BuildRecipe, how: How, more: dict[str, Any], *, json: bool) -> None:
    train, val = more.get("train"), more.get("val")
    if not train or not val:
        raise UsageError("--train and --val go together", hint="--train FILE --val FILE -o DIR")
    if chosen.inputs:
        raise UsageError(
            f"--train and --val replace other inputs ({chosen.inputs[0]})",
            hint="repeat --train for more files",
        )
    if not chosen.out:
        raise UsageError("no folder is named", hint="-o DIR")
    out = Path(chosen.out)
    flat = _flat_files(out, more)
    for part in ("train", "val"):
        check_folder(out / part)
        if part in flat and os.path.lexists(flat[part]) and not is_written(flat[part]):
            raise UsageError(
                "the file was not written by this build, and would be replaced",
                where=str(flat[part]),
                hint="remove it, or choose another folder",
            )
    tokenizer = chosen.tokenizer
    if tokenizer is None:
        from tokmill.text.learning.train_tokenizer import check_learned

        check_learned(out)
        # The tokenizer must not be trained on the validation text.
        with new_folder(out):
            tokenizer = str(_learn(out, chosen, train, more, how))
    facts: dict[str, Any] = {}
    for part, inputs in (("train", train), ("val", val)):
        recipe = msgspec.structs.replace(
            chosen, inputs=tuple(inputs), out=str(out / part), tokenizer=tokenizer
        )
        store = run(recipe, how)
        if json:
            facts[part] = summary(store)
        else:
            report(store, json=False)
        if part in flat:
            export = plugins.load(plugins.EXPORTS, "bin")
            written = export(export.Config()).write(store, flat[part])
            facts[flat[part].name] = written
            say(
                f"wrote {flat[part]}: {human_count(store.tokens, 'id')} of {written['dtype']}, "
                "no header"
            )
    if json:
        print_json(facts)


def _flat_files(out: Path, more: dict[str, Any]) -> dict[str, Path]:
    names = {part: more.get(f"{part}_bin") for part in ("train", "val")}
    if more.get("bin") is False and any(names.values()):
        raise UsageError("--no-bin and a name of a .bin file exclude each other", hint="name none")
    if not more.get("bin") and not any(names.values()):
        return {}
    files = {part: name or f"{part}.bin" for part, name in names.items()}
    for part, name in files.items():
        if "/" in name or "\0" in name or not name.endswith(".bin") or name.startswith("."):
            raise UsageError(
                f"--{part}-bin {name!r} is not a name of a .bin file",
                hint=f"such as --{part}-bin tinystories_{part}_tokens.bin; it is written into OUT",
            )
    if files["train"] == files["val"]:
        raise UsageError("--train-bin and --val-bin are the same name", hint="name two files")
    return {part: out / name for part, name in files.items()}
