"""transformers' GPT-2 under its Trainer, on a headerless uint16 file: rows of T tokens.

hf_trainer.py SETTINGS.json: what the file says is trained; what was measured is written to `out`.
Every row learns T targets, the last one too, as tokmill's rows do.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of T + 1 tokens that share one."""

    def __init__(self, path: str, length: int) -> None:
        self.ids, self.length = np.memmap(path, np.uint16, "r"), length

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        start = number * self.length
        row = torch.from_numpy(self.ids[start : start + self.length + 1].astype(np.int64))
        # The model shifts `labels` itself and so would lose the last target.
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


class Clock(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.times.append(time.perf_counter())


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, windows: Windows) -> float:
    """Return nats a token over all windows."""
    model.eval()
    total, count = 0.0, 0
    for number in range(len(windows)):
        row = windows[number]
        logits = model(input_ids=row["input_ids"][None]).logits[0]
        total += F.cross_entropy(logits, row["shift_labels"], reduction="sum").item()
        count += len(row["shift_labels"])
    return total / count


def main(settings: dict[str, Any]) -> None:
    torch.manual_seed(settings["seed"])
    length, clock = settings["length"], Clock()
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=settings["vocab"],
            n_positions=length,
            n_embd=settings["dim"],
            n_layer=settings["layers"],
            n_head=settings["heads"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )
    arguments = TrainingArguments(
        settings["out"] + "-trainer",
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["batch"],
        learning_rate=settings["lr"],
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=settings["warmup"],
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=settings["precision"] == "bf16",
        seed=settings["seed"],
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Windows(settings["train"], length),
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model()
    answer: dict[str, Any] = {"times": clock.times}
    if settings["val"]:
        answer["loss"] = held_out_loss(model, Windows(settings["val"], length))
    Path(settings["out"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
