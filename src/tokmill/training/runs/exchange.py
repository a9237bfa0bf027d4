"""Runs as public checkpoints, and the reverse.

FOLDER/                 what `save_pretrained` of transformers writes
  config.json  generation_config.json (of decoders)
  model.safetensors     or several files with model.safetensors.index.json
  tokenizer.json  tokenizer_config.json  special_tokens_map.json
  README.md             model, data, metrics, how to load it
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from tokmill import plugins
from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.base.files import inside, make_folder, read_file, write_file
from tokmill.base.headers import loads_json, refused
from tokmill.base.locks import lock_of, writing
from tokmill.models.public.huggingface import architecture, public_of, read_config
from tokmill.models.public.public import Head, Public, from_public, to_public, unused
from tokmill.models.transformers.block import TransformerConfig
from tokmill.models.transformers.transformer import Transformer
from tokmill.store.manifest import encode
from tokmill.store.schema import Column, id_dtype
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.task import Task
from tokmill.tasks.task_inputs import SEGMENT, Facts, read_input_format, template_of
from tokmill.training.engines.tensors import MODEL, read_tensors, write_tensors
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.read_recipe import FACTS, RECIPE
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.run import (
    VOCAB,
    Run,
    inputs_of,
    load_task,
    make_task,
    measured,
    metrics_of,
    open_run,
    read_run,
)
from tokmill.training.runs.weights import CONFIG, FINAL, save_weights

T = TypeVar("T")
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")


class Index(msgspec.Struct):
    """The index of weights in several files."""

    weight_map: dict[str, str]
    """Name of a tensor → name of its file."""


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, from one file or from those that its index names."""
    file_of: dict[str, str] = {}
    if (folder / MODEL).exists():
        names = {MODEL}
    elif (folder / INDEX).exists():
        names = set((file_of := read_public(folder / INDEX, Index).weight_map).values())
        if not names:
            what, where = "it names no file of weights", str(folder / INDEX)
            raise TokmillError(what, where=where, hint="fetch it again")
    else:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        raise TokmillError(
            f"there is no {MODEL}" + (f"; {pickles[0]} is a pickle" if pickles else ""),
            where=str(folder),
            hint="a pickle may run any code: let transformers write the model again with "
            "save_pretrained(FOLDER, safe_serialization=True)"
            if pickles
            else "give the folder that save_pretrained of transformers wrote",
        )
    tensors: dict[str, Tensor] = {}
    for name in sorted(names):
        for key, one in read_fetched(inside(folder, name)).items():
            # A file may hold older values of a tensor that the index finds in another one.
            if key not in tensors or file_of.get(key) == name:
                tensors[key] = one
    return tensors


def read_fetched(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file that is none of a run's own."""
    try:
        return read_tensors(path)
    except MachineError:
        raise
    except TokmillError as error:
        # What may be done about a run's own file would be wrong here.
        raise TokmillError(error.what, where=error.where, hint="fetch the file again") from None


def find_vocabulary(
    folder: Path,
    tokenizer: Path | str | None,
    config: Mapping[str, Any],
    rows: int,
    keys: Mapping[str, str],
) -> tuple[Vocabulary, bytes] | None:
    """Return the vocabulary of a checkpoint and its file; None: the folder has no tokenizer.

    The model has `rows` for ids; a vocabulary may have fewer. `keys`: role → the key by which
    config.json (`config`) may name the id that has it.
    """
    if tokenizer is None and not any((folder / name).exists() for name in TOKENIZERS):
        return None
    tokenizers = plugins.require("tokmill.text.tokenizers.tokenizer")
    loaded = tokenizers.Tokenizer.from_file(tokenizer or folder)
    names = {number: token for token, number in loaded.specials.items()}
    roles = {}
    for role, key in keys.items():
        number = config.get(key)
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and number in names:
            roles[role] = names[number]
    vocabulary: tuple[Vocabulary, bytes] = loaded.vocabulary(roles)
    if loaded.size > rows:
        raise TokmillError(
            f"the tokenizer has ids up to {loaded.size - 1}, the model 0 to {rows - 1}",
            where=str(tokenizer or folder),
            hint="name the tokenizer that the model was trained with: --tokenizer",
        )
    return vocabulary


def read_public(path: Path, kind: type[T]) -> T:
    data = read_file(path)
    with refused("the file cannot be read", path, hint="fetch it again"):
        return loads_json(data, kind)


COLUMN = "token"
GENERATION, README, UNKNOWN = "generation_config.json", "README.md", "unknown"
WRITTEN = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", GENERATION, MODEL, README
)  # fmt: skip
LONGEST = 4096
"""Positions that an imported run sees of a row, where nobody says how many: a model may be made for
a hundred thousand, and attention takes their square."""
READERS = {
    "next_token": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "sentence_pair": "AutoModelForPreTraining",
}
"""Task → the class of transformers that reads what is exported."""


