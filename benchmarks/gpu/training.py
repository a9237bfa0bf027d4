"""Training on a GPU in bf16: tokmill beside nanoGPT and transformers' Trainer, one after the other.

GPT-2 of 124 million weights on rows of 1,024 ids, BERT of the same width on rows of 512, and
RWKV-7, for which the others have nothing. Each contestant is a process of its own; its rate leaves
out the first `WARM` steps. The gate is the loss: all learn from the same tokens, and the last loss
of each is printed.

    python benchmarks/gpu/training.py CACHE [NANOGPT]

CACHE: `train.bin`, ids below 50,304 in uint16, and stores of it: `train`, and `masked`, whose
vocabulary has a mask (README.md); NANOGPT: a clone of github.com/karpathy/nanoGPT, of which
`model.py` is imported.
"""

import importlib
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

WARM, STEPS = 20, 60
IDS = 50_304
"""nanoGPT's: a multiple of 64 above the ids of the file."""
PEAK = 989e12
"""Dense bf16 operations a second of an H100 (its data sheet)."""
GPT = {"dim": 768, "layers": 12, "heads": 12, "length": 1024, "batch": 64, "micro": 32}
BERT = GPT | {"length": 512, "batch": 128, "micro": 64}
RWKV = GPT | {"kind": "rwkv7", "micro": 8}
Setting = dict[str, Any]


def flops(setting: Setting) -> float:
    """Return the operations a token: 6 a weight of blocks and head, and those of attention.

    As `flops_per_token` of the models. BERT's head is counted for the masked positions alone, also
    where a program computes it for all.
    """
    dim, layers, length = setting["dim"], setting["layers"], setting["length"]
    blocks, attention = 72.0 * layers * dim * dim, 12.0 * layers * dim * length
    if setting["kind"] == "masked":
        return blocks + attention + 6.0 * dim * IDS * 0.15
    return blocks + attention / 2 + 6.0 * dim * IDS


def rate(times: list[float], setting: Setting) -> float:
    tokens = setting["batch"] * setting["length"] * (STEPS - WARM)
    return float(tokens / (times[STEPS - 1] - times[WARM - 1]))


