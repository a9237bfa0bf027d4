import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokmill.base.locks import writing
from tokmill.cli import main
from tokmill.text.tokenizers.tokenizer import Tokenizer

pytest.importorskip("gigatoken", reason="needs the extra text")

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Any) -> Path:
    from tokmill.text.learning.train_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(corpus.texts[:50], 600, ["<|endoftext|>"]).save(folder)
    return folder


def test_train_writes_three_files(tokmill: Run, tmp_path: Path, corpus: Any) -> None:
    done = tokmill(
        *["tokenizer", "train", corpus.txt, "-o", "tok/tokenizer.json", "--vocab-size", 700],
        *["--special", "<|endoftext|>", "--special", "<|pad|>", "--json"],
    )
    facts = json.loads(done.stdout)
    assert facts["size"] == facts["asked"] == 700
    assert facts["specials"] == {"<|endoftext|>": 0, "<|pad|>": 1}
    # A document of white space only is none.
    assert 0 < facts["records"] <= len(corpus.texts)
    names = sorted(path.name for path in (tmp_path / "tok").iterdir())
    assert names == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    assert Tokenizer.from_file(tmp_path / "tok").size == 700


def test_formats_and_rules(tokmill: Run, tmp_path: Path, corpus: Any) -> None:
    texts = [text.strip() for text in corpus.texts[1:30]]
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(texts))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    base = ["--vocab-size", 400]
    tokmill("tokenizer", "train", "a.txt", "-o", "a.json", *base)
    tokmill("tokenizer", "train", "b.jsonl", "-o", "b.json", *base)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    tokmill(
        *["tokenizer", "train", "a.txt", "-o", "c.json", *base, "--no-special"],
        *["--tie-break", "greatest-bytes"],
    )
    third = Tokenizer.from_file(tmp_path / "c.json")
    assert third.specials == {} and third.size == 400


def test_two_trainings_of_one_tokenizer(tokmill: Run, tmp_path: Path, corpus: Any) -> None:
    """Their files would be mixed."""
    with writing(tmp_path / "t.json"):
        done = tokmill(
            "tokenizer", "train", corpus.txt, "-o", "t.json", "--vocab-size", 300, code=5
        )
        assert "another process is writing t.json" in done.stderr
        tokmill("tokenizer", "train", corpus.txt, "-o", "u.json", "--vocab-size", 300)
    assert not (tmp_path / "t.json").exists() and (tmp_path / "u.json").exists()


def test_encode_and_decode(tokmill: Run, tmp_path: Path, trained: Path) -> None:
    text = "def f(x):\n    return <|endoftext|> caf\u00e9\r\n"
    (tmp_path / "text.txt").write_bytes(text.encode())
    done = tokmill("tokenizer", "encode", "-t", trained, "text.txt")
    ids = [int(word) for word in done.stdout.split()]
    assert ids == Tokenizer.from_file(trained).encode(text, "plain")
    again = tokmill("tokenizer", "decode", "-t", trained, "-o", "back.txt", input=done.stdout)
    assert again.stdout == "" and (tmp_path / "back.txt").read_bytes() == text.encode()
    assert (
        tokmill("tokenizer", "decode", "-t", trained, *ids[:4]).stdout
        == "def f(x"[: len(Tokenizer.from_file(trained).decode(ids[:4]))]
    )


