"""Where chat templates come from: built in, beside a tokenizer, or a file that was named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tokmill.errors import UsageError
from tokmill.files import read_file
from tokmill.headers import loads_json, refused

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
    raw = read_file(path)
    with refused(
        "this is no chat template",
        path,
        hint="a template is Jinja, as `chat_template` of a tokenizer_config.json",
    ):
        if path.suffix != ".json":
            return raw.decode()
        value = loads_json(raw)
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
        raw = read_file(path)
        with refused(
            "this is no JSON",
            path,
            hint="name a tokenizer_config.json, a .jinja file, or a template that is built in",
        ):
            value = loads_json(raw)
        for key, token in value.items() if isinstance(value, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(text, str) and not key.startswith("add_"):
                names[key] = text
    return dict(sorted(names.items()))
