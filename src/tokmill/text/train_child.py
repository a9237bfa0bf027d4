"""The process in which gigatoken trains: SPOOL VOCAB_SIZE SPECIALS ANSWER.

gigatoken prints to stdout and raises PanicException, so it does not run in ours. The merges go to
the file ANSWER as pairs of hexadecimal strings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BORDER = b"\xff"
"""Stands between records in the file SPOOL; no UTF-8 text holds this byte."""


def main(spool: str, vocab_size: str, specials: str, answer: str) -> None:
    """Train on the records in a file and write the merges."""
    import gigatoken

    _, merges = gigatoken.train_bpe(
        gigatoken.TextFileSource([spool], separator=BORDER),
        int(vocab_size),
        json.loads(specials),
        "huggingface",
    )
    Path(answer).write_text(json.dumps([[left.hex(), right.hex()] for left, right in merges]))


if __name__ == "__main__":
    main(*sys.argv[1:])
