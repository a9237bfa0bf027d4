"""Chats, from the command line to a model: only what assistants say is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from making import jsonl
from tokmill.feed.feed import Feed
from tokmill.feed.packed import Packed
from tokmill.store.store import Store
from tokmill.tasks.next_token import nothing_to_learn, targets_of


def test_targets_are_the_tokens_that_are_learned(tmp_path: Path, tokmill: Any) -> None:
    rows = [
        {"messages": [{"role": r, "content": f"{r} {i}"} for r in ("user", "assistant") * 2]}
        for i in range(50)
    ]
    path = jsonl(tmp_path / "chats.jsonl", rows)
    tokmill("build", "chat", path, "-o", "s", "--vocab-size", "300", "-q")
    store = Store(tmp_path / "s")
    learned: list[int] = []
    rows_of = Packed(store, 97, overlap=1)
    feed = Feed(rows_of, 1, shuffle=False, columns=["token", "loss"])
    for step in range(len(rows_of)):
        batch = feed.batch(step)
        targets = targets_of(batch, ["token"], nothing_to_learn(batch, {}))["token"]
        learned += targets[targets >= 0].tolist()
    wanted = [int(i) for r in store for i in r["token"][r["loss"] == 1]]
    assert sorted(learned) == sorted(wanted)
    assert 0 < len(wanted) < store.tokens
    assert np.mean([r["loss"][0] for r in store]) == 0