def import_model(
    folder: Path | str, out: Path | str, *, tokenizer: Path | str | None = None, length: int = 0
) -> Run:
    """Make a run at step 0 of a public checkpoint; its weights are read as float32.

    Args:
        tokenizer: where the vocabulary comes from, if not from the folder: a tokenizer, or a store
            or run that carries one. With neither the run knows bare ids, which is enough for a
            model that predicts the next one.
        length: positions T that the run sees of a row; 0: what the model was made for, at most
            `LONGEST`.
    """
    folder, out = Path(folder), Path(out)
    if not (folder / CONFIG).exists():
        no_file = f"there is no {CONFIG}, so this is not a checkpoint"
        raise TokmillError(
            no_file if folder.is_dir() else "there is no such folder",
            where=str(folder),
            hint="fetch a checkpoint first, as with `hf download NAME --local-dir FOLDER`",
        )
    config = read_public(folder / CONFIG, dict[str, Any])
    place = str(folder / CONFIG)
    family, _ = architecture(config, place)
    public, _ = read_config(config, place)
    vocabulary = find_vocabulary(folder, tokenizer, config, public.vocab_size, family.roles)
    generation: dict[str, Any] = {}
    if (folder / GENERATION).exists():
        generation = read_public(folder / GENERATION, dict[str, Any])
    return run_of(
        config, read_weights(folder), vocabulary, out, length, folder / CONFIG, generation
    )


def run_of(
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    vocabulary: tuple[Vocabulary, bytes] | None,
    out: Path,
    length: int,
    where: Path,
    generation: Mapping[str, Any] | None = None,
) -> Run:
    """Make a run at step 0 of the content of a config.json, tensors by their public names and,
    maybe, a vocabulary with its file; `length` as in `import_model`, `where`: the configuration,
    `generation`: the content of generation_config.json.
    """
    family, head = architecture(settings, str(where))
    public, model = read_config(settings, str(where))
    if vocabulary is None and head.task != "next_token":
        raise TokmillError(
            f"a model of the task {head.task} needs the ids of its special tokens, and there is no "
            "tokenizer",
            where=str(where.parent),
            hint="name the one that it was trained with: --tokenizer",
        )
    keys = {"kind": head.task, **{key: values[0] for key, values in head.keys.items()}}
    config = recipe_of(public, model, length, str(where), keys)
    before, after = template_of(*vocabulary) if vocabulary else ([], [])
    roles = vocabulary[0].roles if vocabulary else {}
    usual = [roles["eot"]] if "eot" in roles else []
    schema = {COLUMN: Column(id_dtype(public.vocab_size), vocab=COLUMN if vocabulary else None)}
    if public.segments:
        schema[SEGMENT] = Column("u1")
    # A model may have more rows than its tokenizer has ids.
    facts = Facts(
        fingerprint="",
        columns={COLUMN: public.vocab_size},
        schema=schema,
        vocabularies={COLUMN: vocabulary[0]} if vocabulary else {},
        prefix={COLUMN: tuple(before)} if vocabulary else {},
        suffix={COLUMN: tuple(after)} if vocabulary else {},
        ends=end_ids(settings, generation, family.roles, public.vocab_size, usual),
    )
    with torch.device("meta"):
        task = make_task(config, inputs_of(config, facts))
    own, place = task.state_dict(), str(where.parent)
    state = from_public(tensors, family.tensor_names, head, own, COLUMN, place)
    task.load_state_dict(state, assign=True)
    run = write_run(out, config, task, facts, vocabulary)
    left = sorted(unused(tensors, head))
    note = f"left out: {len(left)} tensors of other heads ({left[0]}, …)" if left else ""
    return Run(run.path, run.step, run.metrics, (note,) if note else ())


