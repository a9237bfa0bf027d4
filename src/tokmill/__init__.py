"""tokmill: raw matter to checked token stores, and sequence models trained on them.

The public names load on first use, so that `import tokmill` costs nothing. Where the packages of
an extra are missing, `MissingExtraError` names it.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Store": "tokmill.store.store",
    "Feed": "tokmill.feed.feed",
    "Windows": "tokmill.feed.rows",
    "Whole": "tokmill.feed.rows",
    "Stream": "tokmill.feed.rows",
    "Packed": "tokmill.feed.packed",
    "build_store": "tokmill.build.run",
    "Tokenizer": "tokmill.text.tokenizer",
    "train_tokenizer": "tokmill.text.train",
    "train_model": "tokmill.train.loop",
    "TokenDataset": "tokmill.train.dataset",
    "sample": "tokmill.inference.sample",
    "tokenize_binary_instruction": "tokmill.x86.rules",
    "tokenize_bytes": "tokmill.x86.rules",
    "align": "tokmill.x86.rules",
    "X86Tokenizer": "tokmill.x86.tokenizer",
    "TokmillError": "tokmill.errors",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tokmill' has no attribute {name!r}")
    # Not before: whoever only asks for the version waits for nothing.
    from tokmill.plugins import require

    return getattr(require(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
