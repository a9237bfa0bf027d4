"""Chat templates: they turn a list of messages into text, and mark the parts that are learned.

Templates are Jinja programs in the dialect of Hugging Face transformers (`apply_chat_template`):
white space around blocks is trimmed, `{% generation %}` encloses the text of the assistant, and
`raise_exception`, `strftime_now`, `tojson`, `break` and `continue` are known. They run in Jinja's
sandbox, which gives no access to objects of this program. Their time and memory are limited here,
as the template of a tokenizer may come from anyone.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokmill import plugins
from tokmill.errors import TokmillError, UsageError
from tokmill.files import machine_errors
from tokmill.headers import loads_json

OPEN, CLOSE, BREAK, END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
"""Marks in a rendered chat: begin and end of learned text; a mark inside a name of a special token
(so that it stays text); end of the chat. Unicode reserves these characters for internal use; a chat
that holds one is refused."""
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
"""Matches names of special tokens in a template."""
MOST_TURNS = 1000
"""Turns of the assistant at most, if a chat must be rendered again for each of them."""
STEPS, STEPS_OF_MESSAGE = 200_000, 1_000
"""Loop steps and macro calls that a template may make for a chat, plus so many for each message."""
MEMORY = 2 << 30
"""Bytes of address space that a template may use in addition to those of the process."""
DIGITS = 1 << 16
"""Bits of an integer that a template may compute."""
WIDE = 1 << 20
"""Length of a text that a template may create by a number (padding, repetition)."""
WIDTHS = re.compile(r"%[^a-zA-Z%]*(?:\d{7}|\*)|:[^}]*\d{7}")
"""Matches a format with a larger width, or with a width that is a value."""


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
            with _little_memory():
                # Jinja computes constant expressions here already.
                self._compiled = _environment(date).from_string(text)
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
        steps = _Steps(STEPS + STEPS_OF_MESSAGE * len(messages))
        try:
            with _little_memory():
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


STEP = "tokmill_step"
"""Name of the counter of steps in a template."""


class _Steps:
    """Counts down with each call."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OverflowError("its loops do not end")


_limited = threading.Lock()
_renders = itertools.count()
AGAIN = 256
"""Chats after which the memory of the process is measured again."""


@functools.lru_cache(maxsize=1)
def _address_space(time: int) -> int:
    """Return the address space of the process in bytes; measured once for each `time`."""
    with open("/proc/self/statm", "rb") as handle:
        return int(handle.read().split()[0]) * resource.getpagesize()


@contextmanager
def _little_memory() -> Iterator[None]:
    """Let allocations fail that exceed the current address space of the process by `MEMORY`.

    One thread at a time, so that each restores the right limit.
    """
    with _limited:
        before = resource.getrlimit(resource.RLIMIT_AS)
        limit = _address_space(next(_renders) // AGAIN) + MEMORY
        if before[0] != resource.RLIM_INFINITY:
            limit = min(limit, before[0])
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def _check_widths(*values: Any) -> None:
    """Raise `OverflowError` if one of the numbers would make a very long text."""
    if any(isinstance(value, int) and value > WIDE for value in values):
        raise OverflowError("what it makes is too long")


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses large numbers as arguments."""

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        _check_widths(*arguments, *named.values())
        return function(*arguments, **named)

    return checked


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


@functools.cache
def _environment(date: str) -> Any:
    """Return Jinja's sandbox with the extensions that chat templates expect."""
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

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc, name-defined]
        """A sandbox with limits on loops, macros and numbers."""

        intercepted_binops = frozenset(("*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Return a product, power or formatted text, unless it is too large."""
            bits = _bits(left) * right if operator == "**" else _bits(left) + _bits(right)
            if isinstance(left, int) and isinstance(right, int) and bits > DIGITS:
                raise OverflowError("its numbers are too large")
            if operator == "*":
                for many, times in ((left, right), (right, left)):
                    if isinstance(many, Sized) and isinstance(times, int):
                        _check_widths(len(many) * times)
            if operator == "%" and isinstance(left, str) and WIDTHS.search(left):
                raise OverflowError("what it makes is too long")
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
            """Call a method of a text, such as `ljust`, unless its result would be too long."""
            if isinstance(getattr(called, "__self__", None), str):
                _check_widths(*arguments, *named.values())
                if called.__name__ in ("format", "format_map") and WIDTHS.search(called.__self__):
                    raise OverflowError("what it makes is too long")
            return super().call(context, called, *arguments, **named)

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            tree = super()._parse(source, name, filename)
            for node in tree.find_all((jinja.nodes.For, jinja.nodes.Macro, jinja.nodes.CallBlock)):
                counter = jinja.nodes.Name(STEP, "load", lineno=node.lineno)
                call = jinja.nodes.Call(counter, [], [], None, None, lineno=node.lineno)
                node.body.insert(0, jinja.nodes.ExprStmt(call, lineno=node.lineno))
            return tree

    environment = Sandbox(
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

    # Equal inputs must give equal stores, so random functions are removed.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = _narrow(tojson)
    for name in ("batch", "slice", "center", "indent"):
        environment.filters[name] = _narrow(environment.filters[name])
    environment.filters["format"] = lambda text, *a, **k: environment.call_binop(
        None, "%", str(text), k or a
    )
    environment.globals["raise_exception"] = raise_exception
    if date:
        try:
            day = datetime.datetime.fromisoformat(date)
        except ValueError:
            raise UsageError(f"--date {date!r} is no day", hint="such as 2026-01-31") from None
        environment.globals["strftime_now"] = day.strftime
    return environment


class Found(NamedTuple):
    """A template, and its names of special tokens."""

    template: str
    names: dict[str, str]


def is_text(template: str) -> bool:
    """Say whether this is the text of a template, not a name or a path."""
    return "{%" in template or "{{" in template


def find(template: str, tokenizer: str | None) -> Found:
    """Return the template for an option.

    Args:
        template: a name of `BUILT_IN`, a template, a file with one, or "": the tokenizer's.
        tokenizer: path of the tokenizer; files beside it have the names of its special tokens.

    Raises `UsageError` if there is none.
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
        value = loads_json(raw)
    except ValueError as error:
        raise TokmillError(
            f"this is no chat template: {error}",
            where=str(path),
            hint="a template is Jinja, as `chat_template` of a tokenizer_config.json",
        ) from None
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
    """Return the special tokens in a tokenizer's own files: eos_token and so on → token."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / file
        if not path.is_file():
            continue
        with machine_errors("read", path):
            raw = path.read_bytes()
        try:
            value = loads_json(raw)
        except ValueError as error:
            raise TokmillError(
                f"this is no JSON: {error}",
                where=str(path),
                hint="name a tokenizer_config.json, a .jinja file, or a template that is built in",
            ) from None
        for key, token in value.items() if isinstance(value, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(text, str) and not key.startswith("add_"):
                names[key] = text
    return dict(sorted(names.items()))
