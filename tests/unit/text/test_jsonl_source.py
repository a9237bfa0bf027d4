"""JSON Lines: each line is one record, skipped or rejected, as the json module has it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from document_formulas import prepared_text
from making import EOT, TOKENIZER, here, ids_of, jsonl, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.builds.source import Item, Resources
from tokmill.store.schema import each_drop
from tokmill.text.jsonl import JsonlConfig, JsonlSource


class NoHash:
    def update(self, data: bytes) -> None:
        pass


def read(
    path: Path, block_bytes: int = 1 << 20, **options: Any
) -> tuple[list[tuple[int, str]], list[tuple[int, str, bool]], dict[str, list[str]]]:
    """((start, text) of documents, (offset, reason, rejected) of drops, kept fields)."""
    config = JsonlConfig(**options)
    source = JsonlSource(config, [str(path)], {}, Resources(block_bytes=block_bytes))
    item = Item("x", str(path), 0, path.stat().st_size, "")
    documents, drops, kept = [], [], {name: [] for name in config.keep}
    for batch in source.documents(item, NoHash()):
        documents += list(zip(batch.starts.tolist(), batch.texts, strict=True))
        drops += [(drop.offset, drop.reason, drop.rejected) for drop in each_drop(batch.drops)]
        for name, values in batch.kept.items():
            kept[name] += values
    return documents, sorted(drops), kept


def slow_line(line: bytes) -> tuple[str, str]:
    """(text, "") or ("", reason), with the json module; fields title and text."""
    line = line.strip()
    if not line:
        return "", "blank line"
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return "", "utf8"
    constants: list[str] = []
    try:
        value = json.loads(text, parse_constant=constants.append)
        pairs = json.loads(text, parse_constant=str, object_pairs_hook=list)
    except RecursionError:
        return "", "depth"
    except ValueError:
        return "", "json"
    if constants:
        # Python's own dialect: a record unless NaN is in the place of a text.
        value = json.loads(text)
        fields = [value.get(n) for n in ("title", "text")] if isinstance(value, dict) else [0]
        if not all(isinstance(found, str | None) for found in fields):
            return "", "nan"
        pairs = list(value.items())
    try:
        json.dumps(value, ensure_ascii=False).encode()
        json.dumps(pairs, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "", "nan" if constants else "surrogate"
    if not isinstance(value, dict):
        return "", "type"
    for name, found in pairs:
        if name in ("title", "text") and not isinstance(found, str | None):
            return "", "type"
    values = [value.get("title"), value.get("text")]
    if values == [None, None]:
        return "", "missing"
    parts = [part for part in values if part]
    if any(part.strip() in ("[deleted]", "[removed]") for part in parts):
        reason = "placeholder"
    else:
        reason = "empty"
    text = "\n".join(part for part in parts if part not in ("[deleted]", "[removed]"))
    return (text, "") if text.strip() else ("", reason)


SKIPS = {"blank line", "missing", "placeholder", "empty"}


def slow_file(content: bytes) -> tuple[list[tuple[int, str]], list[tuple[int, str, bool]]]:
    documents, drops, place = [], [], 0
    if content == b"\xef\xbb\xbf":
        return [], []
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines):
        start, length = place, len(line) + 1
        if number == 0 and line.startswith(b"\xef\xbb\xbf"):
            start, line = 3, line[3:]
        text, reason = slow_line(line)
        if reason:
            drops.append((start, reason, reason not in SKIPS))
        else:
            documents.append((start, text))
        place += length
    return documents, drops


LINES = [
    b'{"text": "a"}',
    b'{"text":"a","title":"T"}',
    b'{"title": " T ", "text": " a\\n"}',
    b'{"title": "T"}',
    b"{}",
    b'{"text": null}',
    b'{"text": null, "title": "x"}',
    b'{"text": ""}',
    b'{"text": "  \\n "}',
    b'{"text": "[deleted]"}',
    b'{"text": " [removed] ", "title": "kept"}',
    b'{"text": "[removed]", "title": ""}',
    b'{"text": "a", "text": "b"}',
    b'{"text": 5, "text": "b"}',
    b'{"text": 5}',
    b'{"text": ["a"]}',
    b'{"text": {"a": "b"}}',
    b'{"text": true}',
    b'{"text": "a", "x": NaN}',
    b'{"text": "a", "x": [-Infinity]}',
    b'{"text": "a", "x": Infinity, "text": 5}',
    b'{"text": "\\ud800"}',
    b'{"text": "\\ud83d\\ude00"}',
    b'{"text": "a", "x": "\\udc00 b"}',
    b'{"text": "\xff"}',
    b'{"text": "\xed\xa0\x80"}',
    '{"text": "\u00e9\U0001f600"}'.encode(),
    b'{"text": "a"} {"text": "b"}',
    b'{"text": "a"}{"text": "b"}',
    b'{"text":',
    b'"a"}',
    b'{"text": "a"',
    b"}",
    b'{"text": "a\x01"}',
    b'{"text": "a\\qb"}',
    b'{"text": "a",}',
    b"{'text': 'a'}",
    b"5",
    b"null",
    b'"text"',
    b'[{"text": "a"}]',
    b"",
    b"   ",
    b"\r",
    b'{"text": "a"}\r',
    b' {"text": "a"} ',
    b'{"text": "a\\r\\n"}',
    b"// comment",
    b'{"te\\u0078t": "a"}',
    b'{"text": "\\u0000"}',
    b'{"text": "}"}',
    b'{"text": "{"}',
    b'{"x": {"text": "no"}, "text": "yes"}',
    b'{"text": "a", "x": 1e5, "y": -0.5, "z": [1, {"a": []}]}',
    b'{"text": "a", "x": 01}',
    b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "text": "a"}',
    b'{"text": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("line", LINES, ids=[repr(line[:30]) for line in LINES])
def test_each_kind_of_line(tmp_path: Path, line: bytes) -> None:
    """Alone, and between good ones."""
    path = tmp_path / "x.jsonl"
    for content in (line, line + b"\n", b'{"text": "1"}\n' + line + b'\n{"text": "2"}\n'):
        path.write_bytes(content)
        documents, drops, _ = read(path)
        assert (documents, drops) == slow_file(content)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(LINES[:-2]), max_size=12),
    st.booleans(),
    st.booleans(),
    st.integers(1, 200),
)
@example([b'{"text":', b'"a"}', b'{"text": "a"} {"text": "b"}'], False, True, 200)
def test_files_against_the_slow_twin(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    bom: bool,
    last: bool,
    block_bytes: int,
) -> None:
    content = b"\xef\xbb\xbf" * bom + b"\n".join(lines) + b"\n" * last
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(content)
    documents, drops, _ = read(path, block_bytes)
    assert (documents, drops) == slow_file(content)


def test_an_object_is_never_put_together_from_two_lines(tmp_path: Path) -> None:
    """As many objects as lines, but not one per line: the fast way must not be taken."""
    path = jsonl(tmp_path / "x.jsonl", ['{"text": "a"', '}{"text": "b"}'])
    assert read(path)[0] == []
    path = jsonl(tmp_path / "x.jsonl", ['{"text": "}', '{"}', '{"text": "a"}{"text": "b"}'])
    assert read(path)[0] == []


def test_kept_fields_of_every_type(tmp_path: Path) -> None:
    values: list[Any] = ["é", "", None, 5, -1.5, True, [1, "a"], {"b": None}, 10**30]
    rows = [{"text": f"t{i}", "k": value} for i, value in enumerate(values)]
    path = jsonl(tmp_path / "x.jsonl", [*rows, {"text": "none"}, {"text": " ", "k": "gone"}])
    found = read(path, keep=("k", "text"))[2]
    wanted = ["é", "", "", "5", "-1.5", "true", '[1,"a"]', '{"b":null}', str(10**30), ""]
    assert found["k"] == wanted
    assert found["text"][:2] == ["t0", "t1"]
    store = quick_build("jsonl", path, tmp_path / "s", keep=["k", "text"])
    assert [record["k"] for record in store] == wanted


def test_fields_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "a", "a b": "1", "a-b": "2"}])
    with pytest.raises(UsageError, match="column 'a_b'"):
        quick_build("jsonl", path, tmp_path / "s", keep=["a b", "a-b"])
    names = ["token", "start", "offsets", "1", "a-b", "bytes"]
    row = {name: name for name in names}
    path = jsonl(tmp_path / "y.jsonl", [{"text": "a", **row}])
    store = quick_build("jsonl", path, tmp_path / "t", keep=names)
    columns = [name for name in store.schema if name not in ("token", "bytes")]
    assert columns == [
        "field_token",
        "field_start",
        "field_offsets",
        "field_1",
        "a_b",
        "field_bytes",
    ]
    assert [store.record(0)[name] for name in columns] == names


def test_options_of_fields(tmp_path: Path) -> None:
    rows = [{"a": " x ", "b": "y"}, {"b": "[deleted]"}, {"a": "[gone]"}]
    path = jsonl(tmp_path / "x.jsonl", rows)

    def texts(**options: Any) -> list[str]:
        return [text for _, text in read(path, **options)[0]]

    assert texts(fields=("b", "a"), join="--") == ["y-- x ", "[gone]"]
    assert texts(fields=("a",)) == [" x ", "[gone]"]
    assert texts(fields=("a",), strip=True) == ["x", "[gone]"]
    assert texts(fields=("a", "b"), strip=True, placeholders=("[gone]",)) == ["x\ny", "[deleted]"]
    assert texts(fields=("a", "b"), placeholders=()) == [" x \ny", "[deleted]", "[gone]"]


def test_an_empty_file_has_no_record(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [])
    assert read(path)[:2] == ([], [])
    with pytest.raises(TokmillError, match="no record"):
        quick_build("jsonl", path, tmp_path / "s")


BLANKS = ["", " ", "\t", "\n", "\u00a0", "\u2003", "\x1f", "\u3000", "\u200b"]
FIELD = st.tuples(
    st.sampled_from(BLANKS),
    st.sampled_from(["", "[deleted]", "[removed]", "[Deleted]", "a word", "two\nlines",
                     "ends<|endoftext|>here", "[deleted] [removed]", "\ufeff"]),
    st.sampled_from(BLANKS),
).map("".join)  # fmt: skip
ITEM = st.dictionaries(st.sampled_from(["title", "text", "subreddit"]), FIELD)


@settings(max_examples=40, deadline=None)
@given(st.lists(ITEM, max_size=30))
def test_the_ids_are_those_of_the_jsonl_kit(
    tmp_path_factory: pytest.TempPathFactory, items: list[dict[str, str]]
) -> None:
    """With --strip, --end-of-record none and --specials-in-text special."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")
    folder = tmp_path_factory.mktemp("kit")
    items.append({"title": " kept\u00a0", "text": "[deleted]\n"})
    path = jsonl(folder / "a.jsonl", items)
    texts = [text for text in map(prepared_text, items) if text]
    assert [text for _, text in read(path, strip=True)[0]] == texts
    options = {"strip": True, "end_of_record": "none", "specials_in_text": "special"}
    store = quick_build("jsonl", path, folder / "s", **options)
    peer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    assert ids_of(store) == [peer.encode(text).ids for text in texts]
    assert len(store) + sum(store.manifest.skipped.values()) == len(items)
    ended = quick_build("jsonl", path, folder / "e", **(options | {"end_of_record": "eot"}))
    assert ids_of(ended) == [[*peer.encode(text).ids, EOT] for text in texts]


def test_lines_with_nan_are_records_and_kept_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows = ['{"text": "a", "n": NaN, "x": [1, -Infinity]}', '{"text": "b", "n": 2, "x": null}']
    path.write_text("\n".join(rows) + '\n{"text": NaN, "n": 1}\n')
    how = How(quiet=True, amount=here(), max_rejects=1)
    store = quick_build("jsonl", path, tmp_path / "s", keep=["n", "x"], how=how)
    assert [(r["n"], r["x"]) for r in store] == [("NaN", "[1,-Infinity]"), ("2", "")]
    assert store.manifest.rejected == {"nan": 1}
    above = quick_build("select", tmp_path / "s", tmp_path / "t", where=["n > 1"])
    assert above.records == 1 and above.manifest.skipped == {"no number: n > 1": 1}
