"""Every reader of files: how a good file is made, and how it is read whole.

A line a reader. `digests`: the files are bound by digests, so a result that differs from that of
the good ones is wrong; the other formats have no redundancy, and many a damaged file is another
good one.
"""

import contextlib
import hashlib
import io
import pickle
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from learned import (
    imported,
    make_embedded,
    make_encoder,
    make_extra,
    make_overlaid,
    make_public,
    make_tensor_file,
    make_tensorflow,
    make_text_run,
    make_unchecked,
    read_embedded,
    read_extra,
    read_opened,
    read_overlaid,
    read_page,
    read_public,
    read_resumed,
    read_summary,
    read_tensor_file,
    read_tensorflow,
    read_traced,
    read_unchecked,
    run_files,
    whole_run,
)
from reader import Make, Read, Reader
from similar_functions import make_keys, make_near, read_near, read_scored
from small_files import (
    compressed,
    make_benchmarks,
    make_compiled,
    make_corpus,
    make_dump,
    make_extract,
    make_functions,
    make_lists,
    make_module,
    make_text_lists,
    make_traces,
    make_triplets,
    make_tsv,
    make_vocab_txt,
    read_benchmarks,
    read_compiler,
    read_extract,
    read_mined,
    read_profile_dump,
    read_stores,
    read_text_lists,
    read_trace,
)
from small_points import make_table, read_table
from small_programs import (
    make_count_pickle,
    make_elf,
    make_graph,
    make_index,
    make_pair,
    make_vocabularies,
    read_compared,
    read_facts,
    read_graph_file,
    read_index,
    read_lists,
    read_vocabularies,
)
from small_recipes import (
    OF_DEEPSPEED,
    SETTINGS,
    TEXTS,
    TRAINING,
    make_recipe,
    make_tokenizer,
    read_recipe,
    read_settings,
    read_tokenizer,
    read_training_recipe,
)
from small_schedules import (
    make_measurements,
    make_schedule,
    read_measurements,
    read_schedule,
)
from whole_stores import (
    Refused,
    make_phrases,
    make_references,
    make_strings,
    read_built,
    read_looked_up,
    read_references,
    read_store,
    read_validated,
    store_files,
    whole_again,
)

from interval_stores import write_intervals
from making import TOKENIZER, jsonl, quick_build, rec, write_store
from onnx_models import small_model
from tokmill import plugins
from tokmill.base import recipe
from tokmill.builds.source import Frozen, Request, Resources
from tokmill.store.schema import Column
from tokmill.store.shards.shard import ShardWriter
from tokmill.store.store import Store

# Tests whose small files are mutated here.
for _name in ("unit/training", "unit/x86", "unit/bbv", "unit/models", "unit/formats", "parity"):
    sys.path.append(str(Path(__file__).parent.parent / _name))


SPECIAL = b"\n<|endoftext|>\n"


# ---- sources ---------------------------------------------------------------------------------


@cache
def frozen_tokenizer() -> dict[str, Frozen]:
    kind = plugins.load(plugins.SOURCES, "jsonl")
    return dict(kind.freeze(msgspec.convert({}, kind.Config), request(["x"], str(TOKENIZER))))


def request(inputs: Sequence[str], tokenizer: str | None = None) -> Request:
    return Request(inputs=tuple(inputs), tokenizer=tokenizer, roles={})


def read_source(
    name: str, inputs: Sequence[Path], tokenizer: str = str(TOKENIZER), **options: Any
) -> Any:
    """Freeze, plan and read as a build does, in this process and without writing a store."""
    kind = plugins.load(plugins.SOURCES, name)
    config = recipe.convert(kind.Config, options, "options")
    paths = [str(path) for path in inputs]
    if hasattr(kind, "resolve"):
        config = kind.resolve(config, request(paths, tokenizer))
    text = name in ("text", "jsonl", "parquet")
    named = tokenizer if name == "tsv" else None
    frozen = frozen_tokenizer() if text else kind.freeze(config, request(paths, named))
    source = kind(config, paths, frozen, Resources())
    limits = {
        column: frozen[what.vocab].vocabulary.size
        for column, what in source.schema.items()
        if what.vocab in frozen
    }
    read = hashlib.sha256()
    writer = ShardWriter(source.schema, limits)
    drops: list[Any] = []
    notes: dict[str, int] = {}
    for number, item in enumerate(source.items()):
        for batch in source.read(item, read):
            writer.add(batch, number)
            drops += list(batch.drops)
            notes |= batch.notes
    made = Path(inputs[0]).parent / ".made"
    size, digest = writer.write(made)
    made.unlink()
    return writer.records, writer.tokens, size, digest, len(drops), notes, read.hexdigest()


def file_of(name: str, data: bytes) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        (folder / name).write_bytes(data)
        return [folder / name]

    return make


