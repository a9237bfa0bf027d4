"""The files of a public checkpoint: weights, configuration, tokenizer.

FOLDER/                 what `save_pretrained` of transformers writes
  config.json
  model.safetensors     or several files with model.safetensors.index.json
  tokenizer.json        or vocab.txt
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from tokmill import plugins
from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.files import inside, read_file
from tokmill.base.headers import loads_json, refused
from tokmill.store.vocab import Vocabulary
from tokmill.training.engines.tensors import MODEL, read_tensors

T = TypeVar("T")
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")


class Index(msgspec.Struct):
    """The index of weights in several files."""

    weight_map: dict[str, str]
    """Name of a tensor → name of its file."""


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, from one file or from those that its index names."""
    if (folder / MODEL).exists():
        names = {MODEL}
    elif (folder / INDEX).exists():
        names = set(read_public(folder / INDEX, Index).weight_map.values())
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
        value: T = loads_json(data, kind)
        return value
