"""Byte-level BPE by Hugging Face tokenizers. Arguments: jsonl vocab-size out."""

import json
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=int(sys.argv[2]),
    special_tokens=["<|endoftext|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
)
with open(sys.argv[1]) as lines:
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
tokenizer.save(sys.argv[3])
