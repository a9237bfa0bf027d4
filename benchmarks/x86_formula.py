"""Train the authors' formulation of RWKV-7 on the rows of a tokmill run, from its first weights.

Rows, their order, the rows to evaluate on and the first weights come from the run's recipe; model,
optimiser and schedule are `peers/rwkv7_formula.py` and torch. It continues from its checkpoint.

    python benchmarks/x86_formula.py RUN OUT
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peers import rwkv7_formula as formula
from tokmill.models.model import Tensors
from tokmill.tasks.task import Task, to_tensors
from tokmill.training.data import Loader, make_feed, micro_batches, open_stores
from tokmill.training.engines.devices.device import keep_freed_memory, seed_random_states
from tokmill.training.loop import Validation, validation_of
from tokmill.training.recipe.config import TrainConfig
from tokmill.training.runs.run import inputs_of, make_task, read_run
from tokmill.training.runs.trackers import METRICS

CPU = torch.device("cpu")


def states(config: TrainConfig, weights: formula.Weights, batch: Tensors) -> Tensor:
    model, document = config.model, batch.document
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    x = formula.embedded(batch.columns, weights)
    return formula.hidden(x, begins, weights, model.layers, model.dim // model.head_dim)


def loss_of(config: TrainConfig, weights: formula.Weights, batch: Tensors) -> Tensor:
    """Return the summed loss over all columns, as the optimiser sees it."""
    found = states(config, weights, batch)
    parts = formula.losses(found, batch.targets, weights, config.task.pull)
    return torch.stack(list(parts)).sum()


def opened(run: Path) -> tuple[TrainConfig, Task, Any, Validation]:
    """Return recipe, a task with its first weights, feed and validation of a run."""
    config, facts = read_run(run)
    seed_random_states(config.run.seed)
    task = make_task(config, inputs_of(config, facts))
    validation = validation_of(config, facts, task)
    assert validation is not None
    return config, task, make_feed(config, task, open_stores(config.data)), validation


def held_out(
    config: TrainConfig, weights: formula.Weights, task: Task, validation: Validation
) -> float:
    """Return nats a token on the rows that the run is evaluated on."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in validation.batches(task):
            count += task.count(batch)
            for part in micro_batches(batch, config.run.micro_tokens):
                total += loss_of(config, weights, to_tensors(part, CPU)).item()
    return total / count


def learn(
    config: TrainConfig,
    weights: formula.Weights,
    optimizer: torch.optim.Optimizer,
    rows: Iterator[Any],
    steps: range,
) -> Iterator[tuple[int, float, float]]:
    """Do steps; yield how many are done, the loss a token and the norm of the gradient."""
    optim = config.optim
    learned = [weight for weight in weights.values() if weight.requires_grad]
    for step in steps:
        parts, count = next(rows)
        total = 0.0
        for part in parts:
            loss = loss_of(config, weights, part.tensors)
            (loss / count).backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(learned, optim.clip).item()
        now = formula.rate(step, config.run.steps, optim.warmup, optim.lr, optim.floor)
        for group in optimizer.param_groups:
            group["lr"] = now * group["scale"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield step + 1, total / count, norm


def main(run: Path, out: Path) -> None:
    """Train; log losses and CPU seconds as tokmill does."""
    keep_freed_memory()
    config, task, feed, validation = opened(run)
    weights = formula.trained(task.state_dict())
    optim = config.optim
    optimizer = torch.optim.AdamW(
        formula.groups(weights, optim.weight_decay),
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )
    out.mkdir(parents=True, exist_ok=True)
    checkpoint, done, spent = out / "checkpoint.pt", 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        done, spent = saved["step"], saved["cpu"]
        optimizer.load_state_dict(saved["optimizer"])
        for name, weight in weights.items():
            weight.data.copy_(saved["weights"][name])
    spent -= time.process_time()
    steps = range(done, config.run.steps)
    loader = Loader(feed, task, steps, micro_tokens=config.run.micro_tokens, device=CPU)

    def rows() -> Iterator[Any]:
        while True:
            yield loader.next()

    with loader, (out / METRICS).open("a") as log:
        for step, loss, norm in learn(config, weights, optimizer, rows(), steps):
            facts: dict[str, float] = {"step": step}
            if step % config.run.log_every == 0 or step == 1:
                facts |= {"loss": loss, "grad_norm": norm}
            if step % config.run.eval_every == 0 or step == config.run.steps:
                facts["val_loss"] = held_out(config, weights, task, validation)
            if len(facts) > 1:
                facts["cpu"] = spent + time.process_time()
                log.write(json.dumps(facts) + "\n")
                log.flush()
            if step % config.run.checkpoint_every == 0 or step == steps.stop:
                kept = {"weights": weights, "optimizer": optimizer.state_dict()}
                more = {"step": step, "cpu": spent + time.process_time()}
                torch.save(kept | more, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
