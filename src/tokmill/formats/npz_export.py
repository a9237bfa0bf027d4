"""Stores as .npz files of padded windows, with the statistics that tokenization kits write.

Source of the formats (`input_ids` and `attention_mask`, int32; tokenization_stats.json): the JSONL
tokenization kit.
"""

from __future__ import annotations

import io
import resource
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill.errors import TokmillError, UsageError
from tokmill.feed.rows import Windows
from tokmill.files import inside, make_folder
from tokmill.formats import exports
from tokmill.formats.notes import exporting
from tokmill.store.manifest import encode
from tokmill.store.schema import Array
from tokmill.store.store import Store, read_planned

STATS = "tokenization_stats.json"
LEVEL = 6


class NpzExportOptions(
    exports.ExportOptions, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Options of .npz files of padded windows."""

    max_length: int = 1024
    """Width of the arrays; longer records give several windows."""
    stride: int = 512
    """Tokens from the beginning of a window to the next (a step, not an overlap)."""
    pad_id: int | None = None
    """Id that fills up windows; if none is given, the vocabulary's pad token."""
    windows_per_file: int = 10_000
    """Windows of a file; the last one has what is left."""
    name: str = "data"
    """The files are called tokenized_NAME_part001.npz …"""


class NpzExport:
    """.npz files of padded windows in a folder, and their statistics.

    Each record is cut alone: a window of `max_length` tokens every `stride` tokens, the last one
    ends with the record. Masks come from lengths, never from ids. Equal stores give equal files
    with the same zlib.
    """

    Config: ClassVar[type[msgspec.Struct]] = NpzExportOptions

    def __init__(self, config: NpzExportOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write the parts into the folder `out`; return files, tokens, bytes and statistics.

        Raises `TokmillError` when there is no id to pad with, an id is above 2^31 - 1, or the
        folder holds .npz files that are not of this very export.
        """
        began = time.monotonic()
        config = self.config
        exports.check_column(store, config)
        if not 0 < config.stride <= config.max_length or config.windows_per_file < 1:
            raise UsageError(
                f"stride = {config.stride}, max_length = {config.max_length}, windows_per_file = "
                f"{config.windows_per_file}: windows would leave tokens out",
                hint="stride is 1 to max_length",
            )
        pad = self._pad(store)
        if exports.id_count(store, config.column) > 1 << 31:
            raise TokmillError("the ids do not fit into int32", where=str(store.path))
        windows = Windows(store, config.max_length, config.stride, across=False)
        if not len(windows):
            raise TokmillError("the store holds no tokens", where=str(store.path))
        folder, name = make_folder(out), f"tokenized_{config.name}"
        parts = -(-len(windows) // config.windows_per_file)
        digits = max(3, len(str(parts)))
        files, tokens, size = [], 0, 0
        own = f"{name}_part*.npz"
        with exporting(store, "npz", config, folder, name, others=("*.npz", own)) as export:
            for part in range(parts):
                first = part * config.windows_per_file
                rows = np.arange(first, min(first + config.windows_per_file, len(windows)))
                ids, mask = self._arrays(store, windows, rows, pad)
                tokens += int(mask.sum())
                size += ids.nbytes + mask.nbytes
                path = inside(folder, f"{name}_part{part + 1:0{digits}d}.npz")
                files.append(export.put(path, _packed(ids, mask)))
            written = sum(path.stat().st_size for path in files)
            stats = statistics(
                sequences=len(windows),
                tokens=tokens,
                seconds=time.monotonic() - began,
                inputs=len({item.name for item in read_planned(store.path)}),
                ratio=written / size,
            )
            if export.changed:
                export.before.pop(STATS, None)
            files.append(export.put(folder / STATS, encode(stats)))
        return exports.summary(files, tokens, windows=len(windows), statistics=stats)

    def _pad(self, store: Store) -> int:
        vocabulary = store.vocabularies.get(store.schema[self.config.column].vocab or "")
        pad = self.config.pad_id
        if pad is None:
            pad = vocabulary.roles.get("pad") if vocabulary else None
        if pad is None:
            raise TokmillError(
                "windows are to be padded, but the vocabulary has no pad token"
                if vocabulary
                else "windows are to be padded, but the store carries no vocabulary",
                where=str(store.path),
                hint="--pad-id 0 takes any id (readers go by the mask), or build the store with "
                "a tokenizer that has a <|pad|> token",
            )
        size = vocabulary.size if vocabulary else 1 << 31
        if not 0 <= pad < size:
            raise UsageError(f"pad_id = {pad} is none of the ids 0 to {size - 1}")
        return pad

    def _arrays(self, store: Store, windows: Windows, rows: Array, pad: int) -> tuple[Array, Array]:
        shape = (len(rows), self.config.max_length)
        ids = {self.config.column: np.full(shape, pad, "<i4")}
        document = np.full(shape, -1, "<i4")
        spans = windows.spans(rows)
        store.fill(spans, shape[1], ids, document, shape[0], [self.config.column])
        return ids[self.config.column], (document >= 0).astype("<i4")


def _packed(ids: Array, mask: Array) -> Iterator[bytes]:
    """Yield the file of a part, which is made when it is asked for."""
    yield deterministic_npz({"input_ids": ids, "attention_mask": mask})


def statistics(
    *, sequences: int, tokens: int, seconds: float, inputs: int, ratio: float
) -> dict[str, float]:
    """Return the figures of `tokenization_stats.json`, none of them rounded.

    total_sequences: windows written. total_tokens: positions whose mask is 1, so a token that two
    windows share counts twice. avg_sequence_length: total_tokens / total_sequences.
    processing_time_seconds: wall time of the export, without the time to write this file.
    sequences_per_second: total_sequences / processing_time_seconds. files_processed: inputs that
    the store was built from. compression_ratio: bytes of the .npz files / bytes of their arrays.
    memory_usage_mb: largest resident memory of the process so far, in 10^6 bytes.
    """
    return {
        "total_sequences": sequences,
        "total_tokens": tokens,
        "avg_sequence_length": tokens / sequences,
        "processing_time_seconds": seconds,
        "sequences_per_second": sequences / seconds,
        "files_processed": inputs,
        "compression_ratio": ratio,
        "memory_usage_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def deterministic_npz(arrays: dict[str, Array]) -> bytes:
    """Return arrays as a compressed .npz whose bytes depend on nothing but them (and zlib)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            # Otherwise the host's system is recorded.
            entry.create_system = 3
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, (1, 0), allow_pickle=False)
    return buffer.getvalue()
