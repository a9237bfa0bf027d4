"""Sampling: tokmill beside transformers' `generate` with its cache, on the same weights, in turns.

A model with random weights is exported, and read by transformers. Both continue the same prompts
greedily, and have to make the same ids: there is no figure without that.

    python benchmarks/sampling.py CACHE
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from jsonl_store import remove
from tokmill.inference.drawing import Drawing
from tokmill.inference.sample import Row, continue_rows
from tokmill.inference.vectors import reading
from tokmill.store.schema import Column
from tokmill.tasks.next_token import NextToken
from tokmill.tasks.task_inputs import Facts
from tokmill.training.recipe.resolve import from_dict
from tokmill.training.runs.exchange import export_model, write_run
from tokmill.training.runs.run import inputs_of, make_task

TOKENS = 250
LENGTH, IDS = 512, 4096
STD = 0.2
"""Of weights: with the usual 0.02 a model would say one thing all the time."""
PROMPTS = (48, 8, 33, 17, 64, 5, 24, 12, 40, 9, 56, 28, 20, 6, 36, 14)
"""Ids of each prompt; the first one is the single prompt."""
GPT2 = {
    "norm": "layer", "position": "learned", "context": LENGTH, "activation": "gelu_tanh",
    "bias": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama, 128 wide, 4 layers": {"dim": 128, "layers": 4, "heads": 4},
    "GPT-2, 256 wide, 6 layers": {"dim": 256, "layers": 6, "heads": 8, **GPT2},
    "Llama, 384 wide, 8 layers, 3 heads of keys": {
        "dim": 384, "layers": 8, "heads": 6, "kv_heads": 3,
    },
}  # fmt: skip

Generate = Callable[[Sequence[Sequence[int]]], list[list[int]]]


def pair(folder: Path, model: dict[str, Any]) -> tuple[NextToken, Any]:
    """Return a model of large random weights, whose choices vary: ours, and in transformers."""
    from transformers import AutoModelForCausalLM

    run, public = folder / "run", folder / "public"
    remove(folder)
    folder.mkdir(parents=True)
    config = from_dict({"model": model, "task": {"length": LENGTH}})
    facts = Facts(
        fingerprint="", columns={"token": IDS}, schema={"token": Column("u2")}, vocabularies={}
    )
    task = make_task(config, inputs_of(config, facts))
    for name, weight in task.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.02 if "embeddings" in name else STD)
    write_run(run, config, task, facts, None)
    export_model(run, public)
    assert isinstance(task, NextToken)
    peer = AutoModelForCausalLM.from_pretrained(public, dtype=torch.float32).eval()
    return task.eval(), peer


def ours(task: NextToken) -> Generate:
    def generate(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        rows = [Row(number, 0, {"token": ids}) for number, ids in enumerate(prompts)]
        sizes, ends = {"token": None}, {"token": ()}
        continue_rows(task, rows, TOKENS, Drawing(temperature=0), sizes=sizes, ends=ends)
        return [row.new_ids["token"] for row in rows]

    return generate


def theirs(model: Any) -> Generate:
    """Return transformers' greedy `generate`: prompts flush right, its cache on."""

    def generate(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + list(one) for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        model.generation_config.eos_token_id = None
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=TOKENS,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        return [row[longest:] for row in made.tolist()]

    return generate


def agree(left: list[list[int]], right: list[list[int]], task: NextToken, prompts: Any) -> int:
    """Return the number of rows that differ only behind two ids that are equal up to rounding.

    Ends the benchmark where a row differs otherwise.
    """
    ties = 0
    for one, other, prompt in zip(left, right, prompts, strict=True):
        if one == other:
            continue
        at = next(n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        (logits,) = logits_after(task, [*prompt, *one[:at]])
        if abs(float(logits[one[at]] - logits[other[at]])) > 1e-4:
            raise SystemExit(f"ids differ at {at}: {one[at]} here, {other[at]} there")
        ties += 1
    return ties


def logits_after(task: NextToken, ids: list[int]) -> torch.Tensor:
    """Return the logits (1, V) after ids, all read at once."""
    with torch.no_grad():
        return task.logits(reading(task).begin([{"token": ids}]))


def main(cache: Path, rounds: int = 3) -> list[str]:
    torch.manual_seed(0)
    prompts = [torch.randint(0, IDS, (size,)).tolist() for size in PROMPTS]
    lines = [
        f"{TOKENS} tokens, greedy, float32, {torch.get_num_threads()} threads; weights loaded "
        f"before; prompts of {min(PROMPTS)} to {max(PROMPTS)} tokens; best of {rounds}, in turns. "
        "Equal ids are checked.",
        "",
        "| model | prompts | tokmill, tokens/s | transformers, tokens/s | ratio | ties |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        task, peer = pair(cache / "sampling", model)
        for some in (prompts[:1], prompts):
            times: list[list[float]] = [[], []]
            made: list[list[list[int]]] = [[], []]
            for _ in range(rounds):
                for place, generate in enumerate((ours(task), theirs(peer))):
                    begun = time.perf_counter()
                    made[place] = generate(some)
                    times[place].append(time.perf_counter() - begun)
            assert len(set(made[0][0])) > TOKENS // 10, "the model says too little"
            ties = agree(made[0], made[1], task, some)
            rates = [len(some) * TOKENS / min(part) for part in times]
            lines.append(
                f"| {name} | {len(some)} | {rates[0]:,.0f} | {rates[1]:,.0f} | "
                f"{rates[0] / rates[1]:.2f} | {ties} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]))))
