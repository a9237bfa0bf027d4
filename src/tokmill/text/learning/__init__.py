"""A tokenizer learned from records: BPE and WordPiece.

Read `train_tokenizer` first; `bpe` is the readable trainer."""
