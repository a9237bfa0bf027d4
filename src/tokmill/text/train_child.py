"""What gigatoken does in a child process, as it prints to stdout and panics."""

from __future__ import annotations

BORDER = b"\xff"
"""Stands between records in the file SPOOL; no UTF-8 text holds this byte."""


def train(spool: str, vocab_size: int, specials: list[str]) -> list[tuple[bytes, bytes]]:
    """Train on the records in a file and return the merges."""
    import gigatoken

    merges: list[tuple[bytes, bytes]] = gigatoken.train_bpe(
        gigatoken.TextFileSource([spool], separator=BORDER), vocab_size, specials, "huggingface"
    )[1]
    return merges
