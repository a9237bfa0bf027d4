"""Exports read by the peers' own readers, and peers' files read by tokmill."""

import numpy as np

from making import EOT, ids_of, token_store
from tokmill import plugins


def rows(size, count=200):
    random = np.random.default_rng(0)
    lengths = [*random.integers(0, 50, count), 3000, 0]
    return [[*random.integers(1, size, n).tolist(), EOT] for n in lengths]


def write(kind, store, out, **options):
    part = plugins.load(plugins.EXPORTS, kind)
    return part(part.Config(**options)).write(store, out)


def test_a_memory_map_reads_the_headerless_file(tmp_path):
    """The loader of nanoGPT and CS336 trainers: `np.memmap(path, dtype)`."""
    store = token_store(tmp_path / "s", [rows(300)])
    write("bin", store, tmp_path / "train.bin")
    data = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r")
    assert data.tolist() == [i for record in ids_of(store) for i in record]


def test_the_seeds_loader_reads_npz_folders(tmp_path):
    """The validation and the loader of the JSONL tokenization kit's guide, without torch."""
    documents = rows(300)
    store = token_store(tmp_path / "s", [documents])
    write("npz", store, tmp_path / "o", max_length=64, stride=64, pad_id=1, windows_per_file=50)
    found = []
    for path in sorted((tmp_path / "o").glob("*.npz")):
        with np.load(path) as data:
            assert data["input_ids"].shape == data["attention_mask"].shape
            assert data["input_ids"].shape[1] == data["attention_mask"].sum(axis=1).max() <= 64
            assert data["input_ids"].max() < 300
            assert data["input_ids"].dtype in [np.int32, np.int64]
            for ids, mask in zip(data["input_ids"], data["attention_mask"], strict=True):
                found += ids[mask == 1].tolist()
    assert found == [i for document in documents for i in document]
