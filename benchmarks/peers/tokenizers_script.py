"""The same with Hugging Face tokenizers, in batches. Arguments: jsonl tokenizer out."""

import itertools
import sys

import msgspec
import numpy as np
from tokenizers import Tokenizer


class Line(msgspec.Struct):
    text: str


tokenizer = Tokenizer.from_file(sys.argv[2])
decode = msgspec.json.Decoder(Line).decode
with open(sys.argv[1], "rb") as lines, open(sys.argv[3], "wb") as out:
    while batch := [decode(line).text for line in itertools.islice(lines, 1000)]:
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            np.asarray(encoding.ids, np.uint16).tofile(out)
