"""The encoder against BERT and DistilBERT of transformers with the same weights.

Rows have two segments, and padding. Compared are hidden states, the pooled vector, the logits and
losses of heads that compute the masked positions alone, and the gradient of every weight.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tokmill.feed.feed import Batch
from tokmill.models.heads import Classes, Heads, Pooler, Transform
from tokmill.models.model import Tensors
from tokmill.models.model_inputs import Inputs, predicted, taken
from tokmill.models.transformers.encoder import Encoder, EncoderConfig
from tokmill.tasks.task import to_tensors
from tokmill.training.engines.tensors import write_tensors

VOCAB, LENGTH = 50, 24
LENGTHS = [24, 17, 5]
"""Of rows; padding is behind."""
MASKED = [[1, 2, 9, 23], [3, 16], []]
"""Positions of rows that are predicted: not as many in each, and in one none."""

# In a process of its own: the warnings of transformers are not ours.
PEER = """
import json, pathlib, sys, torch, transformers
from safetensors.torch import load_file, save_file
folder = pathlib.Path(sys.argv[1])
rows = load_file(folder / "rows.safetensors")
for name, (kind, keys) in json.loads((folder / "cases.json").read_text()).items():
    config = getattr(transformers, kind + "Config")(attn_implementation="eager", **keys)
    bert = kind == "Bert"
    model = transformers.BertForPreTraining if bert else transformers.DistilBertForMaskedLM
    model = model(config).float().eval()
    left = model.load_state_dict(load_file(folder / f"{name}-weights.safetensors"), strict=False)
    tied = "cls.predictions.decoder" if bert else "vocab_projector"
    wanted = {tied + ".weight", *([tied + ".bias"] if bert else [])}
    assert set(left.missing_keys) == wanted and not left.unexpected_keys, left
    asked = {"input_ids": rows["ids"], "attention_mask": rows["mask"], "labels": rows["labels"]}
    if bert:
        asked |= {"token_type_ids": rows["segment"], "next_sentence_label": rows["next"]}
    out = model(output_hidden_states=True, **asked)
    out.loss.backward()
    answer = {"hidden": out.hidden_states[-1], "loss": out.loss.reshape(1)}
    if bert:
        asked = {k: v for k, v in asked.items() if "label" not in k}
        answer |= {"logits": out.prediction_logits, "next": out.seq_relationship_logits}
        answer |= {"pooled": model.bert(**asked).pooler_output}
    else:
        answer["logits"] = out.logits
    answer |= {"gradient." + name: p.grad for name, p in model.named_parameters()}
    answer = {name: value.detach().contiguous().clone() for name, value in answer.items()}
    save_file(answer, folder / f"{name}-out.safetensors")
"""

BERT_BLOCK = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
BERT = {
    "model.fields.embeddings.column_token": "bert.embeddings.word_embeddings",
    "model.fields.embeddings.column_segment": "bert.embeddings.token_type_embeddings",
    "model.positions": "bert.embeddings.position_embeddings",
    "model.embedding_norm": "bert.embeddings.LayerNorm",
    "heads.transform.linear": "cls.predictions.transform.dense",
    "heads.transform.norm": "cls.predictions.transform.LayerNorm",
    "heads.biases": "cls.predictions",
    "pooler.linear": "bert.pooler.dense",
    "next.linear": "cls.seq_relationship",
}
DISTILBERT_BLOCK = {
    "attention.q": "attention.q_lin",
    "attention.k": "attention.k_lin",
    "attention.v": "attention.v_lin",
    "attention.o": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "feed_forward.up": "ffn.lin1",
    "feed_forward.down": "ffn.lin2",
    "feed_forward_norm": "output_layer_norm",
}
DISTILBERT = {
    "model.fields.embeddings.column_token": "distilbert.embeddings.word_embeddings",
    "model.positions": "distilbert.embeddings.position_embeddings",
    "model.embedding_norm": "distilbert.embeddings.LayerNorm",
    "heads.transform.linear": "vocab_transform",
    "heads.transform.norm": "vocab_layer_norm",
    "heads.biases": "vocab_projector",
}


class Case(NamedTuple):
    """Our configuration, their class, and the keys that are the same there."""

    config: EncoderConfig
    kind: str
    keys: dict[str, Any]


class Learner(nn.Module):
    """An encoder with the heads of BERT's or DistilBERT's pre-training."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.two = case.kind == "Bert"
        made = {"segment": 2} if self.two else {}
        self.model = Encoder(case.config, Inputs({"token": VOCAB}, made=made))
        dim = self.model.dim
        transform = Transform(dim, eps=case.config.norm_eps if self.two else 1e-12)
        self.heads = Heads(self.model, {"token": VOCAB}, tied=True, bias=True, transform=transform)
        if self.two:
            self.pooler, self.next = Pooler(dim), Classes(dim, 2)


