"""Tables of sentences: MRPC and MNLI as files, what is rejected, what is cut, as plain Python."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from making import here, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import How
from tokmill.store.store import Store
from tokmill.text.tables.tsv import fitted
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_files import tokenizer_of_words

TOKENS = ["[UNK]", "[PAD]", "[SEP]", "[MASK]", "[CLS]", "a", "b", "c", "d", '"', "the", "##s"]
LENIENT = How(quiet=True, amount=here(), max_rejects=1)
MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(TOKENS))
    return path


def table(path: Path, *lines: str, ending: str = "\n") -> Path:
    path.write_bytes(ending.join([*lines, ""]).encode())
    return path


def build(path: Path, vocab: Path, name: str = "store", **options: Any) -> Store:
    return quick_build("tsv", path, path.parent / name, tokenizer=vocab, **options)


def records(store: Store) -> list[tuple[str, str, int | None]]:
    """Return (tokens, segments, class) of each record."""
    found = []
    for number in range(store.records):
        record = store.record(number)
        tokens = " ".join(TOKENS[i] for i in record["token"].tolist())
        label = int(record["label"]) if "label" in record else None
        found.append((tokens, "".join(map(str, record["segment"].tolist())), label))
    return found


def test_mrpc(tmp_path: Path, vocab: Path) -> None:
    """Quotation marks are text, and the byte order mark is not part of a name."""
    path = table(
        tmp_path / "msr.tsv",
        "\ufeff" + MRPC,
        '1\t17\t18\tThe "a\tB c',
        "0\t1\t2\td\ta b",
        ending="\r\n",
    )
    store = build(path, vocab)
    assert records(store) == [
        ('[CLS] the " a [SEP] b c [SEP]', "00000111", 1),
        ("[CLS] d [SEP] a b [SEP]", "000111", 0),
    ]
    label = store.vocabularies["label"]
    names = json.loads(store.vocabulary_file("label").read_text())["tokens"]
    assert (label.size, names) == (2, ["0", "1"])
    assert store.schema["label"].dtype == "u4" and store.schema["label"].vocab == "label"
    named = build(path, vocab, "named", labels=("1", "0"))
    assert [label for _, _, label in records(named)] == [0, 1]


def test_columns_by_name_and_by_number(tmp_path: Path, vocab: Path) -> None:
    mnli = table(
        tmp_path / "mnli.tsv",
        "index\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\ta\tb\tneutral\tentailment",
    )
    wanted = [("[CLS] a [SEP] b [SEP]", "00011", 0)]
    assert records(build(mnli, vocab)) == wanted
    assert (
        records(build(mnli, vocab, "n", sentences=("2", "3"), label_column="gold_label")) == wanted
    )
    one = build(mnli, vocab, "one", sentences=("sentence2",), unlabelled=True)
    assert records(one) == [("[CLS] b [SEP]", "000", None)]
    cola = table(tmp_path / "cola.tsv", "gj04\t1\t\ta b", "gj04\t0\t*\tb")
    found = build(cola, vocab, "cola", sentences=("4",), label_column="2", header=False)
    assert records(found) == [("[CLS] a b [SEP]", "0000", 1), ("[CLS] b [SEP]", "000", 0)]


def test_what_is_left_out(tmp_path: Path, vocab: Path) -> None:
    path = table(
        tmp_path / "a.tsv", MRPC, "1\t1\t2\ta\tb", "1\t1\t2\ta", "", "\t1\t2\ta\tb",
        "0\t1\t2\t \tb", "0\t1\t2\ta\t\u200b", "2\t1\t2\ta\tb", "0\t1\t2\tb\td",
    )  # fmt: skip
    store = build(path, vocab, labels=("0", "1"), how=LENIENT)
    assert len(records(store)) == 2
    assert store.manifest.rejected == {
        "columns": 1, "missing label": 1, "empty sentence": 2, "label": 1,
    }  # fmt: skip
    assert store.manifest.skipped == {"blank line": 1}


def test_the_lines_of_rejects_are_told(tmp_path: Path, vocab: Path, tokmill: Any) -> None:
    path = table(tmp_path / "a.tsv", MRPC, "1\t1\t2\ta\tb", "1\t1\t2\ta", "0\t1\t2\tb\td")
    out = tmp_path / "store"
    tokmill("build", "tsv", path, "-o", out, "--tokenizer", vocab)
    listed = tokmill("store", "rejects", out).stdout
    assert "columns" in listed and "3" in listed
    text = Tokenizer.from_file(out).decode(Store(out).record(0)["token"])
    assert text == "[CLS] a [SEP] b [SEP]"


def test_the_longer_sentence_is_cut(tmp_path: Path, vocab: Path) -> None:
    """As Google's code does it, one token after the other."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 40, (400, 2))
    for most in (5, 6, 17, 32, 0):
        found = fitted(lengths, most)
        for (a, b), kept in zip(lengths.tolist(), found.tolist(), strict=True):
            while most and a + b > most - 3:
                a, b = (a - 1, b) if a > b else (a, b - 1)
            assert kept == [a, b]
    path = table(tmp_path / "a.tsv", MRPC, "1\t1\t2\ta b c d\tb c", "0\t1\t2\ta\tb")
    store = build(path, vocab, max_tokens=6)
    assert [tokens for tokens, _, _ in records(store)] == [
        "[CLS] a b [SEP] b [SEP]",
        "[CLS] a [SEP] b [SEP]",
    ]
    assert store.manifest.notes == {"records that were cut to max_tokens": 1, "tokens cut off": 3}


