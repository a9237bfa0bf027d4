"""Plain text: separators, lines, bytes that are not UTF-8; and what all text sources share."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import EOT, TOKENIZER, ids_of, jsonl, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.source import Item, Resources
from tokmill.store.schema import each_drop
from tokmill.store.store import Store
from tokmill.text.documents import iter_documents, surround
from tokmill.text.plain_text import TextConfig, TextSource
from tokmill.text.tokenizers.tokenizer import Tokenizer

SEPARATOR = "<|endoftext|>"


class NoHash:
    def update(self, data: bytes) -> None:
        pass


def read(path: Path, content: bytes | str, **options: Any) -> tuple[list[Any], list[Any]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    source = TextSource(TextConfig(**options), [str(path)], {}, Resources())
    item = Item("x", str(path), 0, path.stat().st_size, "")
    documents, drops = [], []
    for batch in source.documents(item, NoHash()):
        documents += list(zip(batch.starts.tolist(), batch.texts, strict=True))
        drops += [(drop.offset, drop.reason, drop.rejected) for drop in each_drop(batch.drops)]
    return documents, drops


@pytest.mark.parametrize(
    ("content", "documents", "drops"),
    [
        ("one", [(0, "one")], []),
        (f"a{SEPARATOR}b", [(0, "a"), (14, "b")], []),
        (f"a\n{SEPARATOR}\nb{SEPARATOR}", [(0, "a\n"), (15, "\nb")], []),
        (f"{SEPARATOR}a", [(13, "a")], [(0, "empty", False)]),
        (f"a{SEPARATOR}{SEPARATOR}b", [(0, "a"), (27, "b")], [(14, "empty", False)]),
        (f" \n{SEPARATOR}b", [(15, "b")], [(0, "empty", False)]),
        (f"\ufeffa{SEPARATOR}\ufeffb", [(0, "a"), (17, "\ufeffb")], []),
        ("a\r\nb", [(0, "a\r\nb")], []),
        ("", [], []),
    ],
)
def test_separators(tmp_path: Path, content: str, documents: Any, drops: Any) -> None:
    assert read(tmp_path / "x", content) == (documents, drops)


def test_lines(tmp_path: Path) -> None:
    content = "\ufeffa\r\n\r\nb\n \nc"
    assert read(tmp_path / "x", content, record="line") == (
        [(0, "a"), (8, "b"), (12, "c")],
        [(6, "empty", False), (10, "empty", False)],
    )


def test_another_separator_and_stripping(tmp_path: Path) -> None:
    found = read(tmp_path / "x", "a \n\n\n b\n\n", separator="\n\n", strip=True)
    assert found == ([(0, "a"), (4, "b")], [])
    with pytest.raises(UsageError, match="separator is empty"):
        read(tmp_path / "x", "a", separator="")


def test_invalid_utf8_is_rejected_or_replaced(tmp_path: Path) -> None:
    content = b"good\n\xff bad\n\xed\xa0\x80\nlast"
    documents, drops = read(tmp_path / "x", content, record="line")
    assert documents == [(0, "good"), (15, "last")]
    assert drops == [(5, "utf8", True), (11, "utf8", True)]
    documents, drops = read(tmp_path / "x", content, record="line", invalid_utf8="replace")
    assert [text for _, text in documents] == ["good", "\ufffd bad", "\ufffd" * 3, "last"]
    assert drops == []


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(TOKENIZER)


def test_documents_end_with_eot_or_do_not(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "x.txt"
    path.write_text(f"one{SEPARATOR}two words")
    wanted = [list(tokenizer.encode(text)) for text in ("one", "two words")]
    store = quick_build("text", path, tmp_path / "s")
    assert ids_of(store) == [[*ids, EOT] for ids in wanted]
    store = quick_build("text", path, tmp_path / "t", end_of_record="none")
    assert ids_of(store) == wanted


def test_specials_in_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = f"a{SEPARATOR}b"
    path = jsonl(tmp_path / "x.jsonl", [{"text": text}, {"text": "plain"}])

    def build(mode: str) -> Store:
        return quick_build("jsonl", path, tmp_path / mode, specials_in_text=mode)

    plain, special, reject = (build(mode) for mode in ("plain", "special", "reject"))
    first = ids_of(plain)[0]
    assert first.count(EOT) == 1
    assert tokenizer.decode(first[:-1]) == text
    assert ids_of(special)[0] == [
        *tokenizer.encode("a"),
        EOT,
        *tokenizer.encode("b"),
        EOT,
    ]
    assert ids_of(plain)[1] == ids_of(special)[1] == ids_of(reject)[0]
    assert reject.manifest.rejected == {"special token": 1}
    assert len(reject) == 1


def changed_tokenizer(path: Path, change: Any) -> Path:
    data = json.loads(TOKENIZER.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_a_tokenizer_without_eot_names_both_ways_out(tmp_path: Path) -> None:
    def rename(data: Any) -> None:
        for token in data["added_tokens"]:
            token["content"] = token["content"].replace("<|endoftext|>", "<|done|>")
        data["model"]["vocab"] = {
            name.replace("<|endoftext|>", "<|done|>"): number
            for name, number in data["model"]["vocab"].items()
        }

    tokenizer = changed_tokenizer(tmp_path / "t.json", rename)
    path = tmp_path / "x.txt"
    path.write_text("one")
    with pytest.raises(TokmillError, match="the tokenizer has none") as caught:
        quick_build("text", path, tmp_path / "s", tokenizer=tokenizer)
    assert "--end-of-record none" in caught.value.hint
    assert "--role" in caught.value.hint
    out = tmp_path / "none"
    store = quick_build("text", path, out, tokenizer=tokenizer, end_of_record="none")
    assert EOT not in ids_of(store)[0]
    store = quick_build(
        "text", path, tmp_path / "r", tokenizer=tokenizer, roles={"eot": "<|done|>"}
    )
    assert ids_of(store)[0][-1] == EOT


def test_a_template_is_refused_added_or_left_out(tmp_path: Path) -> None:
    def template(data: Any) -> None:
        data["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|pad|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {
                name: {"id": name, "ids": [number], "tokens": [name]}
                for name, number in (("<|pad|>", 1), ("<|endoftext|>", 0))
            },
        }

    tokenizer = changed_tokenizer(tmp_path / "t.json", template)
    path = tmp_path / "x.txt"
    path.write_text("one")
    with pytest.raises(TokmillError, match="puts tokens around every text") as caught:
        quick_build("text", path, tmp_path / "s", tokenizer=tokenizer)
    assert "--template add" in caught.value.hint and "end-of-record" not in caught.value.hint
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one"]))
    with pytest.raises(TokmillError, match="puts tokens around every text") as caught:
        quick_build("text", path, tmp_path / "s", tokenizer=words)
    # Both reasons at once.
    assert "--template add" in caught.value.hint and "--end-of-record none" in caught.value.hint
    ids = ids_of(quick_build("text", path, tmp_path / "p"))[0][:-1]
    added = quick_build("text", path, tmp_path / "a", tokenizer=tokenizer, template="add")
    # Not a second eot where the template has put one.
    assert ids_of(added) == [[1, *ids, EOT]]
    left = quick_build("text", path, tmp_path / "n", tokenizer=tokenizer, template="none")
    assert ids_of(left) == [[*ids, EOT]]


def test_surround_against_plain_lists() -> None:
    texts = [[5, 6], [], [7]]
    flat = np.asarray([5, 6, 7], np.uint32)
    for prefix, suffix in (([], []), ([1], []), ([], [2]), ([1, 2], [3, 4])):
        ids, offsets = surround(flat, np.asarray([2, 0, 1]), prefix, suffix, "<u2")
        wanted = [[*prefix, *text, *suffix] for text in texts]
        found = [ids[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
        assert found == wanted
        assert ids.dtype == np.dtype("<u2")


def test_training_sees_the_documents_of_the_build(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": " a "}, "{", {"text": ""}, {"title": "t"}])
    assert [t for batch in iter_documents([str(path)], "jsonl") for t in batch] == [" a ", "t"]
    stripped = iter_documents([str(path)], "jsonl", {"strip": True})
    assert [t for batch in stripped for t in batch] == ["a", "t"]
    with pytest.raises(UsageError, match="no such key"):
        list(iter_documents([str(path)], "jsonl", {"strpi": 1}))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_text_in_another_encoding_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, encoding: str
) -> None:
    text = "hello world\nsecond lin\u00e9\n"
    (tmp_path / "a b.txt").write_bytes(text.encode(encoding))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode(encoding)))
    (tmp_path / "right.txt").write_text(text)
    right = quick_build("text", tmp_path / "right.txt", tmp_path / "r", tokenizer=TOKENIZER)
    for place, name in enumerate(("a b.txt", "c.txt.gz")):
        with pytest.raises(TokmillError, match="text in UTF-") as caught:
            quick_build("text", tmp_path / name, tmp_path / "s", tokenizer=TOKENIZER)
        command = caught.value.hint.split("`")[1].replace("NEW", f"new{place}.txt")
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        new = tmp_path / f"new{place}.txt"
        made = quick_build("text", new, tmp_path / f"s{place}", tokenizer=TOKENIZER)
        assert ids_of(made) == ids_of(right)


def test_text_with_some_zero_bytes_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\0b " * 40)
    store = quick_build("text", tmp_path / "a.txt", tmp_path / "s", tokenizer=TOKENIZER)
    assert Tokenizer.from_file(TOKENIZER).decode(ids_of(store)[0]).startswith("a\0b a\0b ")