def test_a_byte_order_mark_is_no_text_as_in_a_build(tokmill: Run, trained: Path) -> None:
    for name, mark in (("plain.txt", b""), ("marked.txt", b"\xef\xbb\xbf")):
        Path(name).write_bytes(mark + b"some words")
    plain, marked = (
        tokmill("tokenizer", "encode", "-t", trained, name).stdout
        for name in ("plain.txt", "marked.txt")
    )
    assert plain == marked
    for cut in (b"\xef", b"\xef\xbb"):
        Path("cut.txt").write_bytes(cut)
        done = tokmill("tokenizer", "encode", "-t", trained, "cut.txt", code=1)
        assert "not UTF-8" in done.stderr
    for ids in ("1,2 3", "[1, 2, 3]"):
        done = tokmill("tokenizer", "decode", "-t", trained, ids).stdout
        assert done == tokmill("tokenizer", "decode", "-t", trained, 1, 2, 3).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "no.txt", "-o", "t.json", "--vocab-size", 300], 1, "no.txt: there is no such"),
        (["train", "empty.txt", "-o", "t.json", "--vocab-size", 300], 1, "no text to train on"),
        (["train", "a.txt", "-o", "t.json", "--vocab-size", 20], 2, "too small"),
        (
            [
                "train",
                "a.txt",
                "-o",
                "t.json",
                "--vocab-size",
                300,
                "--special",
                "<a>",
                "--special",
                "<a>",
            ],
            2,
            "given 2 times",
        ),
        (["train", "a.txt", "-o", "", "--vocab-size", 300], 2, "--out is empty"),
        (["train", "a.txt", "-o", "t.json", "--vocab-size", 300, "--pattern", "gpt3"], 2, "gpt2"),
        (["train", "a.txt", "-o", "t.json", "--vocab-size", 300, "--kind", "pdf"], 2, "pdf"),
        (["train", "a.txt", "b.jsonl", "-o", "t.json", "--vocab-size", 300], 2, "several kinds"),
        (["train", "a.txt", "-o", "a.txt/t.json", "--vocab-size", 300], 5, "a.txt"),
        (
            ["train", "a.txt", "-o", "t.json", "--vocab-size", 300, "--no-special"]
            + ["--special", "<a>"],
            2,
            "--special and --no-special",
        ),
        (
            ["train", "b.jsonl", "-o", "t.json", "--vocab-size", 300, "--field", "a"]
            + ["--set", 'fields=["text"]'],
            2,
            "fields is given twice",
        ),
        (["encode", "-t", "TRAINED", "a.txt", "--text", "a"], 2, "a file and --text"),
        (["encode", "-t", "no", "--text", "a"], 1, "no such tokenizer"),
        (["encode", "-t", "a.txt", "--text", "a"], 1, "not a tokenizer.json"),
        (["encode", "-t", "TRAINED", "."], 1, "a folder"),
        (["encode", "-t", "TRAINED", "latin.txt"], 1, "not UTF-8"),
        (["decode", "-t", "TRAINED", "12000"], 1, "no id 12000"),
        (["decode", "-t", "TRAINED", "x"], 2, "integers"),
        (["decode", "-t", "TRAINED", "1_0"], 2, "'1_0' is not an id"),
        (["decode", "-t", "TRAINED", "\u0663"], 2, "is not an id"),
        (["decode", "-t", "TRAINED", "9" * 5000], 2, "is not an id"),
        (["encode", "-t", "TRAINED", "wide.txt"], 1, "the text is UTF-16LE, not UTF-8"),
    ],
)
def test_mistakes_are_answered_without_a_traceback(
    tmp_path: Path,
    trained: Path,
    arguments: list[Any],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "a.txt").write_text("some words")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "wide.txt").write_bytes("wide".encode("utf-16-le"))
    words = [str(trained if word == "TRAINED" else word) for word in arguments]
    with pytest.raises(SystemExit) as ended:
        main(["tokenizer", *words])
    assert ended.value.code == code
    said = capsys.readouterr()
    assert message in said.err and said.out == ""
    assert not (tmp_path / "t.json").exists()


def test_a_vocabulary_that_a_build_does_not_reach_is_said(tokmill: Run, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("only a few words, a few")
    done = tokmill("build", "text", "few.txt", "-o", "s", "--vocab-size", 5000)
    assert "not 5,000: no two tokens stand side by side often enough" in done.stderr
    again = tokmill("build", "text", "few.txt", "-o", "s", "--vocab-size", 5000)
    assert "unchanged" in again.stderr and "not 5,000" not in again.stderr


def test_a_vocabulary_above_32_bits_is_refused(tokmill: Run, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("only a few words, a few")
    train = ["tokenizer", "train", "few.txt", "-o", "t.json"]
    done = tokmill(*train, "--vocab-size", 2**32, code=2)
    assert "4,294,967,296 is too large" in done.stderr and "hint: " in done.stderr
