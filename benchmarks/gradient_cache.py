"""A step of the task contrastive: the gradient cache beside one plain forward and backward pass.

    python benchmarks/gradient_cache.py [ENTRIES]

Each contestant is a process of its own, with random records of 128 tokens and an encoder of 128 × 2
layers; 3 steps on one thread, of which the one with the least CPU time counts. The loss and the
norm of the gradient must agree.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

LENGTH, STEPS = 128, 3
CONTESTANTS = {
    "plain: one pass over all rows": 0,
    "gradient cache, micro-batches of 2,048 tokens": 2048,
    "gradient cache, micro-batches of 8,192 tokens": 8192,
    "gradient cache, one micro-batch": 1 << 30,
}


def step(entries: int, micro_tokens: int) -> dict[str, float]:
    """Return seconds and peak MiB of a step in this process, and what it computed."""
    import torch

    from tokmill.models.model import Tensors
    from tokmill.models.model_inputs import Inputs
    from tokmill.models.transformers.encoder import Encoder, EncoderConfig
    from tokmill.tasks.comparison.contrastive import Contrastive, ContrastiveConfig
    from tokmill.training.engines.compared_step import compare_step
    from tokmill.training.engines.engine import Engine
    from tokmill.training.recipe.config import OptimConfig, RunConfig

    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = Inputs({"token": 2000})
    model = Encoder(EncoderConfig(layers=2), inputs)
    task = Contrastive(ContrastiveConfig(length=LENGTH), model, inputs)
    engine = Engine(RunConfig(device="cpu"))
    engine.prepare(task, OptimConfig(lr=0.0, clip=0.0))
    rows = 2 * entries
    ids, number = torch.randint(0, 2000, (rows, LENGTH)), torch.arange(rows)
    unknown = torch.full((rows,), -1)
    values = {"role": unknown + 1, "record": unknown, "group": unknown}
    values["members"] = unknown[:, None]
    place = torch.arange(LENGTH).expand(rows, -1)

    def part(of: slice) -> Tensors:
        mine = {name: value[of] for name, value in values.items()}
        return Tensors(
            {"token": ids[of]}, ids[of] * 0, place[of], True, values=mine, entry=number[of] // 2
        )

    each = max(2, min(rows, micro_tokens // LENGTH if micro_tokens else rows))
    parts = [part(slice(start, start + each)) for start in range(0, rows, each)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    taken = []
    for _ in range(STEPS):
        started = time.process_time()
        if micro_tokens:
            sums = compare_step(engine, task, parts, 1 / entries)
        else:
            sums = engine.micro(parts[0], True, 1 / entries)
        taken.append(time.process_time() - started)
        norm = engine.step(0.0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"loss": float(sums["loss"]) / entries, "norm": norm}
    return {"seconds": min(taken), "MiB": peak - before, **found}


def main(entries: int = 64) -> list[str]:
    """Measure; return the section for RESULTS.md."""
    found = {}
    for name, micro_tokens in CONTESTANTS.items():
        command = [sys.executable, __file__, str(entries), str(micro_tokens)]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = json.loads(made.stdout)
    first = next(iter(found.values()))
    lines = [
        f"A step of {2 * entries} rows of {LENGTH} tokens on one thread, an encoder of 128 × 2 "
        "layers; loss and norm of the gradient agree to 1e-4.",
        "",
        "| | CPU s a step | MiB of a step |",
        "|---|---|---|",
    ]
    for name, one in found.items():
        for key in ("loss", "norm"):
            if abs(one[key] - first[key]) > 1e-4 * first[key]:
                raise SystemExit(f"{name}: a {key} of {one[key]}, not {first[key]}")
        lines.append(f"| {name} | {one['seconds']:.2f} | {one['MiB']:.0f} |")
    return lines


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(step(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        print("\n".join(main(*map(int, sys.argv[1:]))))
