"""Megatron's GPT dataset, shuffled, samples collated by torch. Arguments: pair rows length batches.

The cheapest of its settings: no document facts, no attention mask. Prints seconds a batch.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from torch.utils.data import default_collate

# It tells of packages that it would like to have.
warnings.simplefilter("ignore")
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402

if __name__ == "__main__":
    pair, (rows, length, batches) = sys.argv[1], map(int, sys.argv[2:])
    stored = IndexedDataset(pair)
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=length,
        path_to_cache=str(Path(pair).parent / "feed-megatron-cache"),
        tokenizer=SimpleNamespace(vocab_size=8192, eod=0, unique_identifiers={}),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = int(stored.sequence_lengths.sum()) // length - 1
    every = np.arange(len(stored), dtype=np.int32)
    dataset = GPTDataset(stored, pair, every, samples, Split.train, config)

    def batch(step: int) -> dict:
        return default_collate([dataset[step * rows + row] for row in range(rows)])

    for step in range(batches):
        batch(step)
    started = time.perf_counter()
    for step in range(batches, 2 * batches):
        made = batch(step)
    seconds = (time.perf_counter() - started) / batches
    assert made["tokens"].shape == made["labels"].shape == (rows, length)
    print(json.dumps(seconds))
