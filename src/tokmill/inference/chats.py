"""Messages as prompts of a run that learned chats; the domain of the chats encodes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import inside, machine_errors, read_file
from tokmill.base.headers import loads_json
from tokmill.tasks.task_inputs import Facts
from tokmill.training.runs.input_format import options_of
from tokmill.training.runs.run import VOCAB

LARGEST = 64 << 20
"""Largest size of a file of messages in bytes."""


class Writer(Protocol):
    """Encodes messages as ids."""

    def ids(self, messages: Any, where: str = "") -> list[int]:
        """Return the ids of messages and of the beginning of an answer."""
        ...

    def ends(self) -> list[int]:
        """Return the ids that end an answer."""
        ...


def load_chats(run: Path, facts: Facts, template: str = "") -> Writer:
    """Return the encoder of messages for a run of one column of text.

    `template`: a chat template that replaces the store's. Raises `TokmillError` if the run has no
    tokenizer or no template.
    """
    names = [facts.schema[column].vocab for column in facts.columns]
    vocabulary = facts.vocabularies.get(names[0] or "") if len(names) == 1 else None
    if vocabulary is None or not vocabulary.file.startswith("tokenizer"):
        raise TokmillError(
            "the run has no tokenizer of text, so it cannot read messages",
            where=str(run),
            hint="give ids with --ids 1,2,3, or another kind of prompt with --prompt",
        )
    path = inside(run / VOCAB, vocabulary.file)
    data = read_file(path)
    options: Mapping[str, Any] = options_of(run)
    kept: Sequence[Mapping[str, Any]] = [options] if options else []
    load = plugins.load(plugins.CHATS, "chat")
    writer: Writer = load(data, vocabulary, kept, template, str(run))
    return writer


def read_messages(path: str) -> Any:
    """Return the messages of a JSON file: a list, or an object with `messages`."""
    with machine_errors("read", path), open(path, "rb") as file:
        raw = file.read(LARGEST + 1)
    try:
        if len(raw) > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        value = loads_json(raw)
    except ValueError as error:
        raise UsageError(
            f"this is not JSON: {error}",
            where=path,
            hint='a file with [{"role": "user", "content": "Hi"}]',
        ) from None
    if isinstance(value, dict):
        value = value.get("messages", value.get("conversations"))
    return value
