"""npz windows: the seed's format, its statistics, refusals."""

import io
import json
import re
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from document_formulas import windows
from making import TOKENIZER, ids_of, quick_build, token_store
from tokmill.base.errors import TokmillError, UsageError
from tokmill.formats.windows.npz import NpzExport, check
from tokmill.formats.windows.npz_export import file_names

LONG = list(range(1, 26))


def export(store, out, **options):
    options = {"max_length": 10, "stride": 4, "pad_id": 0, **options}
    return NpzExport(NpzExport.Config(**options)).write(store, out)


def load(out):
    files = sorted(out.glob("*.npz"))
    parts = []
    for path in files:
        with np.load(path, allow_pickle=False) as data:
            assert sorted(data) == ["attention_mask", "input_ids"]
            parts.append((data["input_ids"], data["attention_mask"]))
    return [path.name for path in files], parts


@settings(max_examples=20, deadline=None)
@given(
    records=st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=1, max_size=8),
    length=st.integers(1, 12),
    step=st.integers(1, 12),
    part=st.integers(1, 9),
)
def test_any_records(tmp_path_factory, records, length, step, part):
    folder = tmp_path_factory.mktemp("f")
    step = min(step, length)
    expected = [w for r in records if r for w in windows(r, length, step)]
    store = token_store(folder / "s", [records])
    options = {"max_length": length, "stride": step, "windows_per_file": part}
    if not expected:
        with pytest.raises(TokmillError, match="holds no tokens"):
            export(store, folder / "o", **options)
        return
    export(store, folder / "o", **options)
    again = quick_build("npz", folder / "o", folder / "again")
    assert ids_of(again) == expected


def test_statistics_agree_with_one_another_and_with_the_files(tmp_path):
    store = token_store(tmp_path / "s", [[LONG], [[1, 2, 3]], [[4]]])
    written = export(store, tmp_path / "o")
    stats = json.loads((tmp_path / "o/tokenization_stats.json").read_text())
    assert set(stats) == {
        "total_sequences",
        "total_tokens",
        "avg_sequence_length",
        "processing_time_seconds",
        "sequences_per_second",
        "files_processed",
        "compression_ratio",
        "memory_usage_mb",
    }
    _, parts = load(tmp_path / "o")
    assert stats["total_sequences"] == sum(len(ids) for ids, _ in parts)
    assert stats["total_tokens"] == sum(int(mask.sum()) for _, mask in parts)
    assert stats["avg_sequence_length"] == stats["total_tokens"] / stats["total_sequences"] <= 10
    assert stats["sequences_per_second"] == pytest.approx(
        stats["total_sequences"] / stats["processing_time_seconds"]
    )
    assert stats["files_processed"] == 3
    arrays = sum(ids.nbytes + mask.nbytes for ids, mask in parts)
    size = sum(p.stat().st_size for p in (tmp_path / "o").glob("*.npz"))
    assert stats["compression_ratio"] == size / arrays
    assert 1 < stats["memory_usage_mb"] < 1e6
    assert written["statistics"] == stats


def test_the_pad_token(tmp_path):
    store = token_store(tmp_path / "s", [[[5, 6]]])
    with pytest.raises(TokmillError, match="has no vocabulary") as caught:
        export(store, tmp_path / "o", pad_id=None)
    assert "--pad-id" in str(caught.value) and "<|pad|>" in str(caught.value)
    np.asarray([5, 6, 0], "<u2").tofile(tmp_path / "t.bin")
    store = quick_build("bin", tmp_path / "t.bin", tmp_path / "v", tokenizer=TOKENIZER)
    export(store, tmp_path / "o", pad_id=None, padding="max_length")
    _, ((ids, mask),) = load(tmp_path / "o")
    assert ids.tolist() == [[5, 6, 0, *[1] * 7]] and mask.sum() == 3
    with pytest.raises(UsageError, match="pad_id = 300 is none of the ids 0 to 299"):
        export(store, tmp_path / "p", pad_id=300)


def test_options_that_lose_tokens_and_foreign_folders_are_refused(tmp_path):
    store = token_store(tmp_path / "s", [[[5, 6]]])
    for options in ({"stride": 11}, {"stride": 0}, {"windows_per_file": 0}):
        with pytest.raises(UsageError, match="would leave tokens out"):
            export(store, tmp_path / "o", **options)
    export(store, tmp_path / "o")
    export(store, tmp_path / "o")
    with pytest.raises(TokmillError, match="npz files of another store"):
        export(store, tmp_path / "o", stride=1)


