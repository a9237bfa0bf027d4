"""Masked language modelling: what is saved where positions that nobody predicts are not computed.

A step is a forward and a backward pass of an encoder (4 layers, 512 wide, 30,522 ids) over 8 whole
rows of 128 tokens, of which 15 % are predicted. Beside it run transformers' BertForMaskedLM with
the same weights, and the same model whose head sees the predicted positions alone, as the sparse
prediction of transformers' ModernBERT does. The gate is the loss: all have to have the same.

    python benchmarks/masked_head.py

Times are taken in turns, peaks in processes of their own.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from measure import highest, markdown
from tokmill.models.heads import Heads, Transform
from tokmill.models.model import Inputs, Tensors, predicted, taken
from tokmill.models.transformers.transformer import Encoder, EncoderConfig

VOCAB, ROWS, LENGTH, SHARE = 30_522, 8, 128, 0.15
CONFIG = EncoderConfig(dim=512, layers=4, heads=8, hidden=2048, context=LENGTH)
PEER = "transformers BertForMaskedLM"
SPARSE = "the same, head on masked positions only"
WAYS = (
    "all positions",
    "heads: masked positions only",
    "heads and last layer: masked positions only",
    PEER,
    SPARSE,
)
PARTS = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
    "fields.embeddings.column_token": "embeddings.word_embeddings",
    "fields.embeddings.column_segment": "embeddings.token_type_embeddings",
    "positions": "embeddings.position_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
Step = Callable[[], Tensor]


def rows() -> tuple[Tensor, np.ndarray]:
    """Return ids and targets, (B, T) each."""
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB, (ROWS, LENGTH))
    places = np.argsort(random.random((ROWS, LENGTH)), axis=1)[:, : round(SHARE * LENGTH)]
    targets = np.full_like(ids, -1)
    np.put_along_axis(targets, places, np.take_along_axis(ids, places, 1), 1)
    return torch.from_numpy(ids), targets


def learner() -> tuple[Encoder, Heads]:
    """Return the encoder and BERT's head for masked tokens."""
    torch.manual_seed(0)
    model = Encoder(CONFIG, Inputs({"token": VOCAB}, made={"segment": 2}))
    transform = Transform(model.dim)
    return model, Heads(model, {"token": VOCAB}, tied=True, bias=True, transform=transform)


def ours(way: str) -> Step:
    (model, heads), (ids, targets) = learner(), rows()
    columns = {"token": ids, "segment": torch.zeros_like(ids)}
    place = torch.arange(LENGTH).expand_as(ids)
    batch = Tensors(columns, torch.zeros_like(ids), place, whole=True)
    places, few = predicted({"token": targets})
    where = torch.from_numpy(places)
    at = torch.from_numpy(targets if way == WAYS[0] else few["token"])
    count = int((targets >= 0).sum())

    def step() -> Tensor:
        if way == WAYS[0]:
            states = model(batch)
        elif way == WAYS[1]:
            states = taken(model(batch), where)
        else:
            states = model(batch, where)
        loss = heads.losses(model, states, {"token": at})["token"] / count
        loss.backward()
        zero(model)
        zero(heads)
        return loss.detach()

    return step


def theirs(sparse: bool) -> Step:
    """Return a step of transformers' model with the same weights, without dropout.

    `sparse`: the head computes the predicted positions alone, by what is public of the model.
    """
    from transformers import BertConfig, BertForMaskedLM

    (model, heads), (ids, targets) = learner(), rows()
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
        intermediate_size=2048, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=None,
    )  # fmt: skip
    peer = BertForMaskedLM(config)
    weights = {}
    for name, tensor in model.state_dict().items():
        part, _, leaf = name.rpartition(".")
        if part.startswith("blocks."):
            _, number, part = part.split(".", 2)
            weights[f"bert.encoder.layer.{number}.{PARTS[part]}.{leaf}"] = tensor
        else:
            weights[f"bert.{PARTS[part]}.{leaf}"] = tensor
    weights |= {
        "cls.predictions.bias": heads.biases["column_token"],
        **{
            f"cls.predictions.transform.{name}.{leaf}": heads.state_dict()[
                f"transform.{part}.{leaf}"
            ]
            for name, part in (("dense", "linear"), ("LayerNorm", "norm"))
            for leaf in ("weight", "bias")
        },
    }
    left = peer.load_state_dict(weights, strict=False)
    if left.unexpected_keys or any("predictions.decoder" not in key for key in left.missing_keys):
        raise SystemExit(f"the peer is another model: {left}")
    labels = torch.from_numpy(np.where(targets < 0, -100, targets))

    def sparse_loss() -> Tensor:
        known = labels.flatten() >= 0
        states = peer.bert(input_ids=ids).last_hidden_state.flatten(0, 1)[known]
        return nn.functional.cross_entropy(peer.cls(states), labels.flatten()[known])

    def step() -> Tensor:
        loss: Tensor = sparse_loss() if sparse else peer(input_ids=ids, labels=labels).loss
        loss.backward()
        zero(peer)
        return loss.detach()

    return step


def zero(module: nn.Module) -> None:
    module.zero_grad(set_to_none=True)


def step_of(way: str) -> Step:
    return theirs(way == SPARSE) if way in (PEER, SPARSE) else ours(way)


def measure_peak(way: str) -> None:
    """Print by how much steps raise the peak of this process."""
    step = step_of(way)
    Path("/proc/self/clear_refs").write_text("5")
    before = highest()
    for _ in range(3):
        step()
    print(highest() - before)


def peak(way: str) -> int:
    """Return the bytes that a step adds to a process (a child)."""
    done = subprocess.run(
        [sys.executable, __file__, way], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def main(rounds: int = 8) -> list[str]:
    steps = {way: step_of(way) for way in WAYS}
    losses = {way: float(step()) for way, step in steps.items()}
    for way, loss in losses.items():
        if abs(loss - losses[PEER]) > 1e-6 * losses[PEER]:
            raise SystemExit(f"{way}: a loss of {loss}, not {losses[PEER]}")
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, step in steps.items():
            began = time.perf_counter(), time.process_time()
            step()
            ended = time.perf_counter(), time.process_time()
            times[way].append((ended[0] - began[0], ended[1] - began[1]))
    threads = torch.get_num_threads()
    lines = [
        "A forward and a backward pass, 8 rows of 128 tokens of which 15 % are predicted, 4",
        f"layers, 512 wide, {VOCAB:,} ids, fp32, {threads} threads; best round, losses equal",
        "to 1e-6.",
        "",
    ]
    rows = []
    for way in WAYS:
        wall, busy = (1e3 * min(column) for column in zip(*times[way], strict=True))
        rows.append([way, f"{wall:,.0f}", f"{busy:,.0f}", f"{peak(way) / 2**20:,.0f}"])
    head = ["variant", "ms per step", "CPU ms per step", "peak MiB without the weights"]
    return lines + markdown(head, rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure_peak(sys.argv[1])
    else:
        print("\n".join(main()))
