"""Chats have the ids, and the mask, that `apply_chat_template` of transformers gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chat_peers
from making import jsonl, quick_build
from tokmill.text.chats import chat_template_files, chat_templates

pytest.importorskip("transformers")

TRIMMED = """\
{%- set offset = 1 if messages[0]['role'] == 'system' else 0 %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == offset) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>model\\n' }}
        {%- generation %}
        {{- message.content | trim + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content | trim ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- if message.content %}{{- message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' ~ call.function.name ~ (call.function.arguments | tojson) ~ '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
"""
TEMPLATES = chat_template_files.BUILT_IN | {"trimmed": TRIMMED, "tools": TOOLS}


def _is_ordinary(text: str) -> bool:
    """Say whether it has no mark and no special token, which some tokenizers refuse in messages.

    Hypothesis draws strings of the modules that are imported, `<|eot_id|>` among them.
    """
    marks, names = chat_templates.MARKS, chat_template_files.ANGLED
    return not marks.search(text) and not names.search(text)


TEXT = st.text(max_size=12).filter(_is_ordinary)
TEXT |= st.sampled_from(
    ["", " ", "\n", " a", "\n\nb ", "é😀", "don't\t", "<|im_", "|>", "user\n", "{{ x }}", "42 "]
)


def turns(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, str]]]:
    pairs = st.lists(st.tuples(text, text), min_size=1, max_size=4)

    def chat(system: str | None, pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
        first = [{"role": "system", "content": system}] if system is not None else []
        return first + [
            {"role": role, "content": content}
            for pair in pairs
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]

    return st.builds(chat, st.none() | text, pairs)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Byte-level files, and two whose special tokens change the text beside them."""
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {}
    for pattern in ("gpt2", "cl100k"):
        found[pattern] = chat_peers.tokenizer(pattern).save(folder / pattern / "tokenizer.json")
    data = json.loads(found["gpt2"].read_text())
    for token in data["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    found["rstrip"] = folder / "rstrip.json"
    found["rstrip"].write_text(json.dumps(data))
    data = json.loads(found["gpt2"].read_text())
    data["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": False},
            data["pre_tokenizer"],
        ],
    }
    found["metaspace"] = folder / "metaspace.json"
    found["metaspace"].write_text(json.dumps(data))
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["gpt2", "cl100k", "rstrip", "metaspace"])
def test_ids_and_masks(
    tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, name: str, kind: str
) -> None:
    path, template = tokenizers[kind], TEMPLATES[name]
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
    peer = chat_peers.peer(path, **names)
    given_as = name if name in chat_template_files.BUILT_IN else template

    @settings(max_examples=12, deadline=None)
    @given(st.lists(turns(TEXT), min_size=1, max_size=5))
    def check(chats: list[list[dict[str, str]]]) -> None:
        chats = [chat for chat in chats if any(message["content"] for message in chat)]
        if not chats:
            return
        folder = tmp_path_factory.mktemp("chats")
        source = jsonl(folder / "x.jsonl", [{"messages": chat} for chat in chats])
        store = quick_build(
            *("chat", source, folder / "s"),
            chat_template=given_as,
            tokens=names,
            tokenizer=path,
        )
        ids, masks = chat_peers.encoded(peer, template, chats)
        assert [record["token"].tolist() for record in store] == ids
        assert [record["loss"].tolist() for record in store] == masks

    check()


def test_tools_and_calls(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": ["é", 1]}}}
    chat = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "ok", "tool_calls": []},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    source = jsonl(tmp_path / "x.jsonl", [{"messages": chat, "tools": tools}])
    path = tokenizers["gpt2"]
    store = quick_build("chat", source, tmp_path / "s", chat_template=TOOLS, tokenizer=path)
    peer = chat_peers.peer(path)
    ids, masks = chat_peers.encoded(peer, TOOLS, [chat], tools=tools)
    assert [record["token"].tolist() for record in store] == ids
    assert [record["loss"].tolist() for record in store] == masks
    # A template that knows nothing of them would lose them in silence.
    rows = [{"messages": chat}, {"messages": [*chat[:1], {"role": "assistant", "content": "x"}]}]
    source = jsonl(tmp_path / "y.jsonl", rows)
    store = quick_build("chat", source, tmp_path / "t", chat_template="chatml", tokenizer=path)
    assert (len(store), store.manifest.rejected) == (1, {"tool calls": 1})


@settings(max_examples=30, deadline=None)
@given(st.lists(turns(TEXT), min_size=1, max_size=4))
def test_turns_are_found_without_generation(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizers: dict[str, Path],
    chats: list[list[dict[str, str]]],
) -> None:
    """The stated rule marks what `generation` would, in templates that say the same."""
    import re

    chats = [chat for chat in chats if any(message["content"] for message in chat)]
    if not chats:
        return
    folder = tmp_path_factory.mktemp("chats")
    source = jsonl(folder / "x.jsonl", [{"messages": chat} for chat in chats])
    for name in chat_template_files.BUILT_IN:
        template = TEMPLATES[name]
        bare = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", template)
        assert bare != template
        with_marks, without = (
            quick_build(
                *("chat", source, folder / f"{name}-{place}"),
                chat_template=text,
                tokenizer=tokenizers["cl100k"],
            )
            for place, text in enumerate((template, bare))
        )
        for one, other in zip(with_marks, without, strict=True):
            assert one["token"].tolist() == other["token"].tolist()
            assert one["loss"].tolist() == other["loss"].tolist()
