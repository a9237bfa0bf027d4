"""Tokenizers of any layout as one class: text to ids and back.

Read `tokenizer` first; `tokenizer_files` reads what others wrote."""