def of_source(kind: str, make: Make, name: str, share: float = 1, **options: Any) -> Reader:
    def read(folder: Path) -> Any:
        return read_source(kind, [folder / name], **options)

    return Reader(make, read, source=kind, share=share)


def make_jsonl(folder: Path) -> Iterable[Path]:
    return [
        jsonl(folder / "a.jsonl", [{"text": t, "id": i, "u": [1]} for i, t in enumerate(TEXTS)])
    ]


def text_table() -> Any:
    import pyarrow as arrow

    return arrow.table({"text": TEXTS, "id": list(range(len(TEXTS)))})


def make_parquet(folder: Path) -> Iterable[Path]:
    import pyarrow.parquet

    pyarrow.parquet.write_table(text_table(), folder / "a.parquet", row_group_size=5)
    return [folder / "a.parquet"]


def make_arrow(folder: Path) -> Iterable[Path]:
    import pyarrow.feather

    pyarrow.feather.write_feather(text_table(), folder / "a.arrow", compression="uncompressed")
    return [folder / "a.arrow"]


IDS = [[5, 6, 7, 0], [9, 0], [], [40, 41, 42, 43, 44, 0], [5, 5, 5, 0]] * 6


def ids_store(path: Path) -> Store:
    data = TOKENIZER.read_bytes()
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    vocabulary, data = Tokenizer.from_file(TOKENIZER).vocabulary()
    schema = {"token": Column("u2", vocab="token"), "name": Column("utf8", per="record"),
              "level": Column("u4", per="record")}  # fmt: skip
    rows = [rec(ids, name=f"n{i}é", level=i) for i, ids in enumerate(IDS)]
    store = write_store(path, schema, [rows[:12], rows[12:]], vocabularies={"token": vocabulary})
    (path / "vocab" / vocabulary.file).write_bytes(data)
    return store


def export(name: str, folder: Path, out: str, **options: Any) -> Path:
    kind = plugins.load(plugins.EXPORTS, name)
    target = folder / out
    kind(recipe.convert(kind.Config, options)).write(ids_store(folder.parent / f"{name}-s"), target)
    return target


def exported(name: str, out: str, hurt: Sequence[str], **options: Any) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        export(name, folder, out, **options)
        return [folder / path for path in hurt]

    return make


NPZ = {"max_length": 8, "stride": 4, "pad_id": 1, "windows_per_file": 40}


def make_dicts(folder: Path) -> Iterable[Path]:
    path = folder / "a_tokens.pkl"
    one = {
        "asm": ["MOV", "EAX", "RBP", "-", "IMM"], "mne": "MOV",
        "type": [("[PAD]", 1), ("R32_REG", 1), ("R32_OR_MEM", 3)],
        "reg": ["[PAD]", "RAX", "RBP", "[PAD]", "[PAD]"],
        "rw": [("[PAD]", 1), ("WRITE", 1), ("READ", 3)], "eflag": "[PAD]",
    }  # fmt: skip
    path.write_bytes(pickle.dumps({"main": [[one, one], [one]], "other": [[one]]}, 4))
    return [path]


def make_overlay(suffix: str) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        ids_store(folder / "s")
        values = np.arange(len(IDS), dtype=np.int32)
        path = folder / f"values.{suffix}"
        np.save(path, values) if suffix == "npy" else np.savez(path, a=values, b=values * 0.5)
        return [path]

    return make


def read_overlay(suffix: str) -> Read:
    def read(folder: Path) -> Any:
        return read_source("overlay", [folder / "s"], values=str(folder / f"values.{suffix}"))

    return read


# ---- exports -----------------------------------------------------------------------------------


def make_exported(name: str, out: str, **options: Any) -> Make:
    def make(folder: Path) -> Iterable[Path]:
        if name in ("token-dicts", "corpus"):
            make_dicts(folder.parent)
            path = folder.parent / "a_tokens.pkl"
            store = quick_build("token-dicts", path, folder.parent / "x")
            kind = plugins.load(plugins.EXPORTS, name)
            kind(recipe.convert(kind.Config, options)).write(store, folder / out)
        elif name == "triplets":
            profiles = write_intervals(folder.parent / "p", programs=1, intervals=30)
            mined = quick_build("mine", profiles.path, folder.parent / "m", what="bbv")
            kind = plugins.load(plugins.EXPORTS, name)
            kind(recipe.convert(kind.Config, options)).write(mined, folder / out)
        else:
            export(name, folder, out, **options)
        return sorted(path for path in folder.rglob("*") if path.is_file())

    return make


def read_exported(folder: Path) -> Any:
    """`store validate` of what an export wrote."""
    from tokmill.formats.notes import check, find_notes

    inside = folder / "d"
    place = inside if inside.is_dir() else folder
    if not find_notes(place):
        raise Refused("there is no note", hint="mend it")
    found = check(place)
    if not found.ok:
        raise Refused(found.problems[0].what, hint="mend it")
    return found.files, found.bytes