def tokmill(folder: Path, setting: Setting) -> dict[str, Any]:
    """Train with tokmill; its times are those of metrics.jsonl."""
    from tokmill import train

    dim, length = setting["dim"], setting["length"]
    models: dict[str, dict[str, Any]] = {
        "next_token": {"norm": "layer", "position": "learned", "context": length,
                       "activation": "gelu_tanh", "bias": True, "heads": setting["heads"]},
        "masked": {"kind": "encoder", "context": length, "heads": setting["heads"]},
        "rwkv7": {"kind": "rwkv7", "head_dim": 64},
    }  # fmt: skip
    kind, store = "next_token", folder / "train"
    if setting["kind"] == "masked":
        kind, store = "masked", folder / "masked"
    recipe = {
        "data": {"train": str(store), "batch": setting["batch"]},
        "model": {"dim": dim, "layers": setting["layers"], **models[setting["kind"]]},
        "task": {"kind": kind, "length": length},
        "optim": {"lr": 6e-4, "warmup": 10},
        "run": {"steps": STEPS, "device": "cuda", "precision": "bf16", "log_every": 1,
                "micro_tokens": setting["micro"] * length, "checkpoint_every": 0,
                "eval_every": 0, "compile": setting["compile"]},
    }  # fmt: skip
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    train(recipe, out, quiet=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    lines = [line for line in lines if "seconds" in line]
    return {"times": [line["seconds"] for line in lines], "loss": lines[-1]["loss"]}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of the file for transformers; of BERT 15 % are masked, as one id."""

    def __init__(self, path: Path, setting: Setting) -> None:
        self.ids, self.setting = np.memmap(path, np.uint16, "r"), setting

    def __len__(self) -> int:
        return (len(self.ids) - 1) // int(self.setting["length"])

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        length = self.setting["length"]
        row = torch.from_numpy(self.ids[number * length :][: length + 1].astype(np.int64))
        if self.setting["kind"] != "masked":
            return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}
        hidden = torch.rand(length) < 0.15
        return {
            "input_ids": row[:-1].masked_fill(hidden, 0),
            "labels": row[:-1].masked_fill(~hidden, -100),
        }


def trainer(folder: Path, setting: Setting) -> dict[str, Any]:
    import transformers as t

    dim, length, layers = setting["dim"], setting["length"], setting["layers"]
    model: Any
    if setting["kind"] == "masked":
        model = t.BertForMaskedLM(
            t.BertConfig(
                vocab_size=IDS, hidden_size=dim, num_hidden_layers=layers,
                num_attention_heads=setting["heads"], intermediate_size=4 * dim,
                max_position_embeddings=length, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip
    else:
        model = t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=IDS, n_positions=length, n_embd=dim, n_layer=layers,
                n_head=setting["heads"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                bos_token_id=None, eos_token_id=None, use_cache=False,
            )
        )  # fmt: skip
    times: list[float] = []

    class Clock(t.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter())

    arguments = t.TrainingArguments(
        str(folder / "peer"), max_steps=STEPS, per_device_train_batch_size=setting["micro"],
        gradient_accumulation_steps=setting["batch"] // setting["micro"], learning_rate=6e-4,
        lr_scheduler_type="cosine", warmup_steps=10, weight_decay=0.1, adam_beta2=0.95,
        max_grad_norm=1.0, bf16=True, logging_steps=5, save_strategy="no", report_to="none",
        disable_tqdm=True, remove_unused_columns=False, optim="adamw_torch_fused",
        torch_compile=setting["compile"], dataloader_num_workers=4,
    )  # fmt: skip
    rows = Rows(folder / "train.bin", setting)
    done = t.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()])
    done.train()
    last = [entry["loss"] for entry in done.state.log_history if "loss" in entry][-1]
    return {"times": times, "loss": last}


def nanogpt(folder: Path, setting: Setting) -> dict[str, Any]:
    """Train nanoGPT's model as its train.py does: random rows, fused AdamW, torch.compile."""
    sys.path.insert(0, setting["nanogpt"])
    nano = importlib.import_module("model")

    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    length, micro = setting["length"], setting["micro"]
    config = nano.GPTConfig(
        block_size=length, vocab_size=IDS, n_layer=setting["layers"], n_head=setting["heads"],
        n_embd=setting["dim"], dropout=0.0, bias=True,
    )  # fmt: skip
    model = nano.GPT(config).cuda()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model) if setting["compile"] else model
    ids, times = np.memmap(folder / "train.bin", np.uint16, "r"), []

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(ids) - length, (micro,)).tolist()
        both = [
            torch.stack([torch.from_numpy(ids[i + k : i + k + length].astype(np.int64))
                         for i in starts])
            for k in (0, 1)
        ]  # fmt: skip
        x, y = (part.pin_memory().to("cuda", non_blocking=True) for part in both)
        return x, y

    parts = setting["batch"] // micro
    x, y = batch()
    value = math.nan
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 10)
        for _ in range(parts):
            with torch.autocast("cuda", torch.bfloat16):
                _, loss = compiled(x, y)
                loss = loss / parts
            x, y = batch()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item() * parts
        times.append(time.perf_counter())
    return {"times": times, "loss": value}


WORKERS = {"tokmill": tokmill, "Trainer": trainer, "nanoGPT": nanogpt}


def contestants(nano: str) -> list[tuple[str, Setting]]:
    gpt, bert = GPT | {"kind": "next_token"}, BERT | {"kind": "masked"}
    programs = [("tokmill", gpt), ("Trainer", gpt)]
    if nano:
        programs.append(("nanoGPT", gpt | {"nanogpt": nano}))
    programs += [("tokmill", RWKV), ("tokmill", bert), ("Trainer", bert)]
    return [
        (program, {**setting, "compile": compiled})
        for compiled in (True, False)
        for program, setting in programs
    ]


def measure(program: str, folder: Path, setting: Setting) -> dict[str, Any]:
    command = [sys.executable, __file__, program, str(folder), json.dumps(setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-12:]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def work(program: str, folder: Path, setting: Setting) -> None:
    answer = WORKERS[program](folder, setting)
    speed = rate(answer["times"], setting)
    share = flops(setting) * speed / PEAK if setting["kind"] != "rwkv7" else math.nan
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"rate": speed, "mfu": share, "gib": memory, "loss": answer["loss"]}))


def main(folder: Path, nano: str = "") -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print("| program | what | compiled | tokens/s | MFU | GiB | last loss |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for program, setting in contestants(nano):
        found = measure(program, folder, setting)
        if "error" in found:
            print("\n".join(found["error"]), flush=True)
            continue
        print(
            f"| {program} | {setting['kind']} | {'yes' if setting['compile'] else 'no'} | "
            f"{found['rate']:,.0f} | {found['mfu']:.2f} | {found['gib']:.1f} | "
            f"{found['loss']:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1] in WORKERS:
        work(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), *sys.argv[2:3])
