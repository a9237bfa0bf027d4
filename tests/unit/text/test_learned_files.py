"""The files of a tokenizer that a build has learned: damage is found, and repaired to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokmill.builds.repair.repair import repair

from making import jsonl, quick_build
from tokmill.base.errors import TokmillError
from tokmill.builds.folder import claimed
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store
from tokmill.store.vocab import Learned
from tokmill.text.learning.learn import learned_tokenizer
from tokmill.text.tokenizers.patterns import CL100K

TEXTS = [{"text": f"record {i} of the file, and {i * 7} more words"} for i in range(60)]


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", CL100K, r"\p{L}+"])
@pytest.mark.parametrize(
    "name", ["learned.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_each_file_beside_a_learned_tokenizer_is_repaired(
    name: str, pattern: str, tmp_path: Path
) -> None:
    source = jsonl(tmp_path / "x.jsonl", TEXTS)
    specials = ("<|endoftext|>",)
    out, learn = tmp_path / "s", Learned(vocab_size=280, specials=specials, pattern=pattern)
    with claimed(out):
        path, _ = learned_tokenizer(out / "vocab", "jsonl", [str(source)], {}, learn)
    quick_build("jsonl", source, out, tokenizer=path)
    assert validate(Store(out)).ok
    file = out / "vocab" / name
    before = file.read_bytes()
    for damaged in (before.replace(b"e", b"E", 1), b"", before[:-20]):
        file.write_bytes(damaged)
        assert [problem.where for problem in validate(Store(out)).problems] == [str(file)]
        if name == "learned.json":
            with pytest.raises(TokmillError) as error:
                learned_tokenizer(out / "vocab", "jsonl", [str(source)], {}, learn)
            assert f"tokmill store repair {out}" in error.value.hint
        repaired = repair(out)
        assert repaired.files == [f"vocab/{name}"] and not repaired.remaining
        # A pattern that has a name is noted by its name.
        assert file.read_bytes() == before or (name == "learned.json" and pattern == CL100K)
    known = Learned(
        vocab_size=280, specials=specials, pattern="cl100k" if pattern == CL100K else pattern
    )
    if name == "learned.json":
        assert not learned_tokenizer(out / "vocab", "jsonl", [str(source)], {}, known)[1]