def case(kind: str = "Bert", **keys: Any) -> Case:
    """Return a configuration with what transformers calls the same."""
    config = EncoderConfig(**{"context": LENGTH} | keys)
    act = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation]
    if kind == "Bert":
        theirs = {
            "hidden_size": config.dim,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "intermediate_size": config.feed_forward,
            "max_position_embeddings": config.context,
            "layer_norm_eps": config.norm_eps,
            "hidden_act": act,
        }
    else:
        theirs = {
            "dim": config.dim,
            "n_layers": config.layers,
            "n_heads": config.heads,
            "hidden_dim": config.feed_forward,
            "max_position_embeddings": config.context,
            "activation": act,
        }
    # With a padding id their embedding would get no gradient of that id's inputs.
    return Case(config, kind, {**theirs, "vocab_size": VOCAB, "pad_token_id": None})


CASES = {
    "bert": case(dim=32, layers=2, heads=4),
    "one-layer": case(dim=16, layers=1, heads=2, context=40),
    "odd-sizes": case(dim=21, layers=3, heads=3, hidden=50, norm_eps=1e-3),
    "distilbert": case("DistilBert", dim=32, layers=2, heads=4),
}


def translated(case: Case, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our named tensors → theirs."""
    outer, block, layers = (
        (BERT, BERT_BLOCK, "bert.encoder.layer")
        if case.kind == "Bert"
        else (DISTILBERT, DISTILBERT_BLOCK, "distilbert.transformer.layer")
    )
    theirs = {}
    for name, tensor in tensors.items():
        part, _, leaf = name.rpartition(".")
        if part.startswith("model.blocks."):
            _, _, number, rest = part.split(".", 3)
            theirs[f"{layers}.{number}.{block[rest]}.{leaf}"] = tensor
        else:
            theirs[f"{outer[part]}.{'bias' if part == 'heads.biases' else leaf}"] = tensor
    return theirs


def learner(case: Case) -> Learner:
    """Return a case's model with weights that leave no gradient small."""
    torch.manual_seed(0)
    made = Learner(case)
    for name, parameter in made.named_parameters():
        scale = parameter.ndim == 1 and name.endswith("norm.weight")
        nn.init.normal_(parameter, mean=float(scale), std=0.2)
    return made.eval()


def rows() -> dict[str, np.ndarray]:
    """Ids, segments, targets and a label of rows that are padded."""
    random = np.random.default_rng(0)
    shape = len(LENGTHS), LENGTH
    inside = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    targets = np.full(shape, -1)
    for row, places in enumerate(MASKED):
        targets[row, places] = random.integers(0, VOCAB, len(places))
    ids = np.where(inside, random.integers(0, VOCAB, shape), 0)
    segment = ((np.arange(LENGTH) >= 3) & inside).astype(np.int64)
    return {"ids": ids, "segment": segment, "inside": inside, "targets": targets}


def batch_of(made: Learner, document: np.ndarray, **columns: np.ndarray) -> Tensors:
    wanted = {name: columns[name] for name in made.model.fields.sizes}
    keys = np.zeros(len(document), np.uint64)
    return to_tensors(Batch(wanted, document.astype(np.int32), keys), torch.device("cpu"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers computes, of all cases."""
    folder = tmp_path_factory.mktemp("bert")
    given = rows()
    tensors = {
        "ids": given["ids"],
        "segment": given["segment"],
        "mask": given["inside"].astype(np.int64),
        "labels": np.where(given["targets"] < 0, -100, given["targets"]),
        "next": np.array([1, 0, 1]),
    }
    write_tensors(
        folder / "rows.safetensors", {name: torch.from_numpy(x) for name, x in tensors.items()}
    )
    for name, one in CASES.items():
        weights = {key: p.detach() for key, p in learner(one).named_parameters()}
        write_tensors(folder / f"{name}-weights.safetensors", translated(one, weights))
    asked = {name: [one.kind, one.keys] for name, one in CASES.items()}
    (folder / "cases.json").write_text(json.dumps(asked))
    subprocess.run([sys.executable, "-c", PEER, folder], check=True)
    return folder


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_logits_are_theirs(name: str, answers: Path) -> None:
    theirs = load_file(answers / f"{name}-out.safetensors")
    given, made = rows(), learner(CASES[name])
    batch = batch_of(
        made, np.where(given["inside"], 0, -1), token=given["ids"], segment=given["segment"]
    )
    assert not batch.whole
    with torch.no_grad():
        hidden = made.model(batch)
        logits = made.heads.logits(made.model, hidden, "token")
    inside = torch.from_numpy(given["inside"])
    close(hidden[inside], theirs["hidden"][inside])
    close(logits[inside], theirs["logits"][inside])
    if made.two:
        close(made.pooler(hidden), theirs["pooled"])
        close(made.next(made.pooler(hidden)), theirs["next"])


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_are_the_padded_ones(name: str, answers: Path) -> None:
    """All three in one row: none sees another, and positions begin with each."""
    theirs = load_file(answers / f"{name}-out.safetensors")
    given, made = rows(), learner(CASES[name])
    inside = given["inside"]
    document = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None]
    columns = {"token": given["ids"][inside][None], "segment": given["segment"][inside][None]}
    with torch.no_grad():
        hidden = made.model(batch_of(made, document, **columns))
    close(hidden[0], theirs["hidden"][torch.from_numpy(inside)])


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_of_masked_positions_are_theirs(name: str, answers: Path) -> None:
    """The last layer and the heads compute the first position of a row and the masked ones."""
    theirs = load_file(answers / f"{name}-out.safetensors")
    given, made = rows(), learner(CASES[name])
    batch = batch_of(
        made, np.where(given["inside"], 0, -1), token=given["ids"], segment=given["segment"]
    )
    places, targets = predicted({"token": given["targets"]})
    assert places.shape == (3, 4)
    # The pooler reads the first position.
    places = np.concatenate([np.zeros((3, 1), np.int64), places], 1)
    hidden = made.model(batch, torch.from_numpy(places))
    assert hidden.shape == (3, 5, CASES[name].config.dim)
    close(hidden, taken(theirs["hidden"], torch.from_numpy(places)))
    count = int((given["targets"] >= 0).sum())
    wanted = {column: torch.from_numpy(target) for column, target in targets.items()}
    loss = made.heads.losses(made.model, hidden[:, 1:], wanted)["token"] / count
    if made.two:
        loss = loss + made.next.loss(made.pooler(hidden), torch.tensor([1, 0, 1])) / 3
    loss.backward()
    torch.testing.assert_close(loss, theirs["loss"][0], atol=1e-6, rtol=1e-6)
    gradients = {key: p.grad for key, p in made.named_parameters() if p.grad is not None}
    mine = translated(CASES[name], gradients)
    kept = {key.removeprefix("gradient.") for key in theirs if key.startswith("gradient.")}
    assert mine.keys() == kept
    for key, value in mine.items():
        torch.testing.assert_close(value, theirs[f"gradient.{key}"], atol=1e-5, rtol=1e-4)