def end_ids(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    roles: Mapping[str, str],
    size: int,
    usual: list[int],
) -> dict[str, tuple[int, ...]]:
    """Return the ids with which transformers ends a text, if they are not the `usual` ones.

    generation_config.json decides, and where it names none config.json. Ids beyond the vocabulary
    are defaults of a larger model; -1 stands for none.
    """
    key = roles.get("eot", "")
    named = (generation or {}).get(key, config.get(key))
    ids = named if isinstance(named, list) else [named]
    ids = [one for one in ids if isinstance(one, int) and 0 <= one < size]
    return {COLUMN: tuple(ids)} if ids and ids != usual else {}


def write_run(
    out: Path,
    config: TrainConfig,
    task: Task,
    facts: Facts,
    vocabulary: tuple[Vocabulary, bytes] | None,
) -> Run:
    """Write a run at step 0 that has weights and, maybe, a vocabulary with its file."""
    with open_run(out, config, new=True):
        if vocabulary:
            make_folder(out / VOCAB)
            write_file(inside(out / VOCAB, vocabulary[0].file), vocabulary[1])
        write_file(out / FACTS, encode(measured(config, facts)))
        save_weights(out / FINAL, task, config, step=0)
        write_file(out / RECIPE, encode(config))
    return Run(out, 0, {})


def export(run: Path | str, out: Path | str, *, at: str = "", license: str = UNKNOWN) -> Path:
    """Write a run for others: a folder (`export_model`), or a .pt file (`export_file`)."""
    if Path(out).suffix == ".pt":
        return export_file(run, out, at=at)
    return export_model(run, out, at=at, license=license)


def export_model(
    run: Path | str, folder: Path | str, *, at: str = "", license: str = UNKNOWN
) -> Path:
    """Write the model of a run as a folder that transformers reads, and return the folder."""
    run, folder = Path(run), Path(folder)
    task = load_task(run, at)
    public, head, column = public_parts(task, str(run))
    own = {*WRITTEN, lock_of(folder / CONFIG).name}
    if folder.exists() and {path.name for path in folder.iterdir()} - own:
        raise TokmillError(
            "the folder holds other files", where=str(folder), hint="name a new folder"
        )
    _, facts = read_run(run)
    vocabulary = facts.vocabularies.get(facts.schema[column].vocab or "")
    if vocabulary and vocabulary.coder != "tokenizer":
        raise TokmillError(
            f"the vocabulary {vocabulary.file} of the column {column!r} is one of programs: "
            "transformers has no tokenizer for it",
            where=str(run),
            hint="a run on words can be exported: `tokmill store export corpus STORE -o WALKS`, "
            "then `tokmill build corpus WALKS/corpus.txt --words WALKS/vocab.txt -o WORDS`; "
            "-o F.pt writes the weights of any run",
        )
    roles = vocabulary.roles if vocabulary else {}
    # Written out even where there are none: the defaults of an architecture name ids of its own.
    ids: dict[str, Any] = {key: roles.get(role) for role, key in public.roles.items()}
    if ends := facts.ends.get(column):
        ids[public.roles["eot"]] = [*ends] if len(ends) > 1 else ends[0]
    state = to_public(task.state_dict(), public.tensor_names, head, column)
    config = public.to_config(head.task) | ids
    with writing(folder / CONFIG):
        if vocabulary:
            tokenizers = plugins.require("tokmill.text.tokenizers.tokenizer")
            tokenizer = tokenizers.Tokenizer.from_file(inside(run / VOCAB, vocabulary.file))
            before = template_of(vocabulary, tokenizer.to_json())[0]
            if task.continues and before != [*facts.prefix.get(column, before)]:
                # Its template puts tokens before a text that the run says it has not learned.
                tokenizer.data["post_processor"] = None
            tokenizer.save(folder, vocabulary.roles, segments=public.segments)
        write_tensors(folder / MODEL, state, {"format": "pt"})
        if task.continues:
            write_file(folder / GENERATION, encode(ids))
        write_file(folder / README, model_card(run, task, facts, license))
        write_file(folder / CONFIG, encode(config))
    return folder


