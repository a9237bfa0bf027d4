"""transformers' Trainer on a TokenDataset: its loss is that of the store's documents, and falls."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from making import token_store

SIZE, LENGTH = 23, 16

# In a process of its own: the warnings of transformers are not ours.
TRAINER = """
import json, sys, torch, tokmill
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from torch.nn import functional as F

def train(store, rows, folder, size, length, parts):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=size, n_positions=length, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None,
    )).eval()

    # Large enough that it matters where a token looks.
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3)

    # By hand: each part alone through the model, summed over the places that are learned.
    total = count = 0
    with torch.no_grad():
        for ids, learned in parts:
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            for place in learned:
                total += F.cross_entropy(logits[place - 1], torch.tensor(ids[place])).item()
                count += 1

    dataset = tokmill.TokenDataset(store, length, rows=rows)
    every = torch.utils.data.default_collate(list(dataset))
    own = model(**every, use_cache=False).loss.item()
    arguments = TrainingArguments(
        folder, max_steps=20, per_device_train_batch_size=len(dataset), learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    json.dump({"hand": total / count, "losses": [own, *losses]}, open(folder + "/answer.json", "w"))

for job in json.load(sys.stdin):
    train(*job)
"""


def documents() -> list[list[int]]:
    """Documents in which a token follows from the one before, some of them longer than a row."""
    random = np.random.default_rng(0)
    return [
        (
            1 + (random.integers(1, SIZE) + 3 * np.arange(random.integers(2, 40))) % (SIZE - 1)
        ).tolist()
        for _ in range(40)
    ]


def windows(found: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Rows of the ribbon with the places that are learned: not those where a document begins."""
    ribbon = [token for document in found for token in document]
    begins = set(np.cumsum([0, *map(len, found)]).tolist())
    rows = []
    for start in range(0, len(ribbon) - 1, LENGTH - 1):
        ids = ribbon[start : start + LENGTH]
        rows.append((ids, [i for i in range(1, len(ids)) if start + i not in begins]))
    return rows


def pieces(found: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Documents cut into pieces that share a token, each of which is read alone."""
    step = LENGTH - 1
    rows = [
        document[start : start + LENGTH]
        for document in found
        for start in range(0, max(1, len(document) - 1), step)
    ]
    return [(ids, list(range(1, len(ids)))) for ids in rows]


def test_loss_is_that_of_the_documents_and_falls(tmp_path: Path) -> None:
    found = documents()
    store = token_store(tmp_path / "store", [found[:25], found[25:]])
    jobs: list[list[object]] = []
    for rows, parts in (("windows", windows(found)), ("packed", pieces(found))):
        (tmp_path / rows).mkdir()
        jobs.append([str(store.path), rows, str(tmp_path / rows), SIZE, LENGTH, parts])
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAINER],
        input=json.dumps(jobs),
        text=True,
        check=True,
        timeout=300,
    )
    for rows in ("windows", "packed"):
        answer = json.loads((tmp_path / rows / "answer.json").read_text())
        assert len(answer["losses"]) == 21, rows
        assert answer["losses"][:2] == pytest.approx([answer["hand"]] * 2, abs=1e-3), rows
        assert answer["losses"][-1] < answer["losses"][0] / 2, rows
