"""Train a WordPiece tokenizer on records, with Hugging Face `tokenizers`.

Its trainer numbers characters in the order of a hash table of words, which differs between runs; of
two equally frequent pairs the one with the smaller numbers wins. So the trainer gets all characters
in a fixed order here, and equal texts give equal tokenizers.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokmill import plugins
from tokmill.base.errors import UsageError
from tokmill.base.progress import elapsed
from tokmill.text.encoding.guards import no_panic
from tokmill.text.learning.train_tokenizer import Spool, no_text
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_files import INSIDE, SPECIALS, tokenizer_data

ALPHABET = 1000
"""Largest number of characters: the most frequent ones; words with others are `[UNK]`."""
LEAST = 2
"""Two tokens are joined only if they occur side by side at least so often."""


def train_wordpiece(
    texts: Iterable[str], vocab_size: int, specials: Sequence[str] = (), *, cased: bool = False
) -> Tokenizer:
    """Train a WordPiece tokenizer with BERT's words.

    Args:
        vocab_size: number of tokens: `SPECIALS` (the first ids), other special tokens, characters,
            learned tokens.
        specials: special tokens besides `[PAD] [UNK] [CLS] [SEP] [MASK]`.
        cased: keep capital letters and accents; else text is converted to lower case.
    """
    special = [*SPECIALS, *(token for token in specials if token not in SPECIALS)]
    if len(set(special)) < len(special) or not all(len(token) > 1 for token in special):
        raise UsageError(
            "a special token is given twice, or is no longer than a character",
            hint="name each once: --special '[NAME]'",
        )
    library = plugins.require("tokenizers")
    trained = _untrained(library, cased)
    with tempfile.TemporaryDirectory(prefix="tokmill-train-") as folder:
        spool = Spool(Path(folder) / "text")
        spool.fill(texts, ())
        kept = _characters(spool, trained)
        if not kept:
            raise no_text()
        first = [*special, *kept, *(INSIDE + c for c in kept if _continues_word(trained, c))]
        if len(first) > vocab_size:
            raise UsageError(
                f"a vocabulary of {vocab_size} is too small for {len(special)} special tokens and "
                f"{len(kept)} characters",
                hint=f"--vocab-size {len(first)} or more",
            )
        trainer = library.trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=LEAST,
            # The order of their ids.
            special_tokens=first,
            initial_alphabet=kept,
            limit_alphabet=len(kept),
            continuing_subword_prefix=INSIDE,
            show_progress=False,
        )
        with elapsed("training with tokenizers"), no_panic():
            trained.train_from_iterator(iter(spool), trainer)
    vocab: dict[str, int] = trained.get_vocab(with_added_tokens=False)
    return Tokenizer.from_data(tokenizer_data(vocab, lower=not cased, more=special))


def _untrained(library: Any, cased: bool) -> Any:
    model = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    model.normalizer = library.normalizers.BertNormalizer(lowercase=not cased)
    model.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    return model


def _characters(texts: Iterable[str], tokenizer: Any) -> list[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    characters = [(-count, c) for c, count in counts.items() if list(_words(tokenizer, c)) == [c]]
    return sorted(c for _, c in sorted(characters)[:ALPHABET])


def _continues_word(tokenizer: Any, character: str) -> bool:
    return len(list(_words(tokenizer, f"a{character}"))) == 1


def _words(tokenizer: Any, text: str) -> Iterator[str]:
    normalized = tokenizer.normalizer.normalize_str(text)
    for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized):
        yield word
