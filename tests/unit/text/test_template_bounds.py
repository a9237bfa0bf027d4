"""A chat template comes with somebody's tokenizer: it ends, and takes a bounded memory."""

from __future__ import annotations

import resource

import pytest

from tokmill.errors import UsageError
from tokmill.text.chat_templates import BUILT_IN, Template, TemplateFailed

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = namespace(v=3) %}{% for i in range(60) %}{% set n.v = n.v * n.v %}{% endfor %}",
    ],
)
def test_endless_work_fails_at_the_chat(text: str) -> None:
    with pytest.raises(TemplateFailed, match="do not end|too large"):
        Template(text, {}).render(CHAT)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10 ** 11 }}",
        "{{ '%0*d' % (20000000000, messages | length) }}",
        "{{ messages[0]['content'] | center(30000000000) }}",
        "{% set n = namespace(s='a' * 99999) %}"
        "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    ],
)
def test_memory_without_end_fails_at_the_chat(text: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises((TemplateFailed, UsageError)):
        Template(text, {}).render(CHAT)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("text", ["{{ lipsum(n=1) }}", "{{ [1, 2] | random }}"])
def test_chance_has_no_place_in_a_store(text: str) -> None:
    with pytest.raises((TemplateFailed, UsageError), match=r"lipsum|random"):
        Template(text, {}).render(CHAT)


def test_what_is_bounded_does_not_stand_in_the_way() -> None:
    text = "{{ 3 ** 4 * 2 }} {{ 'ab' * 3 }} {{ 2.5 * 2 }} {{ '%s' % 1 }} {{ [0] * 2 }}"
    assert Template(text, {}).render(CHAT) == "162 ababab 5.0 1 [0, 0]"
    many = CHAT * 2000
    assert Template(BUILT_IN["chatml"][0], {}).render(many).count("hello") == 2000
