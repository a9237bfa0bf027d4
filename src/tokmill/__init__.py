"""tokmill: raw matter to checked token stores, and sequence models trained on them.

The public names load on first use, so that `import tokmill` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Store": "tokmill.store.store",
    "Feed": "tokmill.feed.feed",
    "Windows": "tokmill.feed.rows",
    "build_store": "tokmill.build.run",
    "Tokenizer": "tokmill.text.tokenizer",
    "train_tokenizer": "tokmill.text.train",
    "train_model": "tokmill.train.loop",
    "sample": "tokmill.inference.sample",
    "TokmillError": "tokmill.errors",
}

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tokmill' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
