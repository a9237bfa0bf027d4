"""A small real store, written without a build, and recipes that fit it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokmill.base.files import make_folder, write_file
from tokmill.store.manifest import Manifest, ShardEntry, with_checksum
from tokmill.store.schema import Column, Records, id_dtype
from tokmill.store.shards.shard import SUFFIX, ShardWriter
from tokmill.store.vocab import Vocabulary

SIZE = 23
SHARD = "0123" * 6
EOT = 0


def cycles(count: int, length: int = 30, seed: int = 0, size: int = SIZE) -> list[np.ndarray]:
    """Documents in which a token follows from the one before: learnable within few steps."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        start, n = random.integers(1, size), random.integers(length // 2, length + 1)
        documents.append(np.append(1 + (start + 3 * np.arange(n)) % (size - 1), EOT))
    return documents


def make_store(
    path: Path,
    documents: Sequence[np.ndarray],
    *,
    vocabulary: bytes = b"toy",
    size: int = SIZE,
    complete: bool = True,
    source: str = "text",
    vocab: Vocabulary | None = None,
) -> Path:
    """Write a store of one shard."""
    make_folder(path / "shards")
    make_folder(path / "vocab")
    digest = hashlib.sha256(vocabulary).hexdigest()
    vocab = vocab or Vocabulary("token.json", digest, size, {"eot": EOT})
    write_file(path / "vocab" / vocab.file, vocabulary)
    schema = {
        "token": Column(id_dtype(vocab.size), vocab="token"),
        "bytes": Column("u4", per="record"),
    }
    writer = ShardWriter(schema, {"token": vocab.size})
    offsets = np.cumsum([0, *map(len, documents)])
    flat = np.concatenate(documents)
    columns = {"token": flat, "bytes": 2 * np.diff(offsets)}
    writer.add(Records(offsets, columns, np.zeros(len(documents), np.int64)), 0)
    size_bytes, digest = writer.write(path / f"shards/{SHARD}{SUFFIX}")
    manifest = Manifest(
        producer="toy",
        complete=complete,
        recipe_id="r" * 64,
        plan_id="p" * 64,
        fingerprint=digest,
        source=source,
        schema=schema,
        vocabularies={"token": vocab},
        records=len(documents),
        tokens=len(flat),
        bytes=size_bytes,
        input_bytes=2 * len(flat),
        ranges=writer.ranges,
        skipped={},
        rejected={},
        shards=[ShardEntry(SHARD, len(documents), len(flat), size_bytes, digest)],
    )
    write_file(path / "manifest.json", with_checksum(manifest))
    return path


def recipe(store: Path, steps: int = 20, **sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe that trains in a second; sections are merged over it."""
    value: dict[str, Any] = {
        "data": {"train": str(store), "batch": 8},
        "model": {"dim": 16, "layers": 2, "heads": 2},
        "task": {"length": 16},
        "optim": {"lr": 1e-2, "warmup": 4},
        # Nobody needs to measure how fast the machine is.
        "run": {
            "steps": steps,
            "device": "cpu",
            "log_every": 1,
            "checkpoint_every": 0,
            "peak_flops": 1e12,
        },
    }
    for name, section in sections.items():
        value[name] = {**value[name], **section}
    return value


def text_store(path: Path, texts: Sequence[str]) -> Path:
    """A store of bytes with a real tokenizer.json: id = byte, and the end of a document."""
    from tokmill.text.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"])
    vocabulary, raw = tokenizer.vocabulary()
    documents = [np.frombuffer(text.encode() + b"\0", "u1").astype("u2") for text in texts]
    for document in documents:
        document[-1] = vocabulary.role("eot")
    return make_store(path, documents, vocabulary=raw, vocab=vocabulary)


def losses(run: Path, name: str = "loss") -> dict[int, float]:
    """A metric of a run by step."""
    from tokmill.training.runs.trackers import read_metrics

    entries = read_metrics(run / "metrics.jsonl")
    return {int(entry["step"]): entry[name] for entry in entries if name in entry}


def weights(run: Path, place: str = "model") -> dict[str, Any]:
    """The weights in a folder of a run."""
    from tokmill.training.engines.tensors import read_tensors

    return read_tensors(run / place / "model.safetensors")


def stop_after(step: int, monkeypatch: Any) -> None:
    """Make the stop that a signal makes come once so many steps are done."""
    from tokmill.training.session import Session

    taken = Session.step

    def counted(self: Session, total: int) -> None:
        taken(self, total)
        if self.state.step == step:
            self.stop.signal = "SIGTERM"

    monkeypatch.setattr(Session, "step", counted)
