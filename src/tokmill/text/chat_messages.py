"""Read the messages of chats (role and text) from the common shapes of JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Role in files → role in templates."""
CALLS = ("tool_calls", "function_call", "tool_call_id")
READ = {"role", "from", "content", "value", "weight"}


class Refused(Exception):
    """A chat that does not enter the store: the reason, and whether it is rejected or skipped."""

    def __init__(self, reason: str, rejected: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.rejected = reason, rejected


class Reader:
    """Values of lines → messages for a template.

    Both shapes are read: `{"role", "content"}` (OpenAI's), where the content is a string or a list
    of parts with text, and `{"from", "value"}` (ShareGPT's).
    """

    def __init__(
        self, template: str, guard: Callable[[str], str], built_in: bool, notes: Counter[str]
    ) -> None:
        """Prepare.

        Args:
            template: its text; a key that does not occur in it cannot be written.
            guard: marks names of special tokens in a text.
            built_in: whether the template is built in; such templates do not write tools.
            notes: counts of keys that are left out.
        """
        self.template, self.guard, self.built_in, self.notes = template, guard, built_in, notes

    def chat(self, value: Any, system: Any) -> tuple[list[dict[str, Any]], list[bool]]:
        """Return the messages of a chat, and for each whether it may be learned.

        Args:
            value: the list of messages in the line.
            system: the value of the key `system` beside it.

        Raises `Refused`. The reasons missing and empty are skips; type, role, content, "no text"
        (an image), "tool calls" and weight are rejects.
        """
        if value is None:
            raise Refused("missing", rejected=False)
        if not isinstance(value, list):
            raise Refused("type")
        if system is not None and not isinstance(system, str):
            raise Refused("type")
        chat: list[dict[str, Any]] = []
        learned: list[bool] = []
        empty = True
        if system and not (value and self._role(value[0]) == "system"):
            chat.append({"role": "system", "content": self.guard(system)})
            learned.append(True)
        for given in value:
            message = self._message(given)
            empty = empty and not message.get("content") and len(message) < 3
            chat.append(message)
            weight = given.get("weight")
            if weight not in (None, 0, 1) or isinstance(weight, bool):
                raise Refused("weight")
            learned.append(weight != 0)
        if empty:
            raise Refused("empty", rejected=False)
        return chat, learned

    def _role(self, given: Any) -> str:
        if not isinstance(given, dict):
            raise Refused("type")
        name = given.get("role", given.get("from"))
        if name == "function_call":
            raise Refused("tool calls")
        role = ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise Refused("role")
        return role

    def _message(self, given: Any) -> dict[str, Any]:
        role = self._role(given)
        message: dict[str, Any] = {"role": role}
        content = given.get("content", given.get("value"))
        if isinstance(content, list):
            content = _text_of_parts(content)
        if isinstance(content, str):
            message["content"] = self.guard(content)
        if len(given) > 2:
            self._others(given, message)
        if role == "tool" and self.built_in:
            raise Refused("tool calls")
        if content is None and len(message) == 1 or not isinstance(content, str | None):
            raise Refused("content")
        return message

    def _others(self, given: Mapping[str, Any], message: dict[str, Any]) -> None:
        """Add the other keys of a message that the template can write; count the rest."""
        for key, value in given.items():
            if key in READ or value is None or value == []:
                continue
            if not self.built_in and key in self.template:
                message[key] = self.guarded(value)
            elif key in CALLS:
                raise Refused("tool calls")
            else:
                self.note(f"the key {key!r} of messages, which the template does not write")

    def guarded(self, value: Any) -> Any:
        """Return a value with the guard applied to all its texts and keys."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, dict):
            return {self.guard(key): self.guarded(inner) for key, inner in value.items()}
        return [self.guarded(inner) for inner in value] if isinstance(value, list) else value

    def note(self, what: str) -> None:
        """Count a key that is left out."""
        self.notes[what if what in self.notes or len(self.notes) < 20 else "other keys"] += 1


def _text_of_parts(parts: list[Any]) -> str:
    """Return the joined text of content that is a list of parts."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise Refused("no text")
        texts.append(text)
    return "".join(texts)
