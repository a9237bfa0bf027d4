"""Where chat templates come from: built in, beside a tokenizer, or a file that was named."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tokmill.base.errors import UsageError
from tokmill.base.files import read_file
from tokmill.base.headers import loads_json, refused

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
BUILT_IN = {"chatml": CHATML, "plain": PLAIN}
ANGLED = re.compile(r"<[|｜][^|｜<>\s]{1,40}[|｜]>")
"""Matches names of special tokens in a template."""
FILES = ("chat_template.jinja", "tokenizer_config.json")
"""Where the template of a tokenizer stands, the first one first."""
KINDS = f"{', '.join(BUILT_IN)}, a .jinja file or a tokenizer_config.json"


def is_text(template: str) -> bool:
    """Say whether this is the text of a template, not a name or a path."""
    return "{%" in template or "{{" in template


def special_tokens(template: str) -> tuple[str, ...]:
    """Return the special tokens that a built-in template writes; none for any other."""
    return tuple(dict.fromkeys(ANGLED.findall(BUILT_IN.get(template, ""))))


def find(template: str, tokenizer: str | None) -> tuple[str, dict[str, str]]:
    """Return the template for an option, and the names of special tokens: `eos_token` → token.

    Args:
        template: a name of `BUILT_IN`, a template, a file with one, or "": the tokenizer's.
        tokenizer: path of the tokenizer; files beside it have the names of its special tokens.

    Raises `UsageError` if there is none, `TokmillError` for a damaged file.
    """
    folder = None
    if tokenizer is not None:
        path = Path(tokenizer)
        folder = path if path.is_dir() else path.parent
        if (folder / "vocab" / "tokenizer.json").is_file():
            folder = folder / "vocab"
    names = _names(folder) if folder is not None else {}
    if template in BUILT_IN or is_text(template):
        return template, names
    file = Path(template)
    if os.path.isfile(template):
        if text := _template_of(file):
            return text, names or _names(file.parent)
        raise UsageError(
            "the file has no chat template, or none that is called default",
            where=template,
            hint="write the one for these chats into a .jinja file, and name that; or name chatml",
        )
    if template and not os.path.isdir(template):
        raise UsageError(
            f"no chat template is called {template!r}, and there is no such file",
            hint=f"one of {KINDS}",
        )
    folder = file if template else folder
    for file in (folder / name for name in FILES) if folder is not None else ():
        if file.is_file() and (text := _template_of(file)):
            return text, names or _names(file.parent)
    raise UsageError(
        "the tokenizer has no chat template beside it, and none was named",
        where=str(folder or ""),
        hint=f"--chat-template {KINDS}",
    )


def _template_of(path: Path) -> str:
    """Return the template in a file, of several the default; "" if it has none."""
    value = _read(path)
    template = value.get("chat_template") if isinstance(value, dict) else value
    if isinstance(template, list):
        several = [each for each in template if isinstance(each, dict)]
        defaults = [each.get("template") for each in several if each.get("name") == "default"]
        template = defaults[-1] if defaults else ""
    return template if isinstance(template, str) else ""


def _names(folder: Path) -> dict[str, str]:
    """Return the special tokens in a tokenizer's own files: eos_token and so on → token."""
    names: dict[str, str] = {}
    for file in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        value = _read(file) if file.is_file() else None
        for key, token in value.items() if isinstance(value, dict) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(text, str) and not key.startswith("add_"):
                names[key] = text
    return dict(sorted(names.items()))


def _read(path: Path) -> Any:
    """Return the value of a JSON file, or the text of another."""
    raw = read_file(path)
    hint = "name a tokenizer_config.json, a .jinja file, or a template that is built in"
    with refused("this cannot be read", path, hint=hint):
        return loads_json(raw) if path.suffix == ".json" else raw.decode()