def test_a_file_for_each_input(tmp_path):
    """Each file holds the records of its input in order, whatever shards and items they are in."""
    random = np.random.default_rng(0)
    (tmp_path / "in" / "b").mkdir(parents=True)
    wanted = {}
    for name, tokens in {"a.bin": 900, "a.txt.bin": 40, "b/a.bin": 7, "Z.bin": 0}.items():
        ids = random.integers(2, 99, tokens)
        ids[::5] = 0
        ids.astype("<u2").tofile(tmp_path / "in" / name)
        wanted[name] = [r for r in np.split(ids, np.flatnonzero(ids == 0) + 1) if len(r)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokmill.formats.bin.MAX_ITEM", 100)
        patch.setattr("tokmill.builds.plan.SHARD_BYTES", 200)
        store = quick_build("bin", tmp_path / "in", tmp_path / "s", separator_id=0, vocab_size=99)
    assert len(store.shards) > 2
    written = export(store, tmp_path / "o", per_input=True)
    names = {"a.bin": "a", "a.txt.bin": "a.txt", "b/a.bin": "b_a"}
    assert {p.name for p in (tmp_path / "o").glob("*.npz")} == {
        f"tokenized_{name}.npz" for name in names.values()
    }
    windows = tokens = 0
    for name, short in names.items():
        with np.load(tmp_path / f"o/tokenized_{short}.npz") as data:
            ids, mask = data["input_ids"], data["attention_mask"]
        rows = [row[: int(m.sum())].tolist() for row, m in zip(ids, mask, strict=True)]
        assert rows == [w for r in wanted[name] for w in windows_of(r.tolist())]
        windows, tokens = windows + len(rows), tokens + int(mask.sum())
    stats = written["statistics"]
    assert (stats["total_sequences"], stats["total_tokens"]) == (windows, tokens)
    assert stats["files_processed"] == 4 and written["inputs_without_tokens"] == 1
    with pytest.raises(UsageError, match="two ways to cut files"):
        export(store, tmp_path / "p", per_input=True, windows_per_file=3)


def windows_of(tokens):
    return windows(tokens, 10, 4)


def test_names_of_files_of_inputs_are_never_equal():
    names = [
        "a.txt",
        "a.md",
        "d/a.txt",
        "d_a.txt",
        "A.txt",
        "x.jsonl.gz",
        "..",
        "n\n.txt",
        "é" * 150,
    ]
    found = file_names(names)
    assert len({name.lower() for name in found.values()}) == len(names)
    assert found["x.jsonl.gz"] == "tokenized_x.npz" and found["a.md"] == "tokenized_a.md.npz"
    assert all("/" not in name and len(name.encode()) < 250 for name in found.values())
    assert "\n" not in "".join(found.values())


def test_arrays_of_other_names(tmp_path):
    store = token_store(tmp_path / "s", [[LONG, [7] * 10]])
    names = {"ids_name": "x", "mask_name": "m"}
    export(store, tmp_path / "o", stride=10, **names)
    with np.load(next((tmp_path / "o").glob("*.npz"))) as data:
        assert sorted(data) == ["m", "x"]
    again = quick_build("npz", tmp_path / "o", tmp_path / "again", **names)
    assert ids_of(again) == [LONG[:10], LONG[10:20], LONG[20:], [7] * 10]
    with pytest.raises(TokmillError, match="no array 'input_ids'; it holds m, x") as caught:
        quick_build("npz", tmp_path / "o", tmp_path / "other")
    assert "--ids-name" in str(caught.value)
    for bad in ({"ids_name": ""}, {"ids_name": "a/b"}, {"mask_name": "input_ids"}):
        with pytest.raises(UsageError, match="no two names of arrays"):
            export(store, tmp_path / "p", **bad)


def save(path, **arrays):
    np.savez_compressed(path, **{name: np.asarray(value) for name, value in arrays.items()})
    return path


IDS, MASK = [[1, 2, 0], [3, 0, 0]], [[1, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("dtype", ["i4", "i8", "u2", ">i4", "u1"])
@pytest.mark.parametrize("compressed", [True, False])
def test_files_of_others_are_read(tmp_path, dtype, compressed):
    write = np.savez_compressed if compressed else np.savez
    write(
        tmp_path / "a.npz",
        input_ids=np.asarray(IDS, dtype),
        attention_mask=np.asarray(MASK, bool),
        labels=np.zeros(3),
    )
    store = quick_build("npz", tmp_path / "a.npz", tmp_path / "s")
    assert ids_of(store) == [[1, 2], [3]] and store.manifest.skipped == {}
    expected = {"u1": "u1", "u2": "u2"}.get(dtype, "u4")
    assert store.schema["token"].dtype == expected


def test_left_padding_and_empty_rows(tmp_path):
    save(
        tmp_path / "a.npz",
        input_ids=[[0, 0, 5], [9, 9, 9], [0, 6, 0]],
        attention_mask=[[0, 0, 1], [0, 0, 0], [1, 1, 1]],
    )
    store = quick_build("npz", tmp_path / "a.npz", tmp_path / "s")
    assert ids_of(store) == [[5], [0, 6, 0]]
    assert store.manifest.skipped == {"empty": 1}


def test_items_are_runs_of_rows(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    ids = random.integers(0, 500, (50, 8)).astype(np.int32)
    save(tmp_path / "a.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    monkeypatch.setattr("tokmill.formats.windows.npz.MAX_ITEM", 7 * 32)
    store = quick_build("npz", tmp_path / "a.npz", tmp_path / "s")
    assert ids_of(store) == ids.tolist()
    assert len(store.receipt(0).items) == 8
    assert [store.shard(0)["start"].tolist()] == [list(range(50))]


def corrupt(path, where):
    data = bytearray(path.read_bytes())
    data[where] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"input_ids": IDS}, "no array 'attention_mask'; it holds input_ids"),
        ({"input_ids": IDS, "attention_mask": [[1, 1, 0]]}, r"has shape \(2, 3\).*\(1, 3\)"),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, "integers of shape"),
        ({"input_ids": np.ones((2, 3)), "attention_mask": MASK}, "dtype float64"),
        ({"input_ids": np.asarray([[{}]], object), "attention_mask": [[1]]}, "pickled array"),
        ({"input_ids": IDS, "attention_mask": [[1, 0, 1], [1, 0, 0]]}, "row 0: .* has a hole"),
        ({"input_ids": IDS, "attention_mask": [[1, 0, 0], [2, 0, 0]]}, "row 1: .*neither 0 nor 1"),
        (
            {"input_ids": [[1, -5, 0]], "attention_mask": [[1, 1, 0]]},
            "row 0, position 1: the id -5",
        ),
        ({"input_ids": np.asfortranarray(IDS), "attention_mask": MASK}, "stored by columns"),
        ({"input_ids": [[0, 0]], "attention_mask": [[0, 0]]}, "no record"),
    ],
)
def test_refusals(tmp_path, arrays, message):
    save(tmp_path / "a.npz", **arrays)
    with pytest.raises(TokmillError) as caught:
        quick_build("npz", tmp_path / "a.npz", tmp_path / "s")
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "a.npz" in str(caught.value)


