"""Hugging Face datasets.map to a flat file. Arguments: jsonl tokenizer out."""

import sys
import tempfile

import numpy as np
from datasets import load_dataset
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(sys.argv[2])


def encode(batch):
    encoded = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
    return {"ids": [encoding.ids for encoding in encoded]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        data = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=cache)
        data = data.map(encode, batched=True, remove_columns=data.column_names)
        with open(sys.argv[3], "wb") as out:
            for batch in data.with_format("numpy").iter(1000):
                for ids in batch["ids"]:
                    ids.astype(np.uint16).tofile(out)
