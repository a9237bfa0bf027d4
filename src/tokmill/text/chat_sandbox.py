"""The sandbox in which chat templates run: Jinja with limits on loops, numbers, texts and memory.

The template of a tokenizer may come from anyone. Jinja's own sandbox gives it no access to objects
of this program, but does not limit its time and memory.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
import resource
import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from tokmill import plugins
from tokmill.errors import UsageError

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Begin and end of learned text in a rendered chat; see `chat_templates`."""
MEMORY = 2 << 30
"""Bytes of address space that a template may use in addition to those of the process."""
DIGITS = 1 << 16
"""Bits of an integer that a template may compute."""
WIDE = 1 << 20
"""Length of a text that a template may create by a number (padding, repetition)."""
WIDTHS = re.compile(r"%[^a-zA-Z%]*(?:\d{7}|\*)|:[^}]*\d{7}")
"""Matches a format with a larger width, or with a width that is a value."""

AGAIN = 256
"""Chats after which the memory of the process is measured again."""
STEP = "tokmill_step"
"""Name of the counter of steps in a template."""


class Steps:
    """Counts down with each call."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self) -> None:
        """Count; raises `OverflowError` after the last."""
        self.left -= 1
        if self.left < 0:
            raise OverflowError("its loops do not end")


_limited = threading.Lock()
_renders = itertools.count()


@functools.lru_cache(maxsize=1)
def _address_space(time: int) -> int:
    """Return the address space of the process in bytes; measured once for each `time`."""
    with open("/proc/self/statm", "rb") as handle:
        return int(handle.read().split()[0]) * resource.getpagesize()


@contextmanager
def little_memory() -> Iterator[None]:
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
def environment_of(date: str) -> Any:
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
