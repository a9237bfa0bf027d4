"""Folders as `datasets.save_to_disk` writes them.

What these folders hold was compared with the folders of datasets 5.2.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from making import ids_of, jsonl, quick_build
from tokmill.base.errors import TokmillError, UsageError
from tokmill.formats import arrow_files

pa = pytest.importorskip("pyarrow")

TEXTS = [f"document {i} é " * (1 + i % 3) for i in range(95)]
IDS = [[i % 250] * (i % 7) for i in range(95)]


def save(folder: Path, columns: dict[str, Any], files: int = 1, *, batch: int = 10) -> Path:
    """As `Dataset.save_to_disk`: streams of record batches, and the files that list them."""
    folder.mkdir(parents=True)
    table = pa.table(columns)
    table = table.replace_schema_metadata({"huggingface": '{"info": {"features": {}}}'})
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    step = -(-len(table) // files)
    for i, name in enumerate(names):
        part = table.slice(i * step, step)
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(part, max_chunksize=batch)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "849f7fbc5588ff8a",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": {}}))
    return folder


def splits(folder: Path, names: list[str]) -> Path:
    """As `DatasetDict.save_to_disk`; each split has one row less than the one before."""
    for i, name in enumerate(names):
        save(folder / name, {"text": TEXTS[i:]})
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    return folder


@pytest.mark.parametrize("files", [1, 3])
def test_text(tmp_path: Path, files: int) -> None:
    reference = quick_build(
        "jsonl", jsonl(tmp_path / "x.jsonl", [{"text": t} for t in TEXTS]), tmp_path / "r"
    )
    folder = save(tmp_path / "d", {"text": TEXTS, "id": range(95)}, files)
    # A cache of `map` is none of its rows.
    (folder / "cache-0123456789abcdef.arrow").write_bytes(b"anything")
    store = quick_build("parquet", folder, tmp_path / "s", keep=["id"])
    assert ids_of(store) == ids_of(reference)
    assert [int(record["id"]) for record in store] == list(range(95))


def test_a_large_stream_is_cut_between_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "d", {"text": TEXTS, "input_ids": IDS})
    whole = quick_build("parquet", folder, tmp_path / "a")
    monkeypatch.setattr(arrow_files, "MAX_ITEM", 1000)
    store = quick_build("parquet", folder, tmp_path / "b")
    assert ids_of(store) == ids_of(whole)
    items = [item for i in range(len(store.shards)) for item in store.receipt(i).items]
    assert len(items) > 3
    starts = [int(v) for i in range(len(store.shards)) for v in store.shard(i)["start"]]
    assert starts == list(range(95))


def test_splits(tmp_path: Path, tokmill: Any) -> None:
    folder = splits(tmp_path / "d", ["train", "test"])
    assert len(quick_build("parquet", folder, tmp_path / "a")) == 95
    assert len(quick_build("parquet", folder, tmp_path / "b", split="test")) == 94
    with pytest.raises(UsageError, match="no split 'tset'") as caught:
        quick_build("parquet", folder, tmp_path / "c", split="tset")
    assert "'test'" in caught.value.hint
    done = tokmill("build", "parquet", folder, "--vocab-size", "270", "-o", "s")
    assert "1 split that is not read: test (--split test)" in done.stderr
    # Several, and none that is the usual one: nobody guesses.
    folder = splits(tmp_path / "e", ["a", "b"])
    with pytest.raises(UsageError, match="has the splits a, b") as caught:
        quick_build("parquet", folder, tmp_path / "f")
    assert "--split a" in caught.value.hint
    assert len(quick_build("parquet", folder, tmp_path / "g", split="b")) == 94
    assert len(quick_build("parquet", splits(tmp_path / "h", ["only"]), tmp_path / "i")) == 95
    plain = save(tmp_path / "j", {"text": TEXTS})
    with pytest.raises(UsageError, match="no input is a folder with splits"):
        quick_build("parquet", plain, tmp_path / "k", split="train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d/train/state.json", "{", "not a file of"),
        ("d/train/state.json", "5", "not a file of"),
        ("d/train/state.json", '{"_data_files": []}', "has no files"),
        ("d/train/state.json", '{"_data_files": [{"filename": "x.arrow"}]}', "is not there"),
        ("d/train/state.json", '{"_data_files": [{"filename": "../x"}]}', "out of the folder"),
        ("d/train/state.json", '{"_data_files": [{"filename": "/etc/passwd"}]}', "leads out"),
        ("d/train/state.json", '{"_data_files": [], "_indices_data_files": [1]}', "another order"),
        ("d/dataset_dict.json", '{"splits": []}', "has no splits"),
        ("d/dataset_dict.json", '{"splits": ["../.."]}', "leads out of the folder"),
        ("d/dataset_dict.json", "[" * 10_000, "not a file of"),
        ("d/train/data-00000-of-00001.arrow", "", "damaged or no"),
        ("d/train/data-00000-of-00001.arrow", "nonsense", "damaged or no"),
    ],
)
def test_damaged_folders(tmp_path: Path, name: str, content: str, message: str) -> None:
    splits(tmp_path / "d", ["train"])
    (tmp_path / name).write_text(content)
    with pytest.raises(TokmillError, match=message) as caught:
        quick_build("parquet", tmp_path / "d", tmp_path / "s")
    assert caught.value.hint


def test_ids_are_no_text(tmp_path: Path) -> None:
    folder = save(tmp_path / "d", {"input_ids": IDS})
    with pytest.raises(UsageError, match="none of the fields") as caught:
        quick_build("parquet", folder, tmp_path / "s")
    assert ".bin file" in caught.value.hint
