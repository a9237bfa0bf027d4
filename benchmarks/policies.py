"""Embeddings of the policies that choose schedules: weights, and time of a batch of 16 operations.

The operations are those of a few modules in the middle of random schedules. Forward is what an
acting policy does, without gradients; an update is forward and backward. Beside the encoders runs
transformers' DistilBertModel of the same sizes on the same ids, whole sequences of it.

    python benchmarks/policies.py

Contestants take turns, and the best round counts. Times are CPU times of one thread: beside a
policy schedules are compiled and measured.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from measure import markdown
from tokmill.mlir.loops import legal
from tokmill.mlir.loops import schedule as actions
from tokmill.mlir.modules import problem
from tokmill.mlir.tokens import views
from tokmill.mlir.tokens.features import Sizes
from tokmill.rl.embedding import embeddings
from tokmill.rl.embedding.distilbert import DistilBert

ROWS, ROUNDS = 16, 2
LINES = (
    "matmul 512 512 512, relu",
    "conv_2d_nchw 1 64 58 64 3, relu, pooling 2 2",
    "batch_matmul 8 64 64 64",
    "softmax 128 512",
)
LARGE = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 6}
ORIGINAL = {
    **LARGE,
    "tokens": "buckets",
    "max_seq_length": 128,
    "vocab_size": 10_000,
    "truncate": True,
    "seed_compatible": True,
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("lstm", {}),
    "loop_transformer": ("loop_transformer", {}),
    "distilbert": ("distilbert", {}),
    "distilbert, buckets": ("distilbert", {"tokens": "buckets"}),
    "distilbert, 6 × 12 × 768": ("distilbert", LARGE),
    "distilbert, MLIR-RL's (truncated to 128 buckets)": ("distilbert", ORIGINAL),
}


def observations(model_type: str, config: dict[str, Any]) -> tuple[Any, list[Any], float]:
    """Return spaces, 16 observations, and the seconds that making them took."""
    problems = [problem.of_line(line) for line in LINES]
    sizes = Sizes.of((each for one in problems for each in one.operations), normalize="log2")
    view = views.make(embeddings.view_of(model_type, {model_type: config}), sizes, problems)
    chance = np.random.default_rng(0)
    states = []
    while len(states) < ROWS:
        one = problems[len(states) % len(problems)]
        operation = one.operations[int(chance.integers(len(one.operations)))]
        state = legal.begin(operation)
        for _ in range(int(chance.integers(4))):
            cut = [
                int(chance.choice(np.flatnonzero(legal.tiles(state, loop))))
                for loop in range(len(state.bounds))
            ]
            if any(cut) and legal.allowed(state)["tile"]:
                chosen = tuple(legal.TILES[index] for index in cut)
                state = legal.take(state, actions.Tile(operation.tag, chosen))
        states.append((state, views.producer_of(one, operation)))
    seconds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        found = [view(state, producer) for state, producer in states]
        seconds.append(time.process_time() - begin)
    return view.spaces(), found, min(seconds)


def peer_of(embedding: DistilBert, given: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Return transformers' DistilBertModel of the same sizes on the same ids."""
    from transformers import DistilBertConfig, DistilBertModel

    config = embedding.encoder.config
    model = DistilBertModel(
        DistilBertConfig(
            vocab_size=embedding.encoder.fields.sizes["token"],
            max_position_embeddings=config.context,
            n_layers=config.layers,
            n_heads=config.heads,
            dim=config.dim,
            hidden_dim=config.feed_forward,
            dropout=0.0,
            attention_dropout=0.0,
            pad_token_id=2,
        )
    )
    keep = int(given["mask"].sum(dim=1).max())
    ids, mask = given["ids"][:, :keep], given["mask"][:, :keep]
    return lambda: model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]


def main() -> list[str]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], Tensor]] = {}
    peers: dict[str, Callable[[], Tensor]] = {}
    facts: dict[str, tuple[int, int, float]] = {}
    for name, (kind, config) in WAYS.items():
        spaces, found, seconds = observations(kind, config)
        embedding = embeddings.make(kind, spaces, {kind: config})
        given = embeddings.batch(found)
        length = int(given["mask"].sum(dim=1).max()) if "mask" in given else 2
        facts[name] = embeddings.weights_of(embedding), length, seconds
        calls[name] = lambda embedding=embedding, given=given: embedding(given)
        if isinstance(embedding, DistilBert):
            peers[name] = peer_of(embedding, given)
    forward = times({**calls, **{f"{name} peer": one for name, one in peers.items()}}, acting)
    update = times(calls, learning)
    torch.set_num_threads(threads)
    rows = []
    for name, (weights, length, seconds) in facts.items():
        mine, other = forward[name], forward.get(f"{name} peer")
        beside = [f"{other * 1e3:.1f} ms", f"{other / mine:.2f}"] if other else ["–", "–"]
        rows.append([
            name, f"{weights / 1e6:.2f} M", str(length), f"{seconds * 1e3:.1f} ms",
            f"{mine * 1e3:.1f} ms", *beside, f"{update[name] * 1e3:.1f} ms",
        ])  # fmt: skip
    head = [
        "embedding", "weights", "tokens", "observations", "forward", "peer", "ratio", "update"
    ]  # fmt: skip
    return [
        f"Batches of {ROWS} operations, CPU time of one thread, best of {ROUNDS} rounds. "
        "Reference: transformers' DistilBertModel of the same sizes.",
        "",
        *markdown(head, rows),
    ]


def acting(call: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        call()


def learning(call: Callable[[], Tensor]) -> None:
    call().square().mean().backward()


def times(
    calls: dict[str, Callable[[], Tensor]], run: Callable[[Callable[[], Tensor]], None]
) -> dict[str, float]:
    best = dict.fromkeys(calls, np.inf)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.process_time()
            run(call)
            best[name] = min(best[name], time.process_time() - begin)
    return best


if __name__ == "__main__":
    print("\n".join(main()))
