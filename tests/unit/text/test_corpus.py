"""Walks as text to records: words, lists of words, WordPiece, and which pair a walk is of."""

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import pre_tokenizers

from making import here, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.make_shard import Content
from tokmill.builds.plan import How
from tokmill.builds.source import Item, Resources
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store
from tokmill.text import corpus as corpus_module
from tokmill.text import record_blocks as blocks
from tokmill.text.corpus import UNKNOWN, CorpusConfig, CorpusSource
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_files import MOST_WORDS, SPECIALS, count_words, read_words

WALKS = "push rbp mov rbp rsp\nmov eax [rip+0x1f7a]\n\nret\npush rbp ret\n"
"""Two pairs of two walks."""
FRESH = How(quiet=True, amount=here(), fresh=True)


def build(folder: Path, text: str | bytes = WALKS, **options: Any) -> Store:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "corpus.txt").write_bytes(data)
    return quick_build("corpus", folder / "corpus.txt", folder / "s", **options)


def walks(store: Store) -> list[tuple[str, str]]:
    """Return pair and words of each record."""
    tokens = Tokenizer.from_file(store.vocabulary_file("token")).vocab
    return [
        (record["pair"], " ".join(tokens[i].decode() for i in record["token"].tolist()))
        for record in map(store.record, range(store.records))
    ]


def test_the_words_of_the_corpus_are_the_vocabulary(tmp_path: Path) -> None:
    store = build(tmp_path)
    assert not validate(store).problems
    assert walks(store) == [
        ("corpus.txt:0", "push rbp mov rbp rsp"), ("corpus.txt:0", "mov eax [rip+0x1f7a]"),
        ("corpus.txt:1", "ret"), ("corpus.txt:1", "push rbp ret"),
    ]  # fmt: skip
    vocabulary = store.vocabularies["token"]
    assert vocabulary.roles == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    tokens = Tokenizer.from_file(store.vocabulary_file("token")).vocab
    # By frequency, then by name.
    assert [tokens[i].decode() for i in range(5, vocabulary.size)] == [
        "rbp", "mov", "push", "ret", "[rip+0x1f7a]", "eax", "rsp",
    ]  # fmt: skip
    assert store.manifest.notes == {} and store.manifest.skipped == {"blank line": 1}


def test_the_tokenizer_of_the_store_gives_the_same_ids(tmp_path: Path) -> None:
    store = build(tmp_path, min_count=2)
    tokenizer = Tokenizer.from_file(store.vocabulary_file("token"))
    lines = [line for line in WALKS.splitlines() if line]
    for line, record in zip(lines, map(store.record, range(4)), strict=True):
        ids = record["token"].tolist()
        assert tokenizer.encode(line) == ids
    assert tokenizer.decode(tokenizer.encode(lines[0])) == "push rbp mov rbp [UNK]"
    assert tokenizer.encode("ret [SEP] [sep]") == [8, 3, 1]


def test_rare_words_are_unknown_and_counted(tmp_path: Path) -> None:
    store = build(tmp_path, min_count=2)
    assert walks(store)[0] == ("corpus.txt:0", "push rbp mov rbp [UNK]")
    assert store.manifest.notes == {UNKNOWN: 3}


def test_special_tokens_as_words_are_unknown_words(tmp_path: Path) -> None:
    store = build(tmp_path, "push [SEP] rbp [MASK]\n")
    assert walks(store) == [("corpus.txt:0", "push [UNK] rbp [UNK]")]
    assert store.manifest.notes == {UNKNOWN: 2}
    meant = build(tmp_path, "push [SEP] rbp [MASK]\n", how=FRESH, specials_in_text="special")
    assert walks(meant) == [("corpus.txt:0", "push [SEP] rbp [MASK]")]