def model_card(run: Path, task: Task, facts: Facts, license: str) -> str:
    """Return the README.md of an exported model."""
    made_by, kind = read_input_format(run), type(task.model).__name__
    data = f"a store of `tokmill build {made_by.source}`, " if made_by else ""
    data += f"fingerprint `{facts.fingerprint}`" if facts.fingerprint else "not known"
    last: dict[str, float] = {}
    for entry in metrics_of(run):
        last |= entry if entry["step"] <= task.step else {}
    loads = {"model": READERS[task.config.kind]}
    loads |= {"tokenizer": "AutoTokenizer"} if facts.vocabularies else {}
    lines = [
        *("---", "library_name: transformers", f"license: {license}", "---\n"),
        "# A model trained with tokmill\n",
        f"- {kind}, {task.parameter_count():,} parameters, task `{task.config.kind}`",
        *(f"- rows of {task.length:,} tokens", f"- data: {data}", f"- steps: {task.step:,}"),
        *(f"- {n}: {v}" for n, v in last.items() if n == "loss" or n.startswith("val_")),
        f"\nThe licence is `{license}`; that of the data is not known to the program.\n",
        "In this folder:\n\n```python",
        f"from transformers import {', '.join(sorted(loads.values()))}\n",
        *(f'{name} = {reader}.from_pretrained(".")' for name, reader in loads.items()),
        "```\n",
    ]
    return "\n".join(lines)


def export_file(run: Path | str, path: Path | str, *, at: str = "") -> Path:
    """Write the weights of a run as one file for `torch.load`, and return its path.

    It is the state dict of the task, under the names of the run's own `model.safetensors`.
    """
    path, buffer = Path(path), io.BytesIO()
    state = load_task(run, at).state_dict()
    torch.save({name: value.detach().cpu() for name, value in state.items()}, buffer)
    write_file(path, buffer.getvalue())
    return path


def public_parts(task: Task, where: str) -> tuple[Public, Head, str]:
    """Return what config.json says of a task's model, its head there, and the column of tokens."""
    model, kind = task.model, task.config.kind
    plain = isinstance(model, Transformer) and model.config.join == "sum"
    if not plain or len(task.sizes) != 1 or task.reads.vectors:
        raise TokmillError(
            "only a Transformer over one column of tokens can be exported",
            where=where,
            hint="-o F.pt writes the weights of any run, with its own names",
        )
    assert isinstance(model, Transformer)
    ((column, vocab),) = task.sizes.items()
    tied, segments = getattr(task.config, "tied", True), SEGMENT in task.reads.made
    public = public_of(model.config, vocab, tied, task.length, where, task=kind, segments=segments)
    head = next(head for head in public.heads.values() if head.task == kind)
    for key, values in head.keys.items():
        if getattr(task.config, key) not in values:
            raise TokmillError(
                f"no public architecture has a head with task.{key} = "
                f"{getattr(task.config, key)!r}",
                where=where,
                hint=f"it would be task.{key} = {values[0]!r}; -o F.pt writes the weights of any "
                "run, with its own names",
            )
    return public, head, column


def recipe_of(
    public: Public,
    model: TransformerConfig,
    length: int,
    where: str,
    keys: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Return the recipe of a run; `keys`: of its task; `length` as in `import_model`."""
    if model.position == "learned" and length > public.length:
        raise UsageError(
            f"the model has {public.length} positions, not {length}",
            where=where,
            hint=f"--length {public.length} is the most",
        )
    task = {"kind": "next_token", **(keys or {})}
    task["length"] = length or min(public.length, LONGEST)
    if task["kind"] == "next_token":
        task["column"] = COLUMN
    elif task["kind"] == "masked":
        task["rows"] = "whole"
    task["tied"] = public.tie_word_embeddings
    return from_dict({"model": msgspec.to_builtins(model), "task": task}, where)
