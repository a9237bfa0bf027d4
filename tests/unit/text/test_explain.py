"""`--explain`: what becomes of one line, kept, skipped or rejected."""

from pathlib import Path
from typing import Any

import pytest

from making import TOKENIZER, jsonl
from tokmill.base.errors import TokmillError, UsageError
from tokmill.builds.plan import BuildRecipe
from tokmill.text.explain import explain


def chosen(kind: str, **keys: Any) -> BuildRecipe:
    return BuildRecipe(**{"source": kind, "tokenizer": str(TOKENIZER), **keys})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    rows = [{"text": " one ", "id": 7}, {"text": "[removed]"}, "{", {"text": "four"}]
    return jsonl(tmp_path / "in/x.jsonl", rows)


def test_kept_skipped_and_rejected(path: Path) -> None:
    recipe = chosen("jsonl", options={"keep": ["id"]})
    kept = explain(recipe, f"{path}:1")
    assert kept["outcome"] == "kept"
    assert "line 1, byte 0" in kept["place"]
    assert " one " in kept["raw"]
    assert kept["document"] == "5 bytes:  one "
    assert kept["kept id"] == "7"
    assert "endoftext" in kept["tokens"]
    assert kept["ids"].split()[-2] == "0"
    assert explain(recipe, f"{path}:2")["outcome"] == "skipped: placeholder"
    assert explain(recipe, f"{path}:3")["outcome"] == "rejected: json"
    assert explain(recipe, f"{path}:4")["document"] == "4 bytes: four"


def test_records_that_the_encoder_rejects(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a\nb <|endoftext|>\n")
    options = {"record": "line", "specials_in_text": "reject"}
    found = explain(chosen("text", options=options), f"{tmp_path}/x.txt:2")
    assert found["outcome"] == "rejected: special token" and "ids" not in found


def test_roles_of_the_recipe_are_heeded(path: Path) -> None:
    found = explain(chosen("jsonl", roles={"eot": "<|pad|>"}), f"{path}:1")
    assert found["ids"].split()[-2] == "1"


def test_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    assert explain(chosen("jsonl"), f"{path}:1")["document"] == "3 bytes: one"
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfone")
    assert explain(chosen("text"), f"{path}:1")["document"] == "3 bytes: one"


def test_the_document_around_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("a\nb\n<|endoftext|>c\nd\n")
    assert explain(chosen("text"), f"{path}:2")["document"] == "4 bytes: a\\nb\\n"
    assert explain(chosen("text"), f"{path}:4")["document"] == "4 bytes: c\\nd\\n"


def test_compressed_lines_and_rows_of_parquet(tmp_path: Path) -> None:
    import gzip

    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}'))
    assert explain(chosen("jsonl"), f"{path}:2")["document"] == "3 bytes: two"
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist([{"text": "one"}, {"text": " "}]), path)
    assert explain(chosen("parquet"), f"{path}:1")["document"] == "3 bytes: one"
    assert explain(chosen("parquet"), f"{path}:2")["outcome"] == "skipped: empty"


def test_places_that_do_not_exist(tmp_path: Path, path: Path) -> None:
    for place in ("x", f"{path}:0", f"{path}:x", f"{path}:"):
        with pytest.raises(UsageError, match="is not FILE:LINE"):
            explain(chosen("jsonl"), place)
    with pytest.raises(UsageError, match="has no line 9"):
        explain(chosen("jsonl"), f"{path}:9")
    with pytest.raises(TokmillError, match="no such file"):
        explain(chosen("jsonl"), f"{tmp_path}/nothing.jsonl:1")
