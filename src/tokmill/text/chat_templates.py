"""Chat templates: a list of messages to the text that a model reads, and which of it is learned.

Templates are Jinja programs in the dialect of Hugging Face transformers (`apply_chat_template`):
white space around blocks is trimmed, `{% generation %}` encloses what the assistant writes, and
`raise_exception`, `strftime_now`, `tojson`, `break` and `continue` are known. They run in Jinja's
sandbox.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokmill import plugins
from tokmill.errors import TokmillError, UsageError
from tokmill.files import machine_errors

OPEN, CLOSE, BREAK, END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
"""Marks in a rendered chat: what is learned begins and ends, a name of a special token is broken
(so that it stays text), the chat ends. Unicode keeps these for a program's own use; a chat that
holds one is refused."""
MARKS = re.compile(f"[{OPEN}-{END}]")

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
PLAIN = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- 'Assistant:' }}
{%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
{%- else %}
{{- message['role'] | capitalize + ': ' + message['content'] }}
{%- endif %}
{{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}
"""
BUILT_IN: dict[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": (
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "plain": (PLAIN, ()),
}
"""Name → (template, special tokens that it writes)."""

ANGLED = re.compile(r"<[|｜][^|｜<>\s]{1,40}[|｜]>")
"""What looks like a special token in a template."""
MOST_TURNS = 1000
"""Turns of the assistant that are found by rendering a chat again up to each of them."""


class NoMask(Exception):
    """What the assistant wrote cannot be told from the rest."""


class TooMany(Exception):
    """The chat has more than `MOST_TURNS` turns of the assistant."""


class Template:
    """A compiled template."""

    def __init__(self, text: str, names: Mapping[str, str], date: str = "") -> None:
        """Compile.

        Args:
            text: the Jinja program.
            names: what it calls `bos_token`, `eos_token` and the like.
            date: the day that it sees as today, YYYY-MM-DD; empty: it may not ask.

        Raises `UsageError` for a text that is no template, or that asks for a day.
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
            self._compiled = _environment(date).from_string(text)
        except errors.TemplateError as error:
            raise UsageError(
                f"the chat template is no Jinja template: {error}",
                hint="--chat-template takes chatml, llama3, plain, a .jinja file or a "
                "tokenizer_config.json",
            ) from None
        self.marks = re.search(r"\{%-?\+?\s*generation\b", text) is not None
        self._failed = (errors.TemplateError, TypeError, ValueError, KeyError, OverflowError,
                        AttributeError, IndexError, ArithmeticError, RecursionError)  # fmt: skip

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, prompt: bool = False
    ) -> str:
        """Return the text of a chat, with `OPEN` and `CLOSE` around what `generation` encloses.

        Raises `TemplateFailed` where the template refuses the chat.
        """
        try:
            text: str = self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.names,
            )
        except self._failed as error:
            raise TemplateFailed(str(error).partition("\n")[0]) from None
        return text

    def marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, ends: re.Pattern[str]
    ) -> str:
        """Return the text of a chat with the assistant's turns marked, whatever the template.

        A template without `generation` is rendered again up to each turn of the assistant: what the
        turn adds behind the prompt for it is learned, without the white space behind the special
        token that ends it (`ends` matches the two together, at the end of a text). Raises `NoMask`
        where the template writes earlier turns in another way when later ones follow, or none.
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
    """A template refuses a chat, or fails at it."""


@functools.cache
def _environment(date: str) -> Any:
    """Return Jinja's sandbox with what chat templates expect."""
    jinja = plugins.require("jinja2")
    sandbox = plugins.require("jinja2.sandbox")
    extension = plugins.require("jinja2.ext")

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

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, extension.loopcontrols],
    )

    def raise_exception(message: str) -> None:
        raise jinja.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    if date:
        try:
            day = datetime.datetime.fromisoformat(date)
        except ValueError:
            raise UsageError(f"--date {date!r} is no day", hint="such as 2026-01-31") from None
        environment.globals["strftime_now"] = day.strftime
    return environment


class Found(NamedTuple):
    """A template as it was found, and what it may call special tokens."""

    template: str
    names: dict[str, str]


def is_text(template: str) -> bool:
    """Say whether this is a template itself, not the name of one or of its file."""
    return "{%" in template or "{{" in template


def find(template: str, tokenizer: str | None) -> Found:
    """Return the template that is meant.

    Args:
        template: a name of `BUILT_IN`, a template, a file with one, or nothing: the tokenizer's.
        tokenizer: path of the tokenizer; files beside it say what its special tokens are called.

    Raises `UsageError` where there is none.
    """
    folder = None
    if tokenizer is not None:
        path = Path(tokenizer)
        folder = path if path.is_dir() else path.parent
        if (folder / "vocab" / "tokenizer.json").is_file():
            folder = folder / "vocab"
    names = _names(folder) if folder is not None else {}
    if template in BUILT_IN or is_text(template):
        return Found(template, names)
    if template:
        file = Path(template)
        if file.is_dir():
            folder = file
        elif file.is_file():
            return Found(_read(file), names or _names(file.parent))
        else:
            raise UsageError(
                f"no chat template is called {template!r}, and there is no such file",
                hint=f"one of {', '.join(BUILT_IN)}, a .jinja file or a tokenizer_config.json",
            )
    if folder is not None:
        for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
            if (folder / name).is_file() and (text := _read(folder / name, missing="")):
                return Found(text, names or _names(folder))
    where = str(folder) if folder is not None else ""
    raise UsageError(
        "the tokenizer has no chat template beside it, and none was named",
        where=where,
        hint=f"--chat-template {', '.join(BUILT_IN)}, a .jinja file or a tokenizer_config.json",
    )


def _read(path: Path, missing: str | None = None) -> str:
    with machine_errors("read", path):
        raw = path.read_bytes()
    try:
        if path.suffix != ".json":
            return raw.decode()
        value = msgspec.json.decode(raw)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise TokmillError(f"this is no chat template: {error}", where=str(path)) from None
    found = value.get("chat_template") if isinstance(value, dict) else None
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if isinstance(found, str) and found:
        return found
    if missing is not None:
        return missing
    raise UsageError(
        "the file has no chat_template", where=str(path), hint="name a .jinja file, or chatml"
    )


def _names(folder: Path) -> dict[str, str]:
    """Return what a tokenizer's own files call its special tokens: eos_token and the like."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / file
        if not path.is_file():
            continue
        with machine_errors("read", path):
            raw = path.read_bytes()
        try:
            value = msgspec.json.decode(raw)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            raise TokmillError(f"this is no JSON: {error}", where=str(path)) from None
        for key, token in value.items() if isinstance(value, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(text, str) and not key.startswith("add_"):
                names[key] = text
    return dict(sorted(names.items()))
