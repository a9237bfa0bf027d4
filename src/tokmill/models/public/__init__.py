"""Public checkpoints: names of tensors and keys of config.json, both ways.

Read `huggingface` first."""