def test_a_list_of_words_keeps_its_ids(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\nmov\nrbp\nmov\npush\n\nret\n\n\n")
    how = How(amount=here())
    store = build(tmp_path, words=str(tmp_path / "vocab.txt"), how=how)
    assert store.record(0)["token"].tolist() == [4, 2, 3, 2, 0]
    assert store.record(2)["token"].tolist() == [6]
    assert store.vocabularies["token"].roles == {
        "unk": 0, "pad": 7, "cls": 8, "sep": 9, "mask": 10
    }  # fmt: skip
    assert store.manifest.notes == {UNKNOWN: 3}
    said = capfd.readouterr().err
    assert "1 line without a word" in said
    assert "1 line whose word stands again" in said and "without [PAD] [CLS] [SEP] [MASK]" in said


def test_wordpiece_of_the_corpus(tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "push", "r", "##bp", "mov", "##sp"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    store = build(tmp_path, tokenizer=str(tmp_path / "vocab.txt"))
    assert store.record(0)["token"].tolist() == [5, 6, 7, 8, 6, 7, 6, 9]
    assert store.manifest.notes[UNKNOWN] > 0


def test_blank_lines_and_ends_of_lines(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf\n\n a  b \r\n\r\n \t\nc\n\n\nd e"
    assert walks(build(tmp_path, text)) == [
        ("corpus.txt:0", "a b"), ("corpus.txt:1", "c"), ("corpus.txt:2", "d e"),
    ]  # fmt: skip


def test_a_walk_that_is_no_text_is_rejected(tmp_path: Path) -> None:
    how = How(quiet=True, max_rejects=1.0, amount=here())
    store = build(tmp_path, b"a b\n\xff\xfe\n\nc\n", how=how)
    assert walks(store) == [("corpus.txt:0", "a b"), ("corpus.txt:1", "c")]
    assert store.manifest.rejected == {"utf8": 1}


def test_parts_are_cut_at_the_same_places_wherever_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "MAX_ITEM", 4000)
    monkeypatch.setattr(corpus_module, "BLOCK", 1000)
    monkeypatch.setattr(corpus_module, "MOST_WALKS", 7)
    monkeypatch.setattr(blocks, "READ", 500)
    blank = "\n".join(f"{'' if i % 5 else chr(10)}w{i % 11} w{i % 7} end" for i in range(3000))
    (tmp_path / "corpus.txt").write_text(blank)
    roots = [str(tmp_path / "corpus.txt")]
    source, other = (
        CorpusSource(CorpusConfig(), roots, {}, Resources(block_bytes=size))
        for size in (1000, 3000)
    )
    [item] = source.items()
    whole = _parts(source, item)
    # Nor does a preset move them.
    assert _parts(other, item) == whole
    assert len(whole) > 5 and len({digest for digest, _ in whole}) == len(whole)
    assert [pair for _, pairs in whole for pair in pairs] == [
        f"corpus.txt:{i // 5}" for i in range(3000)
    ]
    for done in (1, 3):
        assert _parts(source, msgspec.structs.replace(item, parts_done=done)) == whole[done:]


def _parts(source: CorpusSource, item: Item) -> list[tuple[str, list[str]]]:
    """Return the digest of the content of each part, and the pairs of its walks."""
    content, found, pairs = Content(), [], list[str]()
    for documents in source.documents(item, content):
        pairs += documents.kept["pair"]
        if documents.ends_part:
            found.append((content.take()[1], pairs))
            pairs = []
    return [*found, (content.take()[1], pairs)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"words": "vocab.txt", "min_count": 2}, "min_count is of words"),
        ({"min_count": 0}, "min_count: expected"),
        ({"min_count": -1}, "min_count: expected"),
        ({"words": "vocab.txt", "tokenizer": "vocab.txt"}, "a tokenizer was named"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    (tmp_path / "vocab.txt").write_text("[UNK]\na\n")
    given = {k: str(tmp_path / v) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(UsageError, match=what) as error:
        build(tmp_path, **given)
    assert error.value.hint


def test_words_are_counted_as_they_are_encoded() -> None:
    split = pre_tokenizers.WhitespaceSplit()
    line = "".join(f"w{code:x}{chr(code)}" for code in [*range(0x400), *range(0x1680, 0x3001)])
    words = {word for word, _ in split.pre_tokenize_str(line)}
    assert set(count_words([[line]], 1)) - set(SPECIALS) == words


def test_lists_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    for data, what in ((b"", "no word"), (b"\n \n", "no word"), (b"a\n\xff", "UTF-8")):
        path.write_bytes(data)
        with pytest.raises(TokmillError, match=what) as error:
            read_words(path)
        assert error.value.hint and str(path) in error.value.where
    with pytest.raises(UsageError, match="most"):
        count_words([[f"w{i}" for i in range(MOST_WORDS + 1)]], 1)
    assert len(count_words([["a a", "b"]], 2)) == 5 + 1


def test_files_that_hold_no_walk(tmp_path: Path) -> None:
    with pytest.raises(TokmillError) as error:
        build(tmp_path, "\n\n \n")
    assert "no walk" in error.value.hint
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"a b\n"))
    with pytest.raises(UsageError, match="compressed"):
        quick_build("corpus", tmp_path / "c.txt.gz", tmp_path / "t")
