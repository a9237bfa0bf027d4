"""A chat template comes with somebody's tokenizer: it ends, and takes a bounded memory."""

from __future__ import annotations

import resource

import pytest

from tokmill.errors import UsageError
from tokmill.text.chat_template_files import BUILT_IN
from tokmill.text.chat_templates import Template, TemplateFailed

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


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * messages }}",
        "{{ messages | slice(10 ** 9) | list | length }}",
        "{{ messages | batch(10 ** 9, 'x') | list | length }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x' | indent(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_a_large_number_makes_nothing_large(text: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TemplateFailed, UsageError), match="(?i)too long|too big"):
        Template(text, {}).render(CHAT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_memory_that_runs_out_has_a_word() -> None:
    with pytest.raises(TemplateFailed, match="too much memory"):
        Template("{{ (('a' * 10 ** 6).replace('a', 'b' * 10 ** 5)) }}", {}).render(CHAT)


@pytest.mark.parametrize("text", ["{{ lipsum(n=1) }}", "{{ [1, 2] | random }}"])
def test_chance_has_no_place_in_a_store(text: str) -> None:
    with pytest.raises((TemplateFailed, UsageError), match=r"lipsum|random"):
        Template(text, {}).render(CHAT)


def test_what_is_bounded_does_not_stand_in_the_way() -> None:
    text = "{{ 3 ** 4 * 2 }} {{ 'ab' * 3 }} {{ 2.5 * 2 }} {{ '%s' % 1 }} {{ [0] * 2 }}"
    assert Template(text, {}).render(CHAT) == "162 ababab 5.0 1 [0, 0]"
    text = "{{ 'a b' | indent(4) }}|{{ '%s, %d' | format('x', 3) }}|{{ '%(a)s' | format(a=1) }}|"
    text += (
        "{{ 'x'.ljust(3) }}|{{ [1, 2, 3] | batch(2) | list }}|{{ '%5.2f' % 3.14159 }}|{{ 7 % 4 }}"
    )
    assert Template(text, {}).render(CHAT) == "a b|x, 3|1|x  |[[1, 2], [3]]| 3.14|3"
    many = CHAT * 2000
    assert Template(BUILT_IN["chatml"][0], {}).render(many).count("hello") == 2000
