"""The page on chats: its script and its commands, on two chats."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tokmill.cli import main
from tokmill.store.store import Store
from tokmill.text.tokenizers.tokenizer import Tokenizer

PAGE = (Path(__file__).parents[2] / "docs/chats.md").read_text()
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
CHATS = [["Hi", "Hello!"], ["What turns?", "A mill.", "More?", "A wheel turns."]]


def does(*words: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert ended.value.code == 0


def test_the_script_and_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    chats = [
        [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(chat)]
        for chat in CHATS
    ]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    special = (word for name in ("<|im_start|>", "<|im_end|>") for word in ("--special", name))
    does("tokenizer", "train", "chats.jsonl", "--vocab-size", 300, "--field", "messages[].content",
         *special, "-o", "tokenizer")  # fmt: skip
    Path("tokenizer/chat_template.jinja").write_text(TEMPLATE)
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(script, "docs/chats.md", "exec"), {})
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    small = " --set model.layers=1 --set model.dim=16 --set model.heads=2 --set task.length=64"
    for command in commands.replace("--steps 1000", f"--steps 1{small}").splitlines():
        does(*shlex.split(command)[1:])
    store, tokenizer = Store("store", ["loss"]), Tokenizer.from_file("tokenizer")
    learned = [
        [tokenizer.decode([i]) for i, one in zip(r["token"], r["loss"], strict=True) if one]
        for r in store
    ]
    assert ["".join(words) for words in learned] == [
        "Hello!<|im_end|>", "A mill.<|im_end|>A wheel turns.<|im_end|>"
    ]  # fmt: skip
