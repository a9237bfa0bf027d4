"""Exports read by the peers' own readers, and peers' files read by tokmill.

megatron-core runs in a child process: of this environment, or of the one whose Python
`TOKMILL_PEERS` names (`pip install --no-deps megatron-core`, with torch).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from making import EOT, ids_of, quick_build, rec, token_store, write_store
from tokmill import plugins
from tokmill.store.schema import Column
from tokmill.store.vocab import Vocabulary

MEGATRON = """
import importlib.util, sys, types, warnings
warnings.simplefilter("ignore")
# The package's __init__ loads all of Megatron; its dataset readers need one logging function of it.
spec = importlib.util.find_spec("megatron")
if spec is None:
    sys.exit("NO megatron-core")
def package(name, **values):
    module = types.ModuleType(name)
    module.__path__ = [
        f"{place}/{'/'.join(name.split('.')[1:])}" for place in spec.submodule_search_locations
    ]
    module.__dict__.update(values)
    sys.modules[name] = module
package("megatron.core")
package("megatron.core.datasets")
package("megatron.core.utils", log_single_rank=lambda *a, **k: None)
try:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
except ImportError as error:
    sys.exit(f"NO {error}")
import json
"""


def child(code, *arguments):
    """Run code in the peers' environment and return the JSON that it prints."""
    done = subprocess.run(
        [os.environ.get("TOKMILL_PEERS", sys.executable), "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1:] or [""]
    if done.returncode == 1 and last[0].startswith("NO "):
        pytest.skip(f"the peer cannot be imported: {last[0][3:]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rows(size, count=200):
    random = np.random.default_rng(0)
    lengths = [*random.integers(0, 50, count), 3000, 0]
    return [[*random.integers(1, size, n).tolist(), EOT] for n in lengths]


def store_of(folder, size):
    vocabulary = {"token": Vocabulary("tokenizer.json", "0" * 64, size, {"eot": EOT})}
    documents = rows(size)
    schema = {"token": Column("u4", vocab="token")}
    shards = [[rec(d) for d in documents[:90]], [rec(d) for d in documents[90:]]]
    return write_store(folder, schema, shards, vocabularies=vocabulary), documents


def write(kind, store, out, **options):
    part = plugins.load(plugins.EXPORTS, kind)
    return part(part.Config(**options)).write(store, out)


SIZES = [300, 65499, 65500, 70000]


def test_megatron_reads_our_pairs_and_we_read_its(tmp_path):
    """One child: importing torch takes longer than all of the rest."""
    expected = {}
    for size in SIZES:
        store, documents = store_of(tmp_path / f"s{size}", size)
        write("megatron", store, tmp_path / f"set{size}")
        expected[str(size)] = documents
    (tmp_path / "documents.json").write_text(json.dumps(documents))
    found = child(
        MEGATRON
        + """
import torch
folder, found = sys.argv[1], {}
for size in sys.argv[2:]:
    for mmap in (True, False):
        data = IndexedDataset(f"{folder}/set{size}", mmap=mmap)
        assert data.index.dtype == DType.optimal_dtype(int(size)), size
        starts = data.document_indices.tolist()
        assert starts == list(range(len(data) + 1))
        found[size] = [data[i].tolist() for i in range(len(data))]
with open(f"{folder}/documents.json") as file:
    documents = json.load(file)
for name, pieces in (("theirs", 1), ("sentences", 3)):
    builder = IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=DType.optimal_dtype(70000))
    for document in documents:
        cut = -(-len(document) // pieces)
        lengths = [len(document[i : i + cut]) for i in range(0, len(document), cut)]
        builder.add_document(torch.tensor(document), lengths)
    builder.finalize(f"{folder}/{name}.idx")
print(json.dumps(found))
""",
        tmp_path,
        *SIZES,
    )
    assert found == expected
    for suffix in (".bin", ".idx"):
        ours, theirs = (tmp_path / f"{name}{suffix}" for name in ("set70000", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes(), suffix
    again = quick_build("megatron", tmp_path / "theirs", tmp_path / "a", vocab_size=70000)
    assert ids_of(again) == documents
    cut = quick_build("megatron", tmp_path / "sentences", tmp_path / "b")
    assert ids_of(cut) == documents
    parts = quick_build("megatron", tmp_path / "sentences", tmp_path / "c", unit="sequence")
    assert len(parts) > len(documents) and parts.tokens == store.tokens


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