def of_export(name: str, out: str, **options: Any) -> Reader:
    make = make_exported(name, out, **options)
    return Reader(make, read_exported, digests=True, export=name)


# ---- looking ---------------------------------------------------------------------------------


def make_everything(folder: Path) -> Iterable[Path]:
    """One file of each kind that `inspect` knows."""
    made = [*make_jsonl(folder), *make_parquet(folder), *make_dicts(folder)]
    (folder / "a.txt").write_text("\n".join(TEXTS))
    np.save(folder / "a.npy", np.arange(9))
    np.savez_compressed(folder / "a.npz", input_ids=np.ones((2, 3)), attention_mask=np.ones((2, 3)))
    (folder / "a.bin").write_bytes(np.arange(900, dtype="<u2").tobytes())
    made += [*compressed("gz")(folder), *compressed("zst")(folder)]
    made += make_graph(".cfg.parquet")(folder)
    made += [*make_tokenizer(folder), *make_recipe(folder)]
    store = ids_store(folder / "s").path
    for path in (*store.glob("shards/*"), store / "plan.json", store / "manifest.json"):
        shutil.copy(path, folder / path.name)
    shutil.rmtree(store)
    return sorted(path for path in folder.iterdir() if path.is_file())


def read_everything(folder: Path) -> Any:
    from tokmill.cli.inspect_command import print_facts
    from tokmill.report.describe.inspect import describe

    # What was damaged is the newest file; all others are as they were.
    newest = max((p for p in folder.iterdir() if p.is_file()), key=lambda p: p.stat().st_mtime_ns)
    with contextlib.redirect_stdout(io.StringIO()):
        print_facts(describe(newest))
    return "inspected"


RUN = ("*.json", "metrics.jsonl", "checkpoints/*/state.json", "model/*")

