"""Read the messages of chats (role and text) from the common shapes of JSON."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tokmill.text.chats.chat_templates import BREAK, MARKS

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant"}
ROLES |= dict.fromkeys(("function", "observation", "function_response"), "tool")
"""Role in files → role in templates."""
CALLS = ("tool_calls", "function_call", "tool_call_id")
READ = {"role", "from", "content", "value", "weight"}
TEXTS = ("text", "input_text", "output_text")
INTEGERS = range(-(1 << 63), 1 << 64)
"""The integers that reach a template."""


class Refused(Exception):
    """A chat that does not enter the store: the reason, and whether it is rejected or skipped."""

    def __init__(self, reason: str, rejected: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.rejected = reason, rejected


class Reader:
    """Values of lines → messages for a template.

    Both shapes are read: `{"role", "content"}` (OpenAI's), where the content is a string or a list
    of parts with text, and `{"from", "value"}` (ShareGPT's). Keys that do not occur in the template
    cannot be written; built-in templates write no tools. `named` matches names of special tokens.
    """

    def __init__(
        self, template: str, built_in: bool, named: re.Pattern[str], specials: str
    ) -> None:
        self.template, self.built_in, self.named = template, built_in, named
        self.specials = specials
        self.notes: Counter[str] = Counter()
        """Counts of what is left out or stays text."""

    def chat(
        self, value: Any, system: Any, tools: Any = None
    ) -> tuple[list[dict[str, Any]], Any, list[bool]]:
        """Return the messages of a chat, its tools, and for each message if it may be learned.

        `system` and `tools` are the values of these keys beside the messages. Raises `Refused`.
        """
        if value is None:
            raise Refused("missing", rejected=False)
        if not isinstance(value, list) or not isinstance(system, str | None):
            raise Refused("type")
        try:
            chat = [self._message(given) for given in value]
            if tools and "tools" not in self.template:
                self.note("the key 'tools' of chats, which the template does not write")
                tools = None
            tools = self._guarded(tools) if tools else None
        except RecursionError:
            raise Refused("depth") from None
        if not any(message.get("content") or len(message) > 2 for message in chat):
            raise Refused("empty", rejected=False)
        weights = [given.get("weight") for given in value]
        if any(weight not in (None, 0, 1) or isinstance(weight, bool) for weight in weights):
            raise Refused("weight")
        learned = [weight != 0 for weight in weights]
        if system and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": self._guarded(system)})
            learned.insert(0, True)
        return chat, tools, learned

    def note(self, what: str) -> None:
        """Count something for the notes of the build."""
        self.notes[what if what in self.notes or len(self.notes) < 20 else "other keys"] += 1

    def _message(self, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise Refused("type")
        name = given.get("role", given.get("from"))
        role = ROLES.get(name) if isinstance(name, str) else None
        if name == "function_call" or (role == "tool" and self.built_in):
            raise Refused("tool calls")
        if role is None:
            raise Refused("role")
        message: dict[str, Any] = {"role": role}
        content = given.get("content", given.get("value"))
        if isinstance(content, list):
            content = "".join(map(_text_of, content))
        if isinstance(content, str):
            message["content"] = self._guarded(content)
        for key, other in given.items() if len(given) > 2 else ():
            if not (key in READ or other is None or other == []):
                self._other(key, other, message)
        if content is None and len(message) == 1 or not isinstance(content, str | None):
            raise Refused("content")
        return message

    def _other(self, key: str, value: Any, message: dict[str, Any]) -> None:
        """Add another key of a message if the template can write it, or count it."""
        if not self.built_in and key in self.template:
            message[key] = self._guarded(value)
        elif key in CALLS:
            raise Refused("tool calls")
        else:
            self.note(f"the key {key!r} of messages, which the template does not write")

    def _guarded(self, value: Any) -> Any:
        """Return a value with a mark in each name of a special token, so that it stays text."""
        if isinstance(value, str):
            if not value.isascii() and MARKS.search(value):
                raise Refused("noncharacter")
            if self.specials == "special":
                return value
            broken, count = self.named.subn(lambda m: m[0][0] + BREAK + m[0][1:], value)
            if count and self.specials == "reject":
                raise Refused("special token")
            if count:
                self.note("names of special tokens in messages, which stay text")
            return broken
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(inner) for key, inner in value.items()}
        if isinstance(value, int) and value not in INTEGERS:
            raise Refused("number")
        return [self._guarded(inner) for inner in value] if isinstance(value, list) else value


def _text_of(part: Any) -> str:
    text, kind = part, "text"
    if isinstance(part, dict):
        text, kind = part.get("text"), part.get("type", "text")
    if not isinstance(text, str) or kind not in TEXTS:
        raise Refused("no text")
    return text
