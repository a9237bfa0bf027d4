"""Google's BERT checkpoints of TensorFlow, read without TensorFlow.

FOLDER/                       what Google publishes
  bert_model.ckpt.index  bert_model.ckpt.data-00000-of-00001
  bert_config.json
  vocab.txt
OUT/                          what transformers reads as `BertForPreTraining`
  config.json  model.safetensors
  vocab.txt  tokenizer_config.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokmill.errors import TokmillError
from tokmill.files import machine_errors, make_folder, write_file
from tokmill.models.google_bert import GoogleBert, check_config, chosen
from tokmill.store.manifest import encode
from tokmill.training.engines.saving import MODEL
from tokmill.training.engines.tensors import write_tensors
from tokmill.training.runs.exchange import read_public
from tokmill.training.runs.find_bundle import find_bundle
from tokmill.training.runs.tensor_bundle import TensorBundle
from tokmill.training.runs.weights import CONFIG

BERT_CONFIG, WORDS, TOKENIZER_CONFIG = "bert_config.json", "vocab.txt", "tokenizer_config.json"
WRITTEN = (CONFIG, MODEL, WORDS, TOKENIZER_CONFIG)
MOST_WORDS = 64 << 20
"""Bytes of a vocab.txt that are read."""


class BertCheckpoint(NamedTuple):
    """A checkpoint under public names."""

    config: GoogleBert
    tensors: dict[str, Tensor]
    """Name in transformers → tensor in float32; it stays in its file until it is read."""
    words: list[str]
    """The tokens of vocab.txt, in the order of their ids; empty: there is no such file."""
    left_out: list[str]
    """Variables of the optimiser."""


def read_bert(place: Path | str, *, verify: bool = True) -> BertCheckpoint:
    """Read a checkpoint of Google's BERT code.

    Args:
        place: its folder, `…/bert_model.ckpt`, or one of its files.
        verify: see `TensorBundle`.

    Raises:
        TokmillError: the checkpoint is damaged, is not whole, is no BERT, or does not fit its
            configuration or its vocabulary.
    """
    prefix = find_bundle(Path(place))
    file = prefix.with_name(BERT_CONFIG)
    if not file.exists():
        raise TokmillError(
            f"there is no {BERT_CONFIG}, which says how many heads the model has",
            where=str(prefix.parent),
            hint="Google publishes it with the checkpoint: put it beside the other files",
        )
    config = read_public(file, GoogleBert)
    check_config(config, str(file))
    words = read_words(prefix.with_name(WORDS), config.vocab_size)
    bundle = TensorBundle(prefix, verify=verify)
    shapes = {name: entry.shape for name, entry in bundle.entries.items()}
    names, left_out = chosen(config, shapes, str(prefix))
    tensors: dict[str, Tensor] = {}
    for name, public, _, transposed in names:
        tensor = torch.from_numpy(bundle.read(name))
        if not tensor.is_floating_point():
            raise TokmillError(
                f"the variable {name!r} is of {bundle.entries[name].kind}, not of fractions",
                where=str(prefix),
                hint="fetch the checkpoint again",
            )
        tensors[public] = (tensor.T if transposed else tensor).float()
    return BertCheckpoint(config, tensors, words, left_out)


def convert_bert(place: Path | str, out: Path | str, *, verify: bool = True) -> BertCheckpoint:
    """Write a checkpoint of Google's BERT code as a folder that transformers reads.

    Args: as of `read_bert`; `out` is a new folder, and config.json, written last, says that it is
    whole. Returns what was read.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise TokmillError("a file stands there", where=str(out), hint="name a new folder")
    with machine_errors("read", out):
        others = {path.name for path in out.iterdir()} - set(WRITTEN) if out.exists() else set()
    if others:
        raise TokmillError("the folder holds other files", where=str(out), hint="name a new folder")
    found = read_bert(place, verify=verify)
    make_folder(out)
    write_tensors(out / MODEL, found.tensors, {"format": "pt"})
    if found.words:
        write_file(out / WORDS, "".join(f"{word}\n" for word in found.words))
        tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_cased(found.words)}
        write_file(out / TOKENIZER_CONFIG, encode(tokenizer))
    ids = {"pad_token_id": found.words.index("[PAD]")} if "[PAD]" in found.words else {}
    write_file(out / CONFIG, encode(found.config.to_config() | ids))
    return found


def read_words(path: Path, rows: int) -> list[str]:
    """Return the tokens of a vocab.txt, a line each, for a model with `rows` ids.

    Without the file there are none.
    """
    if not path.exists():
        return []
    with machine_errors("read", path), open(path, "rb") as handle:
        data = handle.read(MOST_WORDS + 1)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise TokmillError(
            f"byte {error.start} is no UTF-8", where=str(path), hint="fetch the file again"
        ) from None
    words = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if len(data) > MOST_WORDS or len(words) > rows:
        raise TokmillError(
            f"the file has {len(words):,} lines, and the model ids for {rows:,}",
            where=str(path),
            hint=f"{BERT_CONFIG} and {WORDS} are not of one model",
        )
    return words


def lower_cased(words: Sequence[str]) -> bool:
    """Say whether the vocabulary is of text in lower case: nothing but `[CLS]` has a capital."""
    return all(word == word.lower() or word[:1] == "[" for word in words)
