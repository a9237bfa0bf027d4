"""Runs as public checkpoints, and the reverse.

FOLDER/                 what `save_pretrained` of transformers writes
  config.json  generation_config.json
  model.safetensors     or several files with model.safetensors.index.json
  tokenizer.json  tokenizer_config.json  special_tokens_map.json
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from tokmill import plugins
from tokmill.errors import MachineError, TokmillError, UsageError
from tokmill.files import inside, machine_errors, make_folder, write_file
from tokmill.headers import loads_json
from tokmill.models.decoder import Decoder, DecoderConfig
from tokmill.models.huggingface import Public, public_of, read_config
from tokmill.models.public_tensors import from_public, to_public
from tokmill.store.manifest import encode
from tokmill.store.schema import Column, id_dtype
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.inputs import Facts
from tokmill.tasks.task import Task
from tokmill.training.engines.saving import MODEL
from tokmill.training.engines.tensors import read_tensors, write_tensors
from tokmill.training.recipe.check import from_dict
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.recipe.read import RECIPE
from tokmill.training.runs.run import (
    FACTS,
    VOCAB,
    Run,
    inputs_of,
    load_task,
    make_task,
    measured,
    open_run,
    read_run,
)
from tokmill.training.runs.weights import CONFIG, FINAL, save_weights

T = TypeVar("T")
COLUMN = "token"
INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
WRITTEN = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", GENERATION, MODEL)
LONGEST = 4096
"""Positions that an imported run sees of a row, where nobody says how many: a model may be made for
a hundred thousand, and attention takes their square."""
ROLES = {"bos": "bos_token_id", "eot": "eos_token_id", "pad": "pad_token_id"}


class Index(msgspec.Struct):
    """The index of weights in several files."""

    weight_map: dict[str, str]
    """Name of a tensor → name of its file."""


def import_model(
    folder: Path | str, out: Path | str, *, tokenizer: Path | str | None = None, length: int = 0
) -> Run:
    """Make a run at step 0 of a public checkpoint; its weights are read as float32.

    Args:
        folder: what `save_pretrained` of transformers wrote.
        out: folder of the run.
        tokenizer: where the vocabulary comes from, if not from the folder: a tokenizer, or a store
            or run that carries one. With neither the run knows bare ids.
        length: positions T that the run sees of a row; 0: what the model was made for, at most
            `LONGEST`.

    Raises:
        TokmillError: the checkpoint is of a model that the decoder cannot be, is not whole, or
            does not fit its tokenizer.
    """
    folder, out = Path(folder), Path(out)
    if not folder.is_dir():
        raise TokmillError(
            "there is no such folder",
            where=str(folder),
            hint="fetch a checkpoint first, as with `hf download NAME --local-dir FOLDER`",
        )
    if not (folder / CONFIG).exists():
        raise TokmillError(
            f"there is no {CONFIG}, so this is no checkpoint",
            where=str(folder),
            hint="fetch one first, as with `hf download NAME --local-dir FOLDER`",
        )
    said = read_public(folder / CONFIG, dict[str, Any])
    public, decoder = read_config(said, str(folder / CONFIG))
    found = find_vocabulary(folder, tokenizer, said, public.vocab_size)
    config = recipe_of(public, decoder, length, str(folder / CONFIG))
    # A model may have more rows than its tokenizer has ids.
    facts = Facts(
        fingerprint="",
        columns={COLUMN: public.vocab_size},
        schema={COLUMN: Column(id_dtype(public.vocab_size), vocab=COLUMN if found else None)},
        vocabularies={COLUMN: found[0]} if found else {},
    )
    with torch.device("meta"):
        task = make_task(config, inputs_of(config, facts))
    tensors = read_weights(folder)
    state = from_public(tensors, public.tensor_names, task.state_dict(), COLUMN, str(folder))
    task.load_state_dict(state, assign=True)
    return write_run(out, config, task, facts, found)


def write_run(
    out: Path,
    config: TrainConfig,
    task: Task,
    facts: Facts,
    vocabulary: tuple[Vocabulary, bytes] | None,
) -> Run:
    """Write a run at step 0 that has weights and, maybe, a vocabulary with its file."""
    with open_run(out, config, resume=False):
        if vocabulary:
            make_folder(out / VOCAB)
            write_file(inside(out / VOCAB, vocabulary[0].file), vocabulary[1])
        write_file(out / FACTS, encode(measured(config, facts)))
        save_weights(out / FINAL, task, config, step=0)
        write_file(out / RECIPE, encode(config))
    return Run(out, 0, {})


def export_model(run: Path | str, folder: Path | str, *, at: str = "") -> Path:
    """Write the model of a run as a folder that transformers reads, and return the folder.

    Args:
        run: folder of a run of the task `next_token` on one column.
        folder: a new one; config.json, written last, says that it is whole.
        at: the weights (`weights.weights_at`).

    Raises:
        TokmillError: no public architecture computes the same, or the folder is taken.
    """
    run, folder = Path(run), Path(folder)
    task = load_task(run, at)
    model = task.model
    known = isinstance(model, Decoder) and model.config.join == "sum" and len(task.sizes) == 1
    if not task.continues or not isinstance(model, Decoder) or not known:
        raise TokmillError(
            "only a decoder that predicts the next token of one column can be exported",
            where=str(run),
            hint="-o F.pt writes the weights of any run, with its own names",
        )
    ((column, vocab),) = task.sizes.items()
    tied = task.config.tied
    public = public_of(model.config, vocab, tied, task.length, str(run))
    if folder.exists() and {path.name for path in folder.iterdir()} - set(WRITTEN):
        raise TokmillError(
            "the folder holds other files", where=str(folder), hint="name a new folder"
        )
    make_folder(folder)
    _, facts = read_run(run)
    vocabulary = facts.vocabularies.get(facts.schema[column].vocab or "")
    if vocabulary:
        tokenizers = plugins.require("tokmill.text.tokenizer")
        tokenizer = tokenizers.Tokenizer.from_file(inside(run / VOCAB, vocabulary.file))
        tokenizer.save(folder, vocabulary.roles)
    roles = vocabulary.roles if vocabulary else {}
    # Written out even where there are none: the defaults of an architecture name ids of its own.
    ids = {key: roles.get(role) for role, key in ROLES.items()}
    state = to_public(task.state_dict(), public.tensor_names, column)
    write_tensors(folder / MODEL, state, {"format": "pt"})
    write_file(folder / GENERATION, encode(ids))
    write_file(folder / CONFIG, encode(public.to_config() | ids))
    return folder


def recipe_of(public: Public, decoder: DecoderConfig, length: int, where: str) -> TrainConfig:
    """Return the recipe of a run; `length` as in `import_model`."""
    if decoder.position == "learned" and length > public.length:
        raise UsageError(
            f"the model has {public.length} positions, not {length}",
            where=where,
            hint=f"--length {public.length} is the most",
        )
    task = {
        "column": COLUMN,
        "tied": public.tie_word_embeddings,
        "length": length or min(public.length, LONGEST),
    }
    return from_dict({"model": msgspec.to_builtins(decoder), "task": task}, where)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, from one file or from those that its index names."""
    if (folder / MODEL).exists():
        names = {MODEL}
    elif (folder / INDEX).exists():
        names = set(read_public(folder / INDEX, Index).weight_map.values())
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
        tensors |= read_fetched(inside(folder, name))
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
    folder: Path, tokenizer: Path | str | None, said: Mapping[str, Any], rows: int
) -> tuple[Vocabulary, bytes] | None:
    """Return the vocabulary of a checkpoint and its file; None: the folder has no tokenizer.

    The model has `rows` for ids; a vocabulary may have fewer. Where config.json (`said`) names the
    ids that begin, end and pad texts, these have the roles.
    """
    if tokenizer is None and not any((folder / name).exists() for name in TOKENIZERS):
        return None
    tokenizers = plugins.require("tokmill.text.tokenizer")
    found = tokenizers.Tokenizer.from_file(tokenizer or folder)
    names = {number: token for token, number in found.specials.items()}
    roles = {}
    for role, key in ROLES.items():
        number = said.get(key)
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and number in names:
            roles[role] = names[number]
    vocabulary: tuple[Vocabulary, bytes] = found.vocabulary(roles)
    if found.size > rows:
        raise TokmillError(
            f"the tokenizer has ids up to {found.size - 1}, the model 0 to {rows - 1}",
            where=str(tokenizer or folder),
            hint="name the tokenizer that the model was trained with: --tokenizer",
        )
    return vocabulary


def read_public(path: Path, kind: type[T]) -> T:
    """Read a JSON file of a checkpoint."""
    with machine_errors("read", path):
        data = path.read_bytes()
    try:
        value: T = loads_json(data, kind)
        return value
    except ValueError as error:
        raise TokmillError(
            f"the file cannot be read: {error}", where=str(path), hint="fetch it again"
        ) from None
