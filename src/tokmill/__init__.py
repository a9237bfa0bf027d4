"""tokmill: checked token stores from raw data, and sequence models trained on them.

The public names load on first use, so that `import tokmill` costs nothing. If the packages of an
extra are missing, `MissingExtraError` names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # For type checkers and editors, to which `as` means a public name; `_PUBLIC` is for Python.
    from tokmill.base.errors import TokmillError as TokmillError
    from tokmill.builds.kinds import build as build
    from tokmill.feed.entries import Tuples as Tuples
    from tokmill.feed.feed import Feed as Feed
    from tokmill.feed.packed import Packed as Packed
    from tokmill.feed.rows import Stream as Stream
    from tokmill.feed.rows import Whole as Whole
    from tokmill.feed.rows import Windows as Windows
    from tokmill.inference.embed import embed as embed
    from tokmill.inference.predict import predict as predict
    from tokmill.inference.sample import generate as generate
    from tokmill.inference.sample import sample as sample
    from tokmill.store.store import Store as Store
    from tokmill.text.learning.train_tokenizer import train_tokenizer as train_tokenizer
    from tokmill.text.tokenizers.tokenizer import Tokenizer as Tokenizer
    from tokmill.training.dataset import TokenDataset as TokenDataset
    from tokmill.training.evaluate import evaluate as evaluate
    from tokmill.training.runs.exchange import export as export
    from tokmill.training.runs.run import Run as Run
    from tokmill.training.session import train as train
    from tokmill.x86.diff.program_diff import diff as diff
    from tokmill.x86.tokens.rules import align as align
    from tokmill.x86.tokens.rules import tokenize_binary_instruction as tokenize_binary_instruction
    from tokmill.x86.tokens.rules import tokenize_bytes as tokenize_bytes
    from tokmill.x86.x86_tokenizer import X86Tokenizer as X86Tokenizer

from tokmill.version import __version__

_PUBLIC = {
    "Store": "tokmill.store.store",
    "Feed": "tokmill.feed.feed",
    "Windows": "tokmill.feed.rows",
    "Whole": "tokmill.feed.rows",
    "Stream": "tokmill.feed.rows",
    "Packed": "tokmill.feed.packed",
    "Tuples": "tokmill.feed.entries",
    "build": "tokmill.builds.kinds",
    "Tokenizer": "tokmill.text.tokenizers.tokenizer",
    "train_tokenizer": "tokmill.text.learning.train_tokenizer",
    "train": "tokmill.training.session",
    "TokenDataset": "tokmill.training.dataset",
    "sample": "tokmill.inference.sample",
    "generate": "tokmill.inference.sample",
    "tokenize_binary_instruction": "tokmill.x86.tokens.rules",
    "tokenize_bytes": "tokmill.x86.tokens.rules",
    "align": "tokmill.x86.tokens.rules",
    "X86Tokenizer": "tokmill.x86.x86_tokenizer",
    "TokmillError": "tokmill.base.errors",
    "predict": "tokmill.inference.predict",
    "embed": "tokmill.inference.embed",
    "evaluate": "tokmill.training.evaluate",
    "export": "tokmill.training.runs.exchange",
    "Run": "tokmill.training.runs.run",
    "diff": "tokmill.x86.diff.program_diff",
}
__all__ = ["__version__", *_PUBLIC]

if not TYPE_CHECKING:
    # Hidden from type checkers: with it they would accept every misspelt name.
    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'tokmill' has no attribute {name!r}")
        # Imported only now, so that reading `tokmill.__version__` costs nothing.
        from tokmill.plugins import require

        return getattr(require(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