READERS: dict[str, Reader] = {
    # sources
    "text": of_source(
        "text", file_of("a.txt", SPECIAL.join(t.encode() for t in TEXTS)), "a.txt", 0.2
    ),
    "jsonl": of_source("jsonl", make_jsonl, "a.jsonl", 0.2, keep=["id"]),
    "jsonl gz": of_source("jsonl", compressed("gz"), "a.jsonl.gz", 0.2),
    "jsonl zst": of_source("jsonl", compressed("zst"), "a.jsonl.zst", 0.2),
    "tsv": Reader(
        make_tsv,
        lambda folder: read_source("tsv", [folder / "0.tsv"], str(folder / "vocab.txt")),
        source="tsv",
        share=0.2,
    ),
    "parquet": of_source("parquet", make_parquet, "a.parquet", 0.2, keep=["id"]),
    "arrow": of_source("parquet", make_arrow, "a.arrow", 0.3),
    "x86": of_source("x86", make_elf, "program", 0.1),
    "x86 facts": Reader(make_elf, read_facts, share=0.1),
    "x86 graph": of_source("x86", make_graph(".cfg.parquet"), "a.cfg.parquet", 0.2),
    "bbv": Reader(make_traces("0.bb"), read_trace("0.bb"), source="bbv", share=0.5),
    "rates of intervals": Reader(make_table, read_table),
    "bbv xz": Reader(make_traces("0.bb.xz"), read_trace("0.bb.xz"), share=0.2),
    "bbv beside": Reader(
        make_traces("0.pc", "0.map", "0.intervals.csv"), read_trace("0.bb"), share=0.5
    ),
    "callgrind dump": Reader(make_dump, read_profile_dump, share=0.5),
    "pairs": Reader(
        make_pair,
        lambda folder: read_source(
            "pairs",
            [folder / f"{number}.cfg.parquet" for number in (0, 1)],
            pair=("O0/tool:O1/tool",),
        ),
        source="pairs",
        share=0.2,
    ),
    "corpus": Reader(
        make_corpus,
        lambda folder: read_source("corpus", [folder / "0.txt"], words=str(folder / "vocab.txt")),
        source="corpus",
        share=0.2,
    ),
    "graph compared": Reader(make_graph(".cfg.parquet"), read_compared, share=0.2),
    "graph parquet": Reader(make_graph(".cfg.parquet"), read_graph_file("a.cfg.parquet")),
        "saved_index": Reader(make_index, read_index),
    "token-dicts": of_source("token-dicts", make_dicts, "a_tokens.pkl"),
    "triplets": of_source("triplets", make_triplets, "0_triplets.pkl"),
    "mlir": of_source("mlir", make_module, "0.mlir", share=0.1, schedules=1),
    "onnx": of_source("mlir", lambda f: [small_model(f / "m.onnx")], "m.onnx", share=0.005),
    "benchmarks of mlir": Reader(make_benchmarks, read_benchmarks, share=0.1),
    "schedule of mlir": Reader(make_schedule, read_schedule, share=0.5),
    "measurements": Reader(make_measurements, read_measurements, share=0.5),
    "mine": Reader(make_functions, read_mined, source="mine", share=0.3),
    "embed": Reader(make_embedded, read_embedded, source="embed", share=0.05),
    "select": Reader(
        store_files("shards/*.safetensors"),
        lambda folder: read_source("select", [folder / "s"], unique=True),
        source="select",
    ),
    "overlay npy": Reader(make_overlay("npy"), read_overlay("npy"), source="overlay"),
    "overlay npz": Reader(make_overlay("npz"), read_overlay("npz"), source="overlay"),
    "npz": of_source("npz", exported("npz", "d", ["d/tokenized_data_part001.npz"], **NPZ), "d"),
    "bin": of_source("bin", exported("bin", "a.bin", ["a.bin"]), "a.bin", separator_id=0),
    # exports
    "export bin": of_export("bin", "a.bin"),
    "export npz": of_export("npz", "d", **NPZ),
    "export corpus": of_export("corpus", "d"),
    "export triplets": of_export("triplets", "d"),
    "export token-dicts": of_export("token-dicts", "d", sequences_per_file=1),
    # stores
    "store metadata": Reader(
        store_files("*.json*", "shards/*.json", "vocab/*"), read_validated, digests=True
    ),
    "store shard": Reader(store_files("shards/*.safetensors"), read_validated, digests=True),
    "store unchecked": Reader(
        store_files("manifest.json", "shards/*.safetensors", "shards/*.safetensors"), read_store
    ),
    "store phrases": Reader(make_phrases, read_store),
    "store strings": Reader(make_strings, read_store),
    "store references": Reader(make_references, read_references, restore=whole_again),
    "store rejects": Reader(store_files("*.json*", "shards/*.json"), read_looked_up),
    "store build": Reader(
        store_files("*.json*", "shards/*.json", "vocab/*"), read_built, digests=True,
        share=0.2, restore=whole_again,
    ),
    "store overlay": Reader(make_overlaid, read_overlaid, digests=True),
    # tokenizers, vocabularies, recipes
    "tokenizer.json": Reader(make_tokenizer, read_tokenizer),
    "vocab.txt": Reader(make_vocab_txt, read_tokenizer),
    "vocabularies": Reader(make_vocabularies, read_vocabularies),
    "vocabulary counts": Reader(make_count_pickle, read_lists),
    "recipe": Reader(make_recipe, read_recipe),
    "settings": Reader(file_of("s.json", SETTINGS), read_settings),
    "settings of deepspeed": Reader(file_of("s.json", OF_DEEPSPEED), read_settings, share=0.5),
    "recipe of a training": Reader(file_of("r.toml", TRAINING), read_training_recipe, share=0.5),
    "list of stores": Reader(make_lists, read_stores),
    "lists as text": Reader(make_text_lists, read_text_lists),
    # programs
    "extract": Reader(make_extract, read_extract),
    "compiler": Reader(make_compiled, read_compiler),
    # functions that are similar
    "similarity keys": Reader(make_keys, read_scored, share=0.2),
    "similarity index": Reader(make_near, read_near, share=0.2),
    # looking
    "inspect": Reader(make_everything, read_everything),
    # runs
    "tensors": Reader(make_tensor_file, read_tensor_file, digests=True),
    "run": Reader(run_files(*RUN), read_summary, share=0.2),
    "run opened": Reader(
        make_text_run, read_opened, share=0.2
    ),
    "trace": Reader(
        run_files("recipe.json", "schema.json", "sessions.jsonl"), read_traced, share=0.2
    ),
    "report": Reader(run_files(*RUN), read_page, share=0.05),
    "checkpoint": Reader(
        run_files("checkpoints/step-00000002/*"), read_resumed, digests=True, share=0.5,
        restore=whole_run,
    ),
    "checkpoint unchecked": Reader(make_unchecked, read_unchecked),
    "state of a task": Reader(make_extra, read_extra),
    # models of others
    "GPT-2": Reader(make_public("gpt2"), imported(read_public), share=0.2),
    "Llama": Reader(make_public("llama"), imported(read_public), share=0.2),
    "Llama in parts": Reader(make_public("llama", 3), imported(read_public), share=0.2),
    "BERT": Reader(make_encoder, imported(read_public), share=0.2),
    "TensorFlow": Reader(
        make_tensorflow("*.index", "*.data-*"), read_tensorflow, digests=True
    ),
    "vocabulary of a TensorFlow BERT": Reader(
        make_tensorflow("*.json", "*.txt"), read_tensorflow
    ),
}  # fmt: skip
