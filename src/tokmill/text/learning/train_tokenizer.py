"""Train a byte-level BPE tokenizer on records, alone or before a build, with the fastest engine."""

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import ChildDied, ChildError, call
from tokmill.base.errors import MissingExtraError, TokmillError, UsageError, nearest, shell_word
from tokmill.base.files import machine_errors, make_folder, read_file, sha256_file, write_file
from tokmill.base.progress import elapsed
from tokmill.store.manifest import read_checked, with_checksum
from tokmill.store.marks import is_store
from tokmill.store.vocab import LEARNED, Learned
from tokmill.text.documents import iter_documents
from tokmill.text.encoding.guards import with_newer_characters
from tokmill.text.learning.bpe import (
    TIE_BREAKS,
    TieBreak,
    check_request,
    count_words,
    gave_up,
    train_words,
    word_splitter,
)
from tokmill.text.learning.train_child import BORDER, read_spool
from tokmill.text.tokenizers import tokenizer_json
from tokmill.text.tokenizers.patterns import GPT2, pieces, resolve_pattern
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_json import BYTE_ORDER

ENGINES = ("auto", "gigatoken", "tokenizers", "python")
MERGES_A_WORD = 0.2
"""Ids / distinct words above which gigatoken does not learn all merges: the later ones take it long
(docs/log/2026-11-27-text-speed.md)."""
FIRST_A_WORD = 0.125
"""Ids / distinct words that it learns then."""
_MOST_COUNTED = 2**31 - 1
"""Bytes of text above which only the Python trainer is exact: `tokenizers` counts in 32 bits."""


CHILD = "tokmill.text.learning.train_child"
LIMITS = Limits(output=1 << 30)
"""The answer of a training may be large."""
DIED = "it may have run out of memory; --engine python needs the least"


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    specials: Iterable[str] = ("<|endoftext|>",),
    *,
    pattern: str = "gpt2",
    tie_break: str = "first",
    engine: str = "auto",
) -> Tokenizer:
    """Train a tokenizer on records.

    Args:
        texts: records; words never cross two of them, and each is cut at special tokens.
        vocab_size: tokens in all: special tokens (the first ids), 256 bytes, what is learned.
        specials: special tokens.
        pattern: `gpt2`, `cl100k`, `o200k` or a regular expression.
        tie_break: `first` gives the merges of Hugging Face's `train_from_iterator`;
            `greatest-bytes` is the rule of CS336, by the Python trainer.
        engine: `gigatoken` (GPT-2's pattern), `tokenizers` (any pattern), `python` (the readable
            twin), or `auto`. All give equal tokenizers.

    Returns:
        A tokenizer with `vocab_size` ids; fewer if every word has become one token.

    Raises:
        UsageError: an argument is not known, the vocabulary is too small, a special token is given
            twice.
        TokmillError: there is no text.
    """
    if isinstance(texts, str) or isinstance(specials, str):
        raise UsageError("texts and specials are lists of strings, not one", hint="[text]")
    specials = list(specials)
    check_request(vocab_size, specials)
    chosen = resolve_pattern(pattern)
    if tie_break not in TIE_BREAKS:
        raise UsageError(
            f"no tie-break is called {tie_break!r}", hint=nearest(tie_break, TIE_BREAKS)
        )
    if engine not in ENGINES:
        raise UsageError(f"no engine is called {engine!r}", hint=nearest(engine, ENGINES))
    if tie_break != "first" and engine in ("gigatoken", "tokenizers"):
        raise UsageError(
            f"{engine} does not know the tie-break {tie_break!r}", hint="--engine python"
        )
    if engine == "gigatoken" and chosen != GPT2:
        raise UsageError("gigatoken trains GPT-2's pattern only", hint="--engine tokenizers")
    if engine == "python" or tie_break != "first":
        merges = _with_python(texts, vocab_size, specials, chosen, tie_break)
    else:
        with tempfile.TemporaryDirectory(prefix="tokmill-train-") as folder:
            spool = Spool(Path(folder) / "text")
            spool.fill(texts, specials)
            if not spool.bytes:
                raise no_text()
            merges = _with_library(spool, vocab_size, specials, chosen, engine)
    return assemble(merges, specials, chosen)


