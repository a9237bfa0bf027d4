"""A chat template comes with somebody's tokenizer: whatever it does, it is right or refused."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

import chat_peers
from making import jsonl, quick_build
from tokmill.base.children.child import Limits
from tokmill.base.errors import TokmillError, UsageError
from tokmill.text.chats import chat_templates
from tokmill.text.chats.chat_template_files import BUILT_IN, find
from tokmill.text.chats.chat_templates import Template

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def whole(text: str, chats: Any = ((CHAT, None),), date: str = "") -> list[tuple[str, str]]:
    return Template(text, {}, date).render("whole", chats)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "LIMITS", Limits(cpu_seconds=0.5, memory=200 << 20))
    monkeypatch.setattr("tokmill.base.children.child_calls._shared", {})


ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 9 ** (9 ** (messages | length + 7)) }}",
    "{% set n = namespace(s='a' * 99999) %}"
    "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
)
REFUSED = (
    "{{ 'a' * 10 ** 11 }}",
    "{{ '%0*d' % (20000000000, messages | length) }}",
    "{{ messages[0]['content'] | center(30000000000) }}",
    "{{ 10 ** 15 * messages }}",
    "{{ range(10 ** 9) | length }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ lipsum(n=1) }}",
    "{{ '\\ud800' }}",
    "{{ '\\ufdd0' }}",
    "{{ '\\ufdd1' }}",
    "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ 1 / 0 }}",
    "{{ messages[5].content.x }}",
    "{{ messages | tojson(indent='x', y=1) }}",
    "{{ messages | sort }}",
    "{{ {[]: 1} }}",
    "{{ '%d' % 'x' }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('\\ud800') }}",
)
NO_TEMPLATE = ("{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ [1] | random }}")


@pytest.mark.parametrize("text", ENDLESS)
@pytest.mark.usefixtures("limited")
def test_endless_work_ends_the_build_and_names_the_chat(text: str) -> None:
    """Which chat takes too long differs between machines, so that it cannot be a reject."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    other = [{"role": "user", "content": "never ends"}, CHAT[1]]
    text = "{% if messages[0].content != 'hi' %}" + text + "{% endif %}ok"
    template = Template(text, {})
    with pytest.raises(UsageError, match="rendering the chat template took more than") as caught:
        template.render("whole", [(CHAT, None), (other, None)])
    assert caught.value.where == "the chat that begins with 'never ends'"
    assert template.render("whole", [(CHAT, None)]) == [("ok", "")]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.usefixtures("limited")
def test_constants_that_take_too_long_are_refused_at_once() -> None:
    """Jinja computes them when it compiles."""
    with pytest.raises(UsageError, match="took more than 0.5 CPU seconds"):
        Template("{{ 9 ** (9 ** 9) }}", {})


@pytest.mark.parametrize("text", REFUSED)
def test_whatever_fails_refuses_the_chat(text: str) -> None:
    text = "{% if messages[0].content == 'x' %}" + text + "{% endif %}ok"
    bad = [{"role": "user", "content": "x"}, CHAT[1]]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    good, (none, why), again = whole(text, [(CHAT, None), (bad, None), (CHAT, None)])
    assert good == again == ("ok", "") and not none and why
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize("text", NO_TEMPLATE)
def test_what_is_no_template_is_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError, match="no Jinja template"):
        Template(text, {})


def test_a_template_that_raises_is_a_reject_of_a_build(tmp_path: Path) -> None:
    """Each ends as a refused template: with a count and a hint, not as a bug."""
    tokenizer = chat_peers.tokenizer().save(tmp_path / "tokenizer")
    source = jsonl(tmp_path / "x.jsonl", [{"messages": CHAT}])
    for text in ("{{ '\\ud800' }}", "{{ '\\ufdd1' }}", "{{ 1 / 0 }}"):
        with pytest.raises(TokmillError, match="1 template"):
            quick_build(
                "chat", source, tmp_path / "s", chat_template=text, tokenizer=tokenizer, learn="all"
            )


def test_what_is_ordinary_works() -> None:
    text = "{{ 3 ** 4 * 2 }} {{ 'ab' * 3 }} {{ 2.5 * 2 }} {{ '%s' % 1 }} {{ [0] * 2 }}|"
    text += "{{ 'a b' | indent(4) }}|{{ '%s, %d' | format('x', 3) }}|{{ '%(a)s' | format(a=1) }}|"
    text += "{{ 'x'.ljust(3) }}|{{ [1, 2, 3] | batch(2) | list }}|{{ '%5.2f' % 3.14159 }}|"
    text += "{{ {'é': 1} | tojson }}|{{ {'é': 1} | tojson(true) }}|{{ [1] | tojson(indent=1) }}"
    wanted = "162 ababab 5.0 1 [0, 0]|a b|x, 3|1|x  |[[1, 2], [3]]| 3.14|"
    wanted += '{"é": 1}|{"\\u00e9": 1}|[\n 1\n]'
    assert whole(text) == [(wanted, "")]
    many = [(CHAT * 2000, None), *[(CHAT, None)] * 600]
    found = whole(BUILT_IN["chatml"], many)
    assert found[0][0].count("hello") == 2000 and len(found) == 601


def test_values_that_do_not_reach_a_template_are_rejects(tmp_path: Path) -> None:
    """Integers above 64 bits, and tools nested as deep as JSON may be."""
    tokenizer = chat_peers.tokenizer().save(tmp_path / "tokenizer")
    template = "{{ tools | tojson }}" + BUILT_IN["chatml"]
    line = '{"messages": ' + json.dumps(CHAT) + ', "tools": [%s]}'
    deep = ("[" * 495 + "]" * 495, "[" * 900 + "]" * 900, '{"a":' * 490 + "1" + "}" * 490)
    rows = [line % one for one in ("1", str(1 << 64), "1.5", str(-(1 << 63)), *deep)]
    path = jsonl(tmp_path / "x.jsonl", rows)
    store = quick_build("chat", path, tmp_path / "s", chat_template=template, tokenizer=tokenizer)
    left = dict(store.manifest.rejected)
    assert left.pop("number") == 1 and sum(left.values()) + len(store) == 6
    assert left.keys() <= {"depth", "template"} and len(store) >= 3


def test_a_file_of_several_templates(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"

    def found(value: Any) -> str:
        path.write_text(json.dumps({"chat_template": value}))
        return find("", str(tmp_path))[0]

    default = {"name": "default", "template": "{{ 1 }}"}
    tools = {"name": "tool_use", "template": "{{ 2 }}"}
    assert found([tools, default]) == "{{ 1 }}"
    # A name that is no text is not the default, and no bug.
    assert (
        found([{"name": ["default"], "template": "{{ 3 }}"}, {"name": {}}, 5, default]) == "{{ 1 }}"
    )
    for none in ([tools], [{**tools, "name": [1]}], [], {}, 5, None, ""):
        with pytest.raises(UsageError, match="no chat template beside it"):
            found(none)
    with pytest.raises(UsageError, match="none that is called default"):
        find(str(path), None)
