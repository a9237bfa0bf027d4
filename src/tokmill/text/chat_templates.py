"""Chat templates: they turn a list of messages into text, and mark the parts that are learned.

Templates are Jinja programs in the dialect of Hugging Face transformers (`apply_chat_template`):
white space around blocks is trimmed, `{% generation %}` encloses the text of the assistant, and
`raise_exception`, `strftime_now`, `tojson`, `break` and `continue` are known. They run in a
sandbox with limits (`chat_sandbox.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokmill import plugins
from tokmill.errors import UsageError
from tokmill.text.chat_sandbox import CLOSE, OPEN, STEP, Steps, environment_of, little_memory

BREAK, END = "\ufdd2", "\ufdd3"
"""Marks in a rendered chat beside `OPEN` and `CLOSE` (begin and end of learned text): a mark inside
a name of a special token, so that it stays text; end of the chat. Unicode reserves these characters
for internal use; a chat that holds one is refused."""
MARKS = re.compile(f"[{OPEN}-{END}]")

MOST_TURNS = 1000
"""Turns of the assistant at most, if a chat must be rendered again for each of them."""
STEPS, STEPS_OF_MESSAGE = 200_000, 1_000
"""Loop steps and macro calls that a template may make for a chat, plus so many for each message."""


class NoMask(Exception):
    """The text of the assistant cannot be separated from the rest."""


class TooMany(Exception):
    """The chat has more than `MOST_TURNS` turns of the assistant."""


class Template:
    """A compiled template."""

    def __init__(self, text: str, names: Mapping[str, str], date: str = "") -> None:
        """Compile.

        Args:
            text: the Jinja program.
            names: values of `bos_token`, `eos_token` and similar names.
            date: the date that it gets as today, YYYY-MM-DD; empty: it must not use the date.

        Raises `UsageError` for a text that is no template, or that uses the date without `date`.
        """
        self.text = text
        self.names = dict(names)
        if "strftime_now" in text and not date:
            raise UsageError(
                "the chat template writes today's date, so that the same chats would get other ids "
                "each day",
                hint="--date 2026-01-31 names the day that it writes",
            )
        errors = plugins.require("jinja2.exceptions")
        try:
            with little_memory():
                # Jinja computes constant expressions here already.
                self._compiled = environment_of(date).from_string(text)
        except (errors.TemplateError, MemoryError, RecursionError, OverflowError) as error:
            raise UsageError(
                f"the chat template is no Jinja template: {str(error) or type(error).__name__}",
                hint="--chat-template takes chatml, llama3, plain, a .jinja file or a "
                "tokenizer_config.json",
            ) from None
        self.marks = re.search(r"\{%-?\+?\s*generation\b", text) is not None
        self._failed = (errors.TemplateError, TypeError, ValueError, KeyError, OverflowError,
                        AttributeError, IndexError, ArithmeticError, RecursionError,
                        MemoryError)  # fmt: skip

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, prompt: bool = False
    ) -> str:
        """Return the text of a chat, with `OPEN` and `CLOSE` around the `generation` blocks.

        Raises `TemplateFailed` if the template refuses the chat, or needs too much time or memory.
        """
        names = {"messages": messages, "tools": tools, "documents": None}
        steps = Steps(STEPS + STEPS_OF_MESSAGE * len(messages))
        try:
            with little_memory():
                text: str = self._compiled.render(
                    **{**self.names, **names, "add_generation_prompt": prompt, STEP: steps}
                )
        except MemoryError:
            raise TemplateFailed("it takes too much memory") from None
        except self._failed as error:
            raise TemplateFailed(str(error).partition("\n")[0]) from None
        return text

    def marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, ends: re.Pattern[str]
    ) -> str:
        """Return the text of a chat with the assistant's turns marked, for any template.

        A template without `generation` is rendered again up to each turn of the assistant. The text
        that the turn adds after its prompt is learned, without white space after the special token
        that ends it (`ends` matches this token and white space at the end of a text). Raises
        `NoMask` if the template writes earlier turns differently when later ones follow.
        """
        full = self.render(messages, tools)
        if self.marks:
            return full
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) > MOST_TURNS:
            raise TooMany
        parts: list[str] = []
        done = 0
        for turn in turns:
            try:
                before = self.render(messages[:turn], tools, prompt=True)
                last = turn == len(messages) - 1
                after = full if last else self.render(messages[: turn + 1], tools)
            except TemplateFailed:
                raise NoMask from None
            if not (full.startswith(after) and after.startswith(before)) or len(before) < done:
                raise NoMask
            found = ends.search(after, len(before))
            stop = found.end(1) if found else len(after)
            parts += [full[done : len(before)], OPEN, full[len(before) : stop], CLOSE]
            done = stop
        return "".join([*parts, full[done:]])


class TemplateFailed(Exception):
    """A template refuses a chat, or fails."""
