"""tokmill: raw matter to checked token stores, and sequence models trained on them.

The public names load on first use, so that `import tokmill` costs nothing. Where the packages of
an extra are missing, `MissingExtraError` names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # What a type checker and an editor see; `_PUBLIC` says the same for the interpreter.
    from tokmill.builds.run import build
    from tokmill.errors import TokmillError
    from tokmill.feed.entries import Pairs, Tuples
    from tokmill.feed.feed import Feed
    from tokmill.feed.packed import Packed
    from tokmill.feed.rows import Stream, Whole, Windows
    from tokmill.inference.sample import generate, sample
    from tokmill.store.store import Store
    from tokmill.text.tokenizer import Tokenizer
    from tokmill.text.train import train_tokenizer
    from tokmill.training.dataset import TokenDataset
    from tokmill.training.session import train
    from tokmill.x86.tokenizer import X86Tokenizer
    from tokmill.x86.tokens.rules import align, tokenize_binary_instruction, tokenize_bytes

from tokmill.version import __version__

# A literal list: type checkers understand no other form.
__all__ = [
    "Feed",
    "Packed",
    "Pairs",
    "Store",
    "Stream",
    "TokenDataset",
    "Tokenizer",
    "TokmillError",
    "Tuples",
    "Whole",
    "Windows",
    "X86Tokenizer",
    "__version__",
    "align",
    "build",
    "generate",
    "sample",
    "tokenize_binary_instruction",
    "tokenize_bytes",
    "train",
    "train_tokenizer",
]

_PUBLIC = {
    "Store": "tokmill.store.store",
    "Feed": "tokmill.feed.feed",
    "Windows": "tokmill.feed.rows",
    "Whole": "tokmill.feed.rows",
    "Stream": "tokmill.feed.rows",
    "Packed": "tokmill.feed.packed",
    "Pairs": "tokmill.feed.entries",
    "Tuples": "tokmill.feed.entries",
    "build": "tokmill.builds.run",
    "Tokenizer": "tokmill.text.tokenizer",
    "train_tokenizer": "tokmill.text.train",
    "train": "tokmill.training.session",
    "TokenDataset": "tokmill.training.dataset",
    "sample": "tokmill.inference.sample",
    "generate": "tokmill.inference.sample",
    "tokenize_binary_instruction": "tokmill.x86.tokens.rules",
    "tokenize_bytes": "tokmill.x86.tokens.rules",
    "align": "tokmill.x86.tokens.rules",
    "X86Tokenizer": "tokmill.x86.tokenizer",
    "TokmillError": "tokmill.errors",
}


if not TYPE_CHECKING:
    # Hidden from type checkers: with it they would accept every misspelt name.
    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'tokmill' has no attribute {name!r}")
        # Imported only now, so that reading `tokmill.__version__` costs nothing.
        from tokmill.plugins import require

        return getattr(require(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
