"""Formulas of the documents that docs/coming-from-the-scripts.md goes through, in plain Python.

They are written from the documents alone, as slowly and as plainly as they stand there.
"""

import math
from collections.abc import Sequence
from typing import Any

PLACEHOLDERS = ("", "[deleted]", "[removed]")


def prepared_text(item: dict[str, Any]) -> str:
    """Return the text of an object (JSONL kit, `prepare_text`); None is as no text."""
    parts = [(item.get(name) or "").strip() for name in ("title", "text")]
    return "\n".join(part for part in parts if part not in PLACEHOLDERS)


def windows(tokens: Sequence[int], max_length: int, stride: int) -> list[list[int]]:
    """Return the windows of a text (JSONL kit, `tokenize_text`)."""
    if len(tokens) <= max_length:
        return [list(tokens)]
    found, start = [], 0
    while start < len(tokens):
        end = min(start + max_length, len(tokens))
        found.append(list(tokens[start:end]))
        if end == len(tokens):
            break
        start += stride
    return found


def padded(
    sequences: Sequence[Sequence[int]], pad: int, width: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """Return ids and masks as wide as the longest sequence (JSONL kit, `save_sequences`)."""
    wide = width or max(map(len, sequences))
    ids = [[*one, *[pad] * (wide - len(one))] for one in sequences]
    return ids, [[1] * len(one) + [0] * (wide - len(one)) for one in sequences]


def bucket_ids(vector: Sequence[float], repeated: bool = True) -> list[int]:
    """Return the ids of a vector (MLIR-RL): 4 + (number % 100) * 50 + bucket; 3 is `[UNK]`."""
    found = []
    for number, value in enumerate(vector):
        if not math.isfinite(value):
            found.append(3)
            continue
        bucket = int(max(0.0, min(1.0, value)) * 49)
        found.append(4 + (number % 100 if repeated else number) * 50 + bucket)
    return found


def bert_rate(rate: float, step: int, steps: int, warmup: float) -> float:
    """Return BertAdam's rate of a step, from 0 (BERT, `optim.py`); `warmup` is a share."""
    done = step / steps
    return rate * (done / warmup if done < warmup else 1.0 - done)
