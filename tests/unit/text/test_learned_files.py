"""The files of a tokenizer that a build has learned: damage is found, and written again."""

from pathlib import Path

import pytest

from making import jsonl, quick_build
from tokmill.base.errors import TokmillError
from tokmill.builds.folder import claimed
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store
from tokmill.store.vocab import Learned
from tokmill.text.learning.train_tokenizer import learned_tokenizer

TEXTS = [{"text": f"record {i} of the file, and {i * 7} more words"} for i in range(60)]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_each_file_beside_a_learned_tokenizer_is_written_again(name: str, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", TEXTS)
    out, learn = tmp_path / "s", Learned(vocab_size=280)

    def learned() -> Path:
        return learned_tokenizer(out / "vocab", "jsonl", [str(source)], {}, learn)[0]

    with claimed(out):
        path = learned()
    quick_build("jsonl", source, out, tokenizer=path)
    assert validate(Store(out)).ok
    file = out / "vocab" / name
    before = file.read_bytes()
    for damaged in (before.replace(b"e", b"E", 1), b"", before[:-20]):
        file.write_bytes(damaged)
        assert [problem.where for problem in validate(Store(out)).problems] == [str(file)]
        learned()
        assert file.read_bytes() == before


def test_a_damaged_note_names_the_tokenizer_that_can_be_used(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", TEXTS)
    out, learn = tmp_path / "s", Learned(vocab_size=280)
    with claimed(out):
        path, _ = learned_tokenizer(out / "vocab", "jsonl", [str(source)], {}, learn)
    store = quick_build("jsonl", source, out, tokenizer=path)
    (out / "vocab/learned.json").write_bytes(b"{}")
    with pytest.raises(TokmillError) as error:
        learned_tokenizer(out / "vocab", "jsonl", [str(source)], {}, learn)
    assert error.value.hint == f"remove it, and use the tokenizer: --tokenizer {path}"
    (out / "vocab/learned.json").unlink()
    again = quick_build("jsonl", source, out, tokenizer=path)
    assert again.fingerprint == store.fingerprint and validate(again).ok
