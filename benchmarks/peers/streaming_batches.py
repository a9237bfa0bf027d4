"""mosaicml-streaming, shuffled, rows stacked to int64. Arguments: flat-file rows length batches.

Rows of `length` + 1 tokens lie in an MDS data set beside the flat file. Prints seconds a batch.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

# Its images would need torchvision, which is several GB.
sys.modules["streaming.vision"] = ModuleType("streaming.vision")
from streaming import MDSWriter, StreamingDataset  # noqa: E402


def write(flat: Path, length: int, out: Path) -> None:
    """Write the tokens as rows that share one token."""
    shutil.rmtree(out, ignore_errors=True)
    data = np.fromfile(flat, np.uint16)
    columns = {"tokens": f"ndarray:uint16:{length + 1}"}
    with MDSWriter(out=str(out), columns=columns) as writer:
        for start in range(0, len(data) - length, length):
            writer.write({"tokens": data[start : start + length + 1]})


if __name__ == "__main__":
    flat, (rows, length, batches) = Path(sys.argv[1]), map(int, sys.argv[2:])
    folder = flat.with_name("feed-mds")
    if not (folder / "index.json").exists():
        write(flat, length, folder)
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=rows)
    samples = iter(dataset)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        stacked = np.stack([next(samples)["tokens"] for _ in range(rows)]).astype(np.int64)
        both = torch.from_numpy(stacked)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    for _ in range(batches):
        batch()
    started = time.perf_counter()
    for _ in range(batches):
        x, y = batch()
    seconds = (time.perf_counter() - started) / batches
    assert x.shape == y.shape == (rows, length) and x.dtype == torch.int64
    print(json.dumps(seconds))
