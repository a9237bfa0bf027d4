"""The encoder of a policy from a run that was trained to predict hidden fields (`build mlir`)."""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import read_file
from tokmill.base.headers import loads_json, refused
from tokmill.mlir.tokens import field_tokens
from tokmill.models.model import PREFIX
from tokmill.models.transformers.transformer import EncoderConfig
from tokmill.rl.embedding.distilbert import DistilBert
from tokmill.rl.embedding.embeddings import Embedding
from tokmill.training.engines.tensors import MODEL, read_tensors
from tokmill.training.runs.checkpoint import checksum_of
from tokmill.training.runs.run import VOCAB, read_run
from tokmill.training.runs.weights import OF_MODEL, find_weights, in_words

KEYS = {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}
"""Key of an encoder → key of `model_config.distilbert`."""
TOKENS = "token.json"
"""The list of tokens in the vocabularies of a run."""
MOST = 1 << 20
"""Bytes of it."""
FREE = {"context", "dropout", "attention_dropout", "field_dim", "kind"}
"""Keys that may differ: tables are cut, and the others have no weights."""


class Names(msgspec.Struct):
    """A list of tokens."""

    tokens: list[str]


def take_encoder(embedding: Embedding, place: Path) -> list[str]:
    """Load the encoder of a run into a `distilbert`; return notes on what begins anew.

    Args:
        place: a run of the task masked with the model encoder on a store of `tokmill build mlir`,
            or a folder with weights in it.
    """
    if not isinstance(embedding, DistilBert) or "segments" not in embedding.reads:
        raise UsageError(
            'only a distilbert with tokens = "fields" starts from a run\'s encoder',
            hint="set model_type to distilbert",
        )
    run, folder = find_weights(place)
    config, facts = read_run(run)
    if not isinstance(config.model, EncoderConfig):
        raise TokmillError(
            f"the run's model is a {config.model.kind}, not an encoder",
            where=str(place),
            hint="train one by `tokmill train` with the task masked and the model encoder",
        )
    check_config(config.model, embedding.encoder.config, place)
    check_tokens(run, facts.columns.get("token", 0), embedding.encoder.fields.sizes["token"])
    tensors = read_tensors(folder / MODEL, checksum_of(folder / MODEL))
    return take(embedding.encoder, {
        name.removeprefix(OF_MODEL): one
        for name, one in tensors.items()
        if name.startswith(OF_MODEL)
    })  # fmt: skip


def check_tokens(run: Path, size: int, expected: int) -> None:
    file = run / VOCAB / TOKENS
    names = None
    if file.is_file():
        with refused(
            "the list of tokens cannot be read",
            file,
            hint="restore the run from where it was copied",
        ):
            names = loads_json(read_file(file, MOST), Names).tokens
    if size != expected or names != list(field_tokens.VOCABULARY):
        raise TokmillError(
            f"the run knows {size:,} tokens, which are not those of the fields of operations",
            where=str(run),
            hint="it is for runs on a store that `tokmill build mlir` of this version made",
        )


def check_config(pretrained: EncoderConfig, config: EncoderConfig, place: Path) -> None:
    pairs = {
        key: (value, getattr(config, key))
        for key, value in msgspec.structs.asdict(pretrained).items()
        if key not in FREE
    }
    pairs["hidden"] = pretrained.feed_forward, config.feed_forward
    pairs["kv_heads"] = pretrained.groups, config.groups
    differ = {key: values for key, values in pairs.items() if values[0] != values[1]}
    if differ:
        message = "; ".join(f"{key} is {a!r} there, {b!r} here" for key, (a, b) in differ.items())
        keys = [f"{KEYS[key]} = {values[0]}" for key, values in differ.items() if key in KEYS]
        raise TokmillError(
            f"the encoder differs: {message}",
            where=str(place),
            hint=f"in model_config.distilbert: {', '.join(keys)}"
            if keys
            else "train the run with the defaults of the model encoder",
        )


def take(encoder: torch.nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """Load the tensors with equal names; of tables of positions and depths the rows of both."""
    own = encoder.state_dict()
    tables = {"positions.weight", f"fields.embeddings.{PREFIX}depth.weight"}
    taken = {}
    for name, weight in own.items():
        other = tensors.get(name)
        if other is not None and name in tables and other.shape[1:] == weight.shape[1:]:
            rows = min(len(other), len(weight))
            other = torch.cat((other[:rows].to(weight.dtype), weight[rows:]))
        if other is not None and other.shape == weight.shape:
            taken[name] = other
    encoder.load_state_dict(taken, strict=False)
    anew = sorted(own.keys() - taken.keys())
    return [f"these weights begin anew: {in_words(anew)}"] if anew else []