def test_wrong_lengths_inside_the_archive(tmp_path):
    def npy(array):
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(array, np.int32))
        return buffer.getvalue()

    for extra, message in ((b"\0\0\0\0", "longer than it says"), (None, "ends early")):
        data = npy(IDS) + extra if extra else npy(IDS)[:-4]
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("input_ids.npy", data)
            archive.writestr("attention_mask.npy", npy(MASK))
        with pytest.raises(TokmillError, match=message):
            quick_build("npz", tmp_path / "a.npz", tmp_path / message)


def check_file_integrity(folder, vocab_size):
    """The seed's two checks of a folder, line by line: names of the files that one refuses."""
    bad = set()
    for npz_file in folder.glob("*.npz"):
        try:
            with open(npz_file, "rb") as file, np.load(file) as data:
                assert "input_ids" in data
                assert "attention_mask" in data
                assert data["input_ids"].shape == data["attention_mask"].shape
                assert data["input_ids"].dtype in [np.int32, np.int64]
                assert data["attention_mask"].dtype in [np.int32, np.int64]
                assert np.max(data["input_ids"]) < vocab_size
        except Exception:
            bad.add(npz_file.name)
    return bad


def test_every_problem_of_a_folder_of_others_is_told(tmp_path):
    random = np.random.default_rng(0)
    ids = random.integers(0, 300, (50, 8)).astype(np.int32)
    mask = np.ones_like(ids)
    whole = save(tmp_path / "a.npz", input_ids=ids, attention_mask=mask).read_bytes()
    save(tmp_path / "long.npz", input_ids=ids.astype(np.int64), attention_mask=mask)
    assert check(tmp_path, str(TOKENIZER)).ok and not check_file_integrity(tmp_path, 300)
    save(tmp_path / "mask.npz", input_ids=ids)
    save(tmp_path / "ids.npz", attention_mask=mask)
    save(tmp_path / "shape.npz", input_ids=ids, attention_mask=mask[:3])
    save(tmp_path / "float.npz", input_ids=ids.astype(float), attention_mask=mask)
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "none.npz").write_bytes(b"")
    (tmp_path / "flip.npz").write_bytes(whole)
    corrupt(tmp_path / "flip.npz", len(whole) // 2)
    large = ids.copy()
    large[7, 3] = 300
    save(tmp_path / "range.npz", input_ids=large, attention_mask=mask)
    for tokenizer, size in ((str(TOKENIZER), 300), (None, 1 << 31)):
        found = check(tmp_path, tokenizer)
        bad = {re.search(r"(\w+\.npz)", problem.where)[1] for problem in found.problems}
        assert bad == check_file_integrity(tmp_path, size)
        assert ("range.npz" in bad) == (tokenizer is not None)
        assert found.files == 10 and len(found.problems) == len(bad)
    where = next(p.where for p in check(tmp_path, str(TOKENIZER)).problems if "range" in p.where)
    assert where.endswith("range.npz, row 7, position 3")
    save(tmp_path / "one.npz", input_ids=ids - 1, attention_mask=mask)
    assert not check(tmp_path / "one.npz").ok, "the script takes ids below 0"
    assert check(tmp_path / "a.npz").ok
