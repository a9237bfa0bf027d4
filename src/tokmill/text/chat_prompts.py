"""Encode messages as the prompt of a model: the ids that `build chat` writes before an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokmill import recipe
from tokmill.builds.source import Frozen, Request, Resources
from tokmill.errors import TokmillError, UsageError
from tokmill.store.vocab import Vocabulary
from tokmill.text import chat_template_files
from tokmill.text.chat import ChatConfig, ChatSource
from tokmill.text.chat_encode import ChatEncoder
from tokmill.text.chat_messages import Refused
from tokmill.text.chat_sandbox import CLOSE, OPEN
from tokmill.text.chat_templates import BREAK, NoMask, TemplateFailed

SHAPE = 'such as [{"role": "user", "content": "Hi"}]'
ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class ChatPrompts:
    """Writes messages like the store of chats, up to the beginning of the assistant's answer."""

    def __init__(
        self, data: bytes, vocabulary: Vocabulary, options: Mapping[str, Any], template: str = ""
    ) -> None:
        """Prepare.

        Args:
            data: the tokenizer.json.
            vocabulary: its record, with the roles.
            options: the options with which the store was built.
            template: a chat template in place of the store's: a name, or a file.

        Raises `TokmillError` if there is no template, or it does not fit the tokenizer.
        """
        config = recipe.convert(ChatConfig, dict(options), "options of the store")
        if template:
            found = ChatConfig(chat_template=template, date=config.date, tokens=config.tokens)
            config = ChatSource.resolve(found, Request(inputs=()))
        resources = Resources(threads=False)
        self.source = ChatSource(config, [], {"token": Frozen(vocabulary, data)}, resources)
        self.encoder = ChatEncoder(data, self.source.template.text, resources)

    def ids(self, messages: Any, where: str = "") -> list[int]:
        """Return the ids of messages and of the beginning of an answer.

        Names of special tokens in messages are text, as in the store.

        Raises `UsageError` for invalid messages, or messages that the template refuses.
        """
        try:
            chat, _ = self.source.reader.chat(messages, None)
            text = self.source.template.render(chat, None, prompt=True)
        except Refused as why:
            what = f"these messages cannot be read: {why.reason}"
            raise UsageError(what, where=where, hint=SHAPE) from None
        except TemplateFailed as why:
            raise UsageError(
                f"the chat template refuses the messages: {why}",
                where=where,
                hint="it may want other roles, or the user's turn last",
            ) from None
        if BREAK in text and not self.encoder.in_segments:
            raise UsageError(
                "a message holds the name of a special token, which the tokenizer cannot keep as "
                "text",
                where=where,
                hint="write it in another way",
            )
        ids: list[int] = self.encoder([re.sub(f"[{OPEN}{CLOSE}]", "", text)])[0].tolist()
        return ids

    def ends(self) -> list[int]:
        """Return the id of the token that ends a turn of the assistant, if there is one."""
        try:
            text = self.source.template.marked(ASKED, None, self.source.ends)
        except (NoMask, TemplateFailed):
            return []
        said = text.rpartition(OPEN)[2].partition(CLOSE)[0]
        names = [name for name in self.encoder.control if name in said]
        last = max(names, key=lambda name: said.rfind(name) + len(name), default="")
        return [self.encoder.control[last]] if last else []


def template_of(options: Mapping[str, Any]) -> str:
    """Return the chat template in a store's options, or ""."""
    found = options.get("chat_template")
    if not isinstance(found, str):
        return ""
    return (
        found if found in chat_template_files.BUILT_IN or chat_template_files.is_text(found) else ""
    )


def load(
    data: bytes,
    vocabulary: Vocabulary,
    kept: Sequence[Mapping[str, Any]],
    template: str,
    where: str,
) -> ChatPrompts:
    """Return the writer of prompts for a run.

    `kept`: options of the stores from which it learned. Raises `TokmillError` if there is no
    template.
    """
    options = next((each for each in kept if template_of(each)), None)
    if options is None and not template:
        raise TokmillError(
            "the run has no chat template: its store was not made by `tokmill build chat`, or from "
            "chats with different templates",
            where=where,
            hint="name one: --chat-template chatml, llama3, plain, or a file",
        )
    return ChatPrompts(data, vocabulary, options or {}, template)
