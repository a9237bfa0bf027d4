"""Google's BERT checkpoints of TensorFlow as runs, read without TensorFlow.

FOLDER/                       what Google publishes
  bert_model.ckpt.index  bert_model.ckpt.data-00000-of-00001
  bert_config.json
  vocab.txt
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokmill.base.errors import TokmillError
from tokmill.models.public.public_encoders import GoogleBert, chosen
from tokmill.training.runs.exchange import find_vocabulary, read_public, run_of
from tokmill.training.runs.run import Run
from tokmill.training.runs.tensorflow.tensor_bundle import TensorBundle, find_bundle

BERT_CONFIG, WORDS = "bert_config.json", "vocab.txt"


class BertCheckpoint(NamedTuple):
    """A checkpoint under public names."""

    config: GoogleBert
    tensors: dict[str, Tensor]
    """Name in transformers → tensor in float32; it stays in its file until it is read. Whether they
    are those of a BERT is not known yet."""
    place: Path
    left_out: list[str]
    """Variables of the optimiser."""


def read_bert(place: Path | str) -> BertCheckpoint:
    """Read a checkpoint of Google's BERT code."""
    prefix = find_bundle(Path(place))
    file = prefix.with_name(BERT_CONFIG)
    if not file.exists():
        raise TokmillError(
            f"there is no {BERT_CONFIG}, which says how many heads the model has",
            where=str(prefix.parent),
            hint="Google publishes it with the checkpoint: put it beside the other files",
        )
    config = read_public(file, GoogleBert)
    bundle = TensorBundle(prefix)
    names, left_out = chosen(bundle.entries, str(prefix))
    tensors: dict[str, Tensor] = {}
    for name, public in names.items():
        tensor = torch.from_numpy(bundle.read(name))
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        tensors[public] = tensor.T if name.endswith("/kernel") else tensor
    return BertCheckpoint(config, tensors, prefix.parent, left_out)


def import_bert(
    place: Path | str,
    out: Path | str,
    *,
    tokenizer: Path | str | None = None,
    length: int = 0,
) -> Run:
    """Make a run at step 0 of a checkpoint of Google's BERT code, of the task `sentence_pair`."""
    bert = read_bert(place)
    config, words = bert.config.to_config(), bert.place / WORDS
    if tokenizer is None and words.exists():
        tokenizer = words
    rows = bert.config.vocab_size
    vocabulary = find_vocabulary(bert.place, tokenizer, config, rows, {}) if tokenizer else None
    where = bert.place / BERT_CONFIG
    run = run_of(config, bert.tensors, vocabulary, Path(out), length, where)
    notes = []
    if bert.left_out:
        count, first = len(bert.left_out), bert.left_out[0]
        notes.append(f"left out: {count} variables of the optimiser ({first}, …)")
    return Run(run.path, run.step, run.metrics, (*run.notes, *notes))
