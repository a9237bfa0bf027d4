"""A tokenizer learned from records: BPE and WordPiece.

Read `train` first; `bpe` is the readable trainer.
"""
