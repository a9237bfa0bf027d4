"""Chat templates: they turn a list of messages into text, and mark the parts that are learned.

Templates are Jinja programs in the dialect of Hugging Face transformers (`apply_chat_template`):
white space around blocks is trimmed, `{% generation %}` encloses the text of the assistant, and
`raise_exception`, `strftime_now`, `tojson`, `break` and `continue` are known. A template may come
from anyone, so it runs in Jinja's sandbox, and that in a child process with limits on time and
memory: `render` is the child's side.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tokmill import plugins
from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import ChildDied, shared
from tokmill.base.errors import UsageError

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Marks in a rendered chat: begin and end of learned text. Unicode reserves these characters for
internal use; a chat that holds one is refused."""
MARKS = re.compile(f"[{OPEN}{CLOSE}]")
PROMPT = "add_generation_prompt"
"""Variable by which a template writes what stands before an answer, which is not learned."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
LIMITS = Limits(cpu_seconds=20, memory=1 << 30, output=256 << 20)
MANY = 256
"""Chats that the child renders in a call; the limits hold for each call."""
MOST_TURNS = 1000
"""Turns of the assistant at most, if a chat must be rendered again for each of them."""

How = Literal["whole", "turns", "prompt"]
"""The text as it is; with marks around the assistant's turns; with the beginning of an answer."""
Messages = Sequence[Mapping[str, Any]]
Chat = tuple[Messages, Any]
"""Messages and tools."""


class Template:
    """A chat template, its names of special tokens and the date that it gets as today."""

    def __init__(
        self, text: str, names: Mapping[str, str], date: str = "", ends: str = r"(?!)"
    ) -> None:
        """Compile.

        `names`: values of `bos_token` and so on. `ends`: pattern whose first group is the special
        token that ends a turn. Raises `UsageError` for a text that is no template, or that uses the
        date without `date` (YYYY-MM-DD).
        """
        if "strftime_now" in text and not date:
            raise UsageError(
                "the chat template writes today's date, so that the same chats would get other ids "
                "each day",
                hint="--date 2026-01-31 names the day that it writes",
            )
        try:
            datetime.datetime.fromisoformat(date or "2026-01-31")
        except ValueError:
            raise UsageError(f"--date {date!r} is no day", hint="such as 2026-01-31") from None
        self.text = text
        self.has_turns = bool(GENERATION.search(text)) or PROMPT in text
        """Whether it tells the assistant's turns from the rest."""
        self.call = functools.partial(self._call, text, dict(names), date, ends)
        self.call("whole", [])

    def render(self, how: How, chats: Sequence[Chat]) -> list[tuple[str, str]]:
        """Return (text, why there is none) of each chat; why: "no mask", or the template's words.

        Marks of the assistant's turns are those of `{% generation %}`. Without it the chat is
        rendered again up to each turn, and what the turn adds after its prompt is marked, without
        white space after the special token that ends it.

        Raises `UsageError` if the template takes too much time or memory.
        """
        parts = [chats[start : start + MANY] for start in range(0, len(chats), MANY)]
        return [(text, why) for part in parts for text, why in self.call(how, part)]

    def _call(self, *arguments: Any) -> list[list[str]]:
        *made, chats = arguments
        try:
            result: list[list[str]] = shared(f"{__name__}:render", LIMITS)(*made, chats)
        except ChildDied as died:
            if len(chats) > 1:
                # One by one, to name it.
                return [result for chat in chats for result in self._call(*made, [chat])]
            assert died.ended is not None
            begin = str(chats[0][0][0].get("content"))[:60] if chats else ""
            raise UsageError(
                f"rendering the chat template {died.ended.why()}",
                where=f"the chat that begins with {begin!r}" if chats else "",
                hint="another --chat-template; or leave out this chat",
            ) from None
        return result


def render(
    text: str, names: dict[str, str], date: str, ends: str, how: How, chats: Sequence[Chat]
) -> list[tuple[str, str]]:
    """Return (text, why there is none) of each chat; the child calls it."""
    compiled, by_turns = _compiled(text, date), how == "turns" and not GENERATION.search(text)
    result = []
    for messages, tools in chats:
        values = names | {"tools": tools, "documents": None}

        def write(some: Messages, prompt: bool, values: dict[str, Any] = values) -> str:
            values = values | {"messages": some, "add_generation_prompt": prompt}
            written: str = compiled.render(values)
            return written

        try:
            whole = write(messages, how == "prompt")
            if by_turns:
                whole = _marked(write, messages, whole, ends)
            stretches = [part.count(CLOSE) for part in whole.split(OPEN)]
            if stretches[0] or any(count != 1 for count in stretches[1:]):
                raise ValueError("its marks of learned text are not in pairs")
            whole.encode()
            result.append((whole, ""))
        except Exception as error:
            # Whatever a template raises, it refuses the chat.
            why = str(error).partition("\n")[0].encode(errors="replace").decode()
            result.append(("", why or type(error).__name__))
    return result


class NoMask(Exception):
    """The text of the assistant cannot be separated from the rest."""


def _marked(
    write: Callable[[Messages, bool], str], messages: Messages, whole: str, ends: str
) -> str:
    """Return a text with marks around the turns of the assistant, found by rendering prefixes."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    parts: list[str] = []
    done = 0
    for turn in turns:
        try:
            before = write(messages[:turn], True)
            after = whole if turn == len(messages) - 1 else write(messages[: turn + 1], False)
        except Exception:
            raise NoMask("no mask") from None
        fits = whole.startswith(after) and after.startswith(before) and len(before) >= done
        if not fits or len(turns) > MOST_TURNS:
            raise NoMask("no mask")
        end = re.compile(ends).search(after, len(before))
        stop = end.end(1) if end else len(after)
        parts += [whole[done : len(before)], OPEN, whole[len(before) : stop], CLOSE]
        done = stop
    return "".join([*parts, whole[done:]])


@functools.lru_cache(maxsize=8)
def _compiled(text: str, date: str) -> Any:
    jinja, sandbox, extension = map(plugins.require, ("jinja2", "jinja2.sandbox", "jinja2.ext"))

    class Generation(extension.Extension):  # type: ignore[misc, name-defined]
        """`{% generation %} … {% endgeneration %}`: what stands between is marked."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Read the block as a call of `_mark` with its body."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return jinja.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def raise_exception(message: str) -> None:
        raise jinja.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extension.loopcontrols]
    )
    # Equal inputs must give equal stores, so random functions are removed.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    if date:
        environment.globals["strftime_now"] = datetime.datetime.fromisoformat(date).strftime
    try:
        return environment.from_string(text)
    except Exception as error:
        raise UsageError(
            f"the chat template is no Jinja template: {str(error) or type(error).__name__}",
            hint="--chat-template takes chatml, plain, a .jinja file or a tokenizer_config.json",
        ) from None
