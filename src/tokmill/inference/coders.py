"""Encodes the text of a prompt as ids of a run's columns, and decodes ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import inside
from tokmill.inference.vectors import Ids
from tokmill.store.vocab import Vocabulary
from tokmill.tasks.task_inputs import Facts
from tokmill.training.runs.run import VOCAB, check_tokenizer


class Coder(Protocol):
    """Turns text into ids of columns, and ids into text."""

    def encode(self, text: str) -> dict[str, list[int]]: ...

    def decode(self, ids: Ids) -> str: ...


class Text:
    """A tokenizer of text as a `Coder` with one column."""

    def __init__(self, tokenizer: Any, column: str) -> None:
        self.tokenizer, self.column = tokenizer, column

    def encode(self, text: str) -> dict[str, list[int]]:
        """Return column → ids; names of special tokens are encoded as plain text."""
        return {self.column: self.tokenizer.encode(text, specials="plain")}

    def decode(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(ids[self.column]))


def load_coder(
    run: Path, facts: Facts, columns: Sequence[str]
) -> tuple[dict[str, Vocabulary], Coder | None]:
    """Return the vocabularies of columns, and their coder; None if a column has no vocabulary."""
    names = {column: facts.schema[column].vocab for column in columns if column in facts.schema}
    vocabs = {
        column: facts.vocabularies[name]
        for column, name in names.items()
        if name in facts.vocabularies
    }
    if len(vocabs) < len(columns):
        return vocabs, None
    files = {column: inside(run / VOCAB, vocabulary.file) for column, vocabulary in vocabs.items()}
    kind = vocabs[columns[0]].coder
    coder = plugins.load(plugins.CODERS, kind)
    if kind == "tokenizer":
        tokenizer = coder.from_file(files[columns[0]])
        check_tokenizer(tokenizer, run / VOCAB)
        return vocabs, Text(tokenizer, columns[0])
    result: Coder = coder.from_files(files)
    return vocabs, result


def prompt_ids(
    prompt: str | Sequence[int] | Ids,
    coder: Coder | None,
    vocabularies: Mapping[str, Vocabulary],
    sizes: Mapping[str, int],
    facts: Facts,
    where: str,
) -> dict[str, list[int]]:
    """Return column → ids of a prompt that is text, ids of the one column, or ids of each.

    A text begins with the special tokens that the run has learned before a record; an empty one is
    these alone, or the token that begins a text. Raises `TokmillError` for text without a coder,
    and `UsageError` for unknown ids.
    """
    if isinstance(prompt, str) and prompt:
        if coder is None:
            raise TokmillError(
                "the run cannot read text: its store or checkpoint has no tokenizer",
                where=where,
                hint="give ids in place of text: --ids 1,2,3; the result is ids too",
            )
        prompt = {
            name: [*facts.prefix.get(name, ()), *ids] for name, ids in coder.encode(prompt).items()
        }
    if isinstance(prompt, str) or (not isinstance(prompt, Mapping) and not len(prompt)):
        return first_ids(vocabularies, sizes, facts, where)
    if not isinstance(prompt, Mapping):
        if len(sizes) > 1:
            raise UsageError(
                f"the run reads {len(sizes)} columns: {', '.join(sizes)}",
                where=where,
                hint="from Python a prompt may be a dict of column → ids",
            )
        prompt = {next(iter(sizes)): prompt}
    checked = {name: [*map(int, prompt.get(name, ()))] for name in sizes}
    lengths = set(map(len, checked.values()))
    if prompt.keys() != sizes.keys() or lengths == {0} or len(lengths) > 1:
        raise UsageError(
            f"a prompt has ids of {', '.join(sizes)}, equally many of each and at least one",
            where=where,
            hint="leave the prompt out to begin with the token that begins a text",
        )
    for name, ids in checked.items():
        wrong = [number for number in ids if not 0 <= number < sizes[name]]
        if wrong:
            raise UsageError(
                f"{wrong[0]} is not an id of {name!r}, whose ids are 0 to {sizes[name] - 1}",
                where=where,
                hint="`tokmill inspect RUN` says which vocabulary it has",
            )
    return checked


def first_ids(
    vocabularies: Mapping[str, Vocabulary], sizes: Mapping[str, int], facts: Facts, where: str
) -> dict[str, list[int]]:
    """Return the ids after which the first token of a text is predicted.

    These are the special tokens before a record, else those that ended the record before it; of an
    imported run the token that begins a text, else the one that ends it. Raises `UsageError` if
    the run has learned nothing after such ones.
    """
    starts: dict[str, list[int]] = {}
    for name, vocabulary in vocabularies.items():
        roles = [
            number for role in ("bos", "eot") if (number := vocabulary.roles.get(role)) is not None
        ]
        learned = facts.suffix.get(name, ())[-1:] if facts.fingerprint else roles[:1]
        if start := facts.prefix.get(name) or learned:
            starts[name] = [*start]
    if starts.keys() != sizes.keys():
        raise UsageError(
            "the run has not learned how a text begins: its vocabulary or the records of its store "
            "have no token before the first one, so a prompt is needed",
            where=where,
            hint="give a --prompt" if len(vocabularies) == len(sizes) else "give --ids 1,2,3",
        )
    return starts


def parse_ids(text: str, where: str = "--ids") -> list[int]:
    """Return the ids of "1,2,3" or "1 2 3"; raises `UsageError` for anything else."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
        raise UsageError(f"{text[:40]!r} are not ids", where=where, hint="such as: 1,2,3")
    return [*map(int, words)]
