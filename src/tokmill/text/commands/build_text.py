"""Options of `tokmill build text|jsonl|parquet` that other builds do not have.

They train a tokenizer first, make a training and a validation store in one command, or explain how
a record is encoded (`--explain`).
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import new_folder
from tokmill.base.inflate import inflate
from tokmill.base.progress import human_count
from tokmill.builds.build import run
from tokmill.builds.folder import check_folder, claimed
from tokmill.builds.plan import BuildRecipe, How
from tokmill.builds.source import Frozen, Request, Resources
from tokmill.cli.print_facts import report, summary
from tokmill.store.schema import each_drop
from tokmill.store.vocab import Learned
from tokmill.terminal.output import print_json, say, say_not_reached
from tokmill.text.documents import DocumentSource, NoHash
from tokmill.text.make_document import Documents
from tokmill.text.plain_text import BOM
from tokmill.text.record_blocks import is_stream

SHOWN = 400


def explain(chosen: BuildRecipe, place: str) -> dict[str, Any]:
    """Return stage → its result for the record that contains line LINE of FILE.

    For Parquet, LINE is the row, counted from 1. Stages: place, raw, outcome, document, tokens,
    ids. Raises `UsageError` for a line that does not exist.
    """
    name, _, number = place.rpartition(":")
    if not name or not number.isdecimal() or int(number) < 1:
        raise UsageError(f"--explain {place!r} is not FILE:LINE", hint="lines count from 1")
    kind = plugins.load(plugins.SOURCES, chosen.source)
    config = recipe.convert(kind.Config, chosen.options, f"options of {chosen.source}")
    request = Request(inputs=(name,), tokenizer=chosen.tokenizer, roles=chosen.roles)
    config = kind.resolve(config, request)
    frozen = kind.freeze(config, request)
    source: DocumentSource = kind(config, [name], frozen, Resources())
    rows = chosen.source == "parquet"
    line = int(number)
    offset, raw = (line - 1, b"") if rows else find_line(name, line)
    if offset == 0 and raw.startswith(BOM):
        # A record may begin before or after the byte order mark.
        offset = len(BOM)
    result = {"place": f"{name}, {'row' if rows else 'line'} {line}, byte {offset:,}"}
    if rows:
        result["place"] = f"{name}, row {line}"
    else:
        result["raw"] = show(raw)
    begins = -1
    documents: Documents | None = None
    index, outcome = -1, ""
    for item in source.items():
        for batch in source.documents(item, NoHash()):
            starts = batch.starts
            before = int(np.searchsorted(starts, offset, side="right")) - 1
            if before >= 0 and starts[before] > begins:
                begins, documents, index, outcome = int(starts[before]), batch, before, "kept"
            for drop in each_drop(batch.drops):
                if begins < drop.offset <= offset:
                    begins, documents = drop.offset, None
                    verb = "rejected" if drop.rejected else "skipped"
                    outcome = f"{verb}: {drop.reason}"
    if begins < 0 or (rows and begins != offset):
        raise UsageError(
            f"{name} has no record at line {line}",
            hint="a line is counted from 1, and a record may begin on an earlier one",
        )
    result["outcome"] = outcome
    if documents is None:
        return result
    text = documents.texts[index]
    result["document"] = f"{len(text.encode()):,} bytes: {show(text.encode())}"
    for field, values in documents.kept.items():
        result[f"kept {field}"] = values[index]
    result.update(_tokens(source, documents.take([index], []), frozen["token"]))
    return result


def _tokens(source: DocumentSource, document: Documents, frozen: Frozen) -> dict[str, str]:
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    encode = source.encoder(Resources(threads=False))
    records = encode(document)
    if not len(records):
        return {"tokens": "rejected: special token in the text"}
    tokens = records.columns["token"]
    assert isinstance(tokens, np.ndarray)
    ids = tokens.tolist()
    tokenizer = Tokenizer.from_json(frozen.data)
    pieces = [tokenizer.decode([i]) for i in ids[:60]]
    more = f" … ({len(ids):,} in all)" if len(ids) > 60 else f" ({len(ids):,})"
    return {
        "engine": encode.engine,
        "tokens": " | ".join(repr(piece)[1:-1] for piece in pieces) + more,
        "ids": " ".join(map(str, ids[:60])) + more,
    }


def find_line(name: str, line: int) -> tuple[int, bytes]:
    """Return (byte offset, bytes) of a line of a file, counted from 1; compressed ones inflated."""
    if not Path(name).is_file():
        raise TokmillError(
            "there is no such file", where=name, hint="--explain FILE:LINE takes one of the inputs"
        )
    offset = 0
    for number, raw in enumerate(_lines(name), 1):
        if number == line:
            return offset, raw
        offset += len(raw)
    raise UsageError(f"{name} has no line {line}", hint="lines count from 1")


def _lines(name: str) -> Iterator[bytes]:
    if not is_stream(name):
        with open(name, "rb") as file:
            yield from file
        return
    rest = b""
    for chunk in inflate(name):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def show(raw: bytes) -> str:
    """Return bytes as readable text, shortened in the middle."""
    text = repr(raw.decode("utf-8", "backslashreplace"))[1:-1]
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"


PANEL = "tokenizer, parts, one record"
VOCABULARY = 50_257
"""Ids of a tokenizer that is trained with --train: that of GPT-2, and of CS336's script."""


def _option(name: str, kind: Any, help_text: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    option = typer.Option(flag, help=help_text, rich_help_panel=PANEL, show_default=False)
    default = False if kind is bool else None
    annotation = bool if kind is bool else kind | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, option],
    )


PARAMETERS = [
    _option(
        "vocab_size",
        int,
        "First train a tokenizer with this many ids on the input (by default only with --train: "
        "50,257).",
    ),
    _option("special", list[str], "Special tokens of that tokenizer [<|endoftext|>]."),
    _option("train", list[str], "Training part: makes OUT/train, OUT/val and OUT/tokenizer.json."),
    _option("val", list[str], "Validation part."),
    _option(
        "bin",
        bool,
        "With --train: also write OUT/train.bin and OUT/val.bin (uint16, uint32 "
        "above 65,536 ids; no header).",
    ),
    _option("train_bin", str, "Name of the .bin file of the training part, such as x_train.bin."),
    _option("val_bin", str, "Name of the .bin file of the validation part."),
    _option("explain", str, "FILE:LINE: show every stage for one record, build nothing."),
]


def before(
    chosen: BuildRecipe, how: How, more: dict[str, Any], *, dry_run: bool, json: bool
) -> BuildRecipe | None:
    """Carry out these options; return the recipe to build, or None if nothing is left to build."""
    if chosen.options.get("strip"):
        what = "document" if chosen.source == "text" else "field"
        say(f"strip is on: white space around each {what} is removed")
    if more.get("vocab_size") and chosen.tokenizer:
        raise UsageError(
            "--tokenizer and --vocab-size exclude each other",
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
    from tokmill.text.commands.build_text import explain

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
    say(f"tokenizer: {path} ({'trained now' if is_new else 'kept from before'})")
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
        if part in flat:
            check_bin(flat[part])
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
    """Return part → its .bin file; empty if no such files are wanted."""
    names = {part: more.get(f"{part}_bin") for part in ("train", "val")}
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


def check_bin(path: Path) -> None:
    """Refuse to replace a file, unless an export wrote it."""
    from tokmill.formats.notes import is_written

    if os.path.lexists(path) and not is_written(path):
        raise UsageError(
            "the file was not written by this build, and would be replaced",
            where=str(path),
            hint="remove it, or choose another folder",
        )
