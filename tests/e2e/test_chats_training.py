"""Chats, from the command line to a model: only what assistants say is learned."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from making import jsonl
from tokmill.feed.feed import Feed
from tokmill.feed.packed import Packed
from tokmill.store.store import Store
from tokmill.tasks.next_token import nothing_to_learn, targets_of

ANSWER = "one two three"


def test_only_the_assistant_is_learned(tmp_path: Path, tokmill: Any) -> None:
    """Users talk at random, assistants say one thing: its loss alone can fall to nothing."""
    draw = random.Random(1)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "".join(draw.choices("abcdefghijklmnopqrst", k=24))},
                {"role": "assistant", "content": ANSWER},
            ]
        }
        for _ in range(400)
    ]
    path = jsonl(tmp_path / "chats.jsonl", rows)
    last = {}
    for learn in ("assistant", "all"):
        done = tokmill(
            *("build", "chat", path, "-o", learn, "--vocab-size", "300", "--learn", learn, "-q")
        )
        assert "tokens that are learned" in done.stdout
        tokmill(
            *("train", learn, "-o", f"run-{learn}", "--steps", "60", "-q"),
            *("--set", "task.rows=packed", "--set", "task.length=128", "--set", "model.dim=32"),
            *("--set", "model.layers=1", "--set", "batch_size=4", "--set", "learning_rate=1e-2"),
        )
        lines = (tmp_path / f"run-{learn}/metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line) for line in lines]
        last[learn] = [line["loss"] for line in losses if "loss" in line][-1]
    assert last["assistant"] < 0.2
    assert last["all"] > 1.0


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