def assemble(
    merges: Sequence[tuple[bytes, bytes]], specials: Sequence[str], pattern: str
) -> Tokenizer:
    """Make a tokenizer from merges: ids are special tokens, then bytes, then merges in order."""
    tokens = [token.encode() for token in specials]
    tokens += [bytes([byte]) for byte in BYTE_ORDER]
    learned = dict.fromkeys(left + right for left, right in merges)
    byte_tokens = set(tokens[len(specials) :])
    tokens += [token for token in learned if token not in byte_tokens]
    data = tokenizer_json.byte_level(
        dict(enumerate(tokens)),
        merges,
        {token: number for number, token in enumerate(specials)},
        pattern=pattern,
    )
    return Tokenizer.from_data(data)


class Spool:
    """Records in a temporary file, so that they can be read twice, also by a child process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.newer = False

    def fill(self, texts: Iterable[str], specials: Sequence[str]) -> None:
        with machine_errors("write", self.path), open(self.path, "wb", 1 << 20) as handle:
            for text in texts:
                for piece, is_special in pieces(text, specials):
                    if is_special:
                        continue
                    try:
                        raw = piece.encode()
                    except UnicodeEncodeError:
                        raise TokmillError(
                            f"a record holds a lone surrogate: {piece[:40]!r}",
                            hint="read the text with errors='replace'",
                        ) from None
                    self.newer = self.newer or bool(with_newer_characters([raw]))
                    handle.write(raw)
                    handle.write(BORDER)
                    self.bytes += len(raw)

    def __iter__(self) -> Iterator[str]:
        with machine_errors("read", self.path):
            yield from read_spool(str(self.path))


def _with_library(
    spool: Spool, vocab_size: int, specials: list[str], pattern: str, engine: str
) -> list[tuple[bytes, bytes]]:
    merges: list[tuple[bytes, bytes]] | None = None
    if engine in ("auto", "gigatoken") and pattern == GPT2 and not spool.newer:
        merges = _with_gigatoken(spool, vocab_size, specials, required=engine == "gigatoken")
        if merges is not None:
            return merges
    if engine == "gigatoken" or spool.bytes > _MOST_COUNTED:
        return _with_python(spool, vocab_size, specials, pattern, "first")
    return _with_tokenizers(spool, vocab_size, specials, pattern)


def _with_gigatoken(
    spool: Spool, vocab_size: int, specials: list[str], *, required: bool
) -> list[tuple[bytes, bytes]] | None:
    """Train in a child process; return None if the merges must not be used.

    If no pair is left, gigatoken continues with pairs that do not occur. So its merges are used
    only if they are fewer than the distinct words. If many merges are wanted, the child is stopped,
    and another learns the first ones with gigatoken and the others in Python.
    """
    try:
        plugins.require("gigatoken")
    except MissingExtraError:
        if required:
            raise
        return None
    words = 0

    def goes_on(line: str) -> bool:
        nonlocal words
        if counted := re.search(r"(\d+) unique words", line):
            words = int(counted[1])
        return not words or vocab_size <= MERGES_A_WORD * words

    arguments = str(spool.path), vocab_size, specials
    try:
        answer = _in_child("gigatoken", *arguments, line=goes_on)
    except ChildDied:
        if goes_on(""):
            raise
        try:
            answer = _in_child("mixed", *arguments, int(FIRST_A_WORD * words), who="gigatoken")
        except ChildDied:
            if required:
                raise
            return None
        return None if answer is None else [(left, right) for left, right in answer]
    merges = [(left, right) for left, right in answer]
    joined = {left + right for left, right in merges}
    return merges if len(joined) == len(merges) < words else None


def _in_child(target: str, *arguments: Any, who: str = "", line: Any = None) -> Any:
    try:
        with elapsed(f"training with {who or target}"):
            return call(f"{CHILD}:{target}", *arguments, limits=LIMITS, line=line)
    except ChildDied as died:
        died.hint = DIED
        raise


def _with_tokenizers(
    spool: Spool, vocab_size: int, specials: list[str], pattern: str
) -> list[tuple[bytes, bytes]]:
    own = None if pattern == GPT2 else pattern
    word_splitter(pattern)
    try:
        raw = _in_child("tokenizers", str(spool.path), vocab_size, specials, own)
    except ChildError as error:
        raise gave_up(error.what.removeprefix("Panic: "), pattern) from None
    data = tokenizer_json.parse(raw, "tokenizers")
    return [
        (tokenizer_json.unalias(left) or b"", tokenizer_json.unalias(right) or b"")
        for left, right in data["model"]["merges"]
    ]


def _with_python(
    texts: Iterable[str], vocab_size: int, specials: list[str], pattern: str, tie_break: str
) -> list[tuple[bytes, bytes]]:
    words = count_words(texts, specials, pattern)
    if not words:
        raise no_text()
    rule: TieBreak = "first" if tie_break == "first" else "greatest-bytes"
    return train_words(words, vocab_size, specials, rule)[1]


def no_text() -> TokmillError:
    return TokmillError(
        "there is no text to train on",
        hint="the inputs are empty, or all of their documents were skipped or rejected",
    )


def read_note(folder: Path) -> Learned:
    return read_checked(folder / LEARNED, Learned)


def noted(options: Learned, tokenizer: Tokenizer) -> Learned:
    files = {n: hashlib.sha256(d).hexdigest() for n, d in tokenizer.files().items()}
    return msgspec.structs.replace(options, sha256=files.pop("tokenizer.json"), files=files)


def write_beside(folder: Path, note: Learned) -> None:
    file = folder / "tokenizer.json"
    for name, data in Tokenizer.from_json(read_file(file), str(file)).files().items():
        path = folder / name
        if note.files.get(name) == hashlib.sha256(data).hexdigest() and not (
            path.is_file() and sha256_file(path) == note.files[name]
        ):
            write_file(path, data)


def learned_tokenizer(
    folder: Path,
    kind: str,
    inputs: Sequence[str],
    options: Mapping[str, Any],
    learn: Learned,
    *,
    again: bool = False,
) -> tuple[Path, bool]:
    """Train a tokenizer on the documents of inputs; return (`folder`/tokenizer.json, is it new).

    A tokenizer that was learned before with the same options is kept even if the inputs have
    changed: a store's vocabulary is frozen. Other options are refused, and so is a tokenizer that
    was not learned here. With `again` an existing tokenizer is replaced.
    """
    path, note = folder / "tokenizer.json", folder / LEARNED
    if not again:
        check_learned(folder)
    if path.exists() and not again:
        before = read_note(folder)
        if msgspec.structs.replace(before, sha256="", files={}) != learn:
            raise TokmillError(
                f"a tokenizer was trained here with {before.vocab_size} ids and "
                f"{list(before.specials)}, not {learn.vocab_size} and {list(learn.specials)}",
                where=str(path),
                hint="choose another folder, or remove this one",
            )
        write_beside(folder, before)
        return path, False
    make_folder(folder)
    texts = chain.from_iterable(iter_documents(inputs, kind, options))
    tokenizer = train_tokenizer(
        texts, learn.vocab_size, learn.specials, pattern=learn.pattern, tie_break=learn.tie_break
    )
    # The note is written first: a tokenizer without a note is taken for the user's own.
    write_file(note, with_checksum(noted(learn, tokenizer)))
    tokenizer.save(path)
    return path, True


def check_learned(folder: Path) -> None:
    """Refuse a folder with a tokenizer that was not learned there: the build would replace it."""
    path, note = folder / "tokenizer.json", folder / LEARNED
    if not path.exists():
        return
    use = f"--tokenizer {shell_word(path)}"
    try:
        wanted = read_note(folder).sha256 if note.exists() else None
    except TokmillError as error:
        error.hint = f"remove it, and use the tokenizer: {use}"
        raise
    if wanted is None or sha256_file(path) != wanted:
        hint = f"use it: {use}; or choose a new folder"
        if wanted and is_store(folder.parent):
            hint = "if it is damaged, remove it: the same build trains it again"
        raise UsageError(
            "the folder holds a tokenizer that was not trained there", where=str(path), hint=hint
        )