def test_names_of_special_tokens_are_text(tmp_path: Path, vocab: Path) -> None:
    path = table(tmp_path / "a.tsv", MRPC, "1\t1\t2\ta [SEP] b\tc", "0\t1\t2\ta\tb")
    plain = build(path, vocab)
    assert records(plain)[0][0].count("[SEP]") == 2
    assert records(build(path, vocab, "s", specials_in_text="special"))[0][0].count("[SEP]") == 3
    assert build(path, vocab, "r", specials_in_text="reject", how=LENIENT).manifest.rejected == {
        "special token": 1
    }


def test_special_tokens_as_whole_words_are_unknown(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(TOKENS)}
    made = Tokenizer.from_data(tokenizer_of_words(words)).save(tmp_path / "t.json")
    path = table(tmp_path / "t.tsv", "sentence\tlabel", "a [SEP] b\t0", "[MASK] d\t1")
    store = build(path, made)
    assert [tokens for tokens, _, _ in records(store)] == [
        "[CLS] a [UNK] b [SEP]",
        "[CLS] [UNK] d [SEP]",
    ]


def test_ids_and_segments_are_those_of_transformers(tmp_path: Path, vocab: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    peer = transformers.BertTokenizer.from_pretrained(vocab.parent)
    pairs = [("The a, b", "c théS"), ("d", 'a "b" z'), ("日本 a", "thes")]
    lines = [f"{i % 2}\t1\t2\t{a}\t{b}" for i, (a, b) in enumerate(pairs)]
    store = build(table(tmp_path / "a.tsv", MRPC, *lines), vocab)
    for number, (a, b) in enumerate(pairs):
        wanted, record = peer(a, b), store.record(number)
        assert record["token"].tolist() == wanted["input_ids"]
        assert record["segment"].tolist() == wanted["token_type_ids"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"label_column": "Qualit"}, "no column 'Qualit'"),
        ({"sentences": ("9",), "label_column": "1"}, "no column '9'"),
        ({"sentences": ("1", "2", "3")}, "one or two sentences"),
        ({"sentences": ("#1 String", "4")}, "named twice"),
        ({"max_tokens": 4}, "no room"),
        ({"labels": ("a", "a")}, "named twice"),
        ({"unlabelled": True, "label_column": "Quality"}, "no column of classes"),
        ({"header": False}, "which columns are sentences"),
    ],
)
def test_options_that_make_no_records(
    options: dict[str, Any], said: str, tmp_path: Path, vocab: Path
) -> None:
    path = table(tmp_path / "a.tsv", MRPC, "1\t1\t2\ta\tb")
    with pytest.raises(UsageError, match=said) as caught:
        build(path, vocab, **options)
    assert caught.value.hint


def test_a_name_of_several_columns_is_refused(tmp_path: Path, vocab: Path) -> None:
    path = table(tmp_path / "a.tsv", "label\ttext\ttext", "1\ta\tb")
    with pytest.raises(UsageError, match="several columns are called 'text'"):
        build(path, vocab, sentences=("text",), label_column="label")
    assert len(build(path, vocab, sentences=("3",), label_column="label")) == 1


def test_a_tokenizer_without_the_roles(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[UNK]\na")
    assert Tokenizer.from_file(vocab).size == 2
    with pytest.raises(TokmillError, match="no 'cls' token"):
        build(table(tmp_path / "a.tsv", MRPC, "1\t1\t2\ta\tb"), vocab)


def test_parts_of_a_data_set_have_the_same_classes(tmp_path: Path, vocab: Path) -> None:
    """Classes are sorted: the first line of a part does not decide their numbers."""
    for name, rows in (("a", ("x\tdog", "y\tcat")), ("b", ("x\tcat", "y\tdog"))):
        path = table(tmp_path / f"{name}.tsv", "sentence\tlabel", *rows)
        store = build(path, vocab, name)
        names = json.loads(store.vocabulary_file("label").read_text())["tokens"]
        assert names == ["cat", "dog"]
