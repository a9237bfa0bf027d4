"""Stores as .npz files of padded windows, with the statistics that tokenization kits write.

Source of the formats (`input_ids` and `attention_mask`, int32; tokenization_stats.json): the JSONL
tokenization kit.
"""

import resource
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import inside
from tokmill.feed.rows import Windows
from tokmill.formats import notes
from tokmill.formats.notes import exporting
from tokmill.store.manifest import encode
from tokmill.store.receipts import read_planned
from tokmill.store.schema import Array
from tokmill.store.store import Store

STATS = "tokenization_stats.json"
IDS, MASK = "input_ids", "attention_mask"
LEVEL = 6
WINDOWS = 10_000
PACKED = (".gz", ".zst")
Runs = list[tuple[int, int]]
"""Windows of a file: (first, last + 1) of each run."""
LONGEST = 200
"""Bytes of an input's name in the name of a file."""


class NpzExportOptions(notes.ExportOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of .npz files of padded windows."""

    max_length: int = 1024
    """Largest number of tokens in a window; longer records give several windows."""
    stride: int | None = None
    """Tokens from the beginning of a window to the next (a step, not an overlap); by default half
    of max_length."""
    padding: Literal["longest", "max_length"] = "longest"
    """Width of a file's arrays: that of its longest window, or max_length."""
    pad_id: int | None = None
    """Id of padding; by default the vocabulary's pad token."""
    windows_per_file: int | None = None
    """Windows per file, by default 10,000."""
    per_input: bool = False
    """Write one file for each input of the store, called tokenized_INPUT.npz."""
    name: str = "data"
    """Part of the file names: tokenized_NAME_part001.npz …"""
    ids_name: str = IDS
    """Name of the array of ids."""
    mask_name: str = MASK
    """Name of the array that is 1 at tokens and 0 at padding."""


class NpzExport:
    """.npz files of padded windows in a folder, and their statistics.

    Each record is cut by itself: a window of `max_length` tokens every `stride` tokens; the last
    one ends with the record. Masks follow from lengths, not from ids. Equal stores give equal files
    (with the same zlib).
    """

    Config: ClassVar[type[msgspec.Struct]] = NpzExportOptions

    def __init__(self, config: NpzExportOptions) -> None:
        half = max(1, config.max_length // 2)
        self.stride = half if config.stride is None else config.stride
        self.config = msgspec.structs.replace(config, stride=self.stride)

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write the parts into the folder `out`; return files, tokens, bytes and statistics."""
        began = time.monotonic()
        config = self.config
        notes.check_column(store, config)
        self._check()
        pad = self._pad(store)
        if notes.id_count(store, config.column) > 1 << 31:
            raise TokmillError(
                "the ids do not fit into int32",
                where=str(store.path),
                hint="the npz windows hold int32: tokmill store export bin holds more",
            )
        windows = Windows(store, config.max_length, self.stride, across=False)
        if not len(windows):
            raise TokmillError(
                "the store holds no tokens",
                where=str(store.path),
                hint="look at it with `tokmill inspect`: was anything built?",
            )
        folder, name = out, f"tokenized_{config.name}"
        parts, own = self._parts(windows, name)
        inputs = {item.name for item in read_planned(store.path)}
        tokens, size, files = 0, 0, [inside(folder, file) for file, _ in parts]
        with exporting(
            store,
            "npz",
            config,
            folder,
            name,
            files=[*files, folder / STATS],
            named=out,
            others=("*.npz", own),
        ) as export:
            for path, (_, runs) in zip(files, parts, strict=True):
                spans = [windows.spans(rows) for rows in _blocks(runs, config.max_length)]
                lengths = np.concatenate([some.stop - some.start for some in spans])
                width = int(lengths.max()) if config.padding == "longest" else config.max_length
                tokens, size = tokens + int(lengths.sum()), size + 8 * width * len(lengths)
                export.put(path, self._npz(windows, runs, lengths, pad, width))
            written = sum(path.stat().st_size for path in files)
            stats = statistics(
                sequences=len(windows),
                tokens=tokens,
                seconds=time.monotonic() - began,
                inputs=len(inputs),
                ratio=written / size,
            )
            files.append(export.put(folder / STATS, encode(stats)))
        more = {"inputs_without_tokens": len(inputs) - len(parts)} if config.per_input else {}
        return notes.summary(files, tokens, windows=len(windows), **more, statistics=stats)

    def _check(self) -> None:
        config = self.config
        size = WINDOWS if config.windows_per_file is None else config.windows_per_file
        if not 0 < self.stride <= config.max_length or size < 1:
            raise UsageError(
                f"stride = {self.stride}, max_length = {config.max_length}, windows_per_file = "
                f"{size}: windows would leave tokens out",
                hint="stride is 1 to max_length",
            )
        if config.per_input and config.windows_per_file is not None:
            raise UsageError(
                "per_input and windows_per_file are two ways to cut files", hint="choose one"
            )
        names = (config.ids_name, config.mask_name)
        bad = [name for name in names if not name.isprintable() or not name or {*name} & {*"/\\"}]
        if bad or names[0] == names[1]:
            raise UsageError(
                f"ids_name = {names[0]!r}, mask_name = {names[1]!r}: no two names of arrays",
                hint="such as --ids-name tokens --mask-name mask",
            )

    def _parts(self, windows: Windows, name: str) -> tuple[list[tuple[str, Runs]], str]:
        if self.config.per_input:
            inputs = {n: r for n, r in _inputs(windows).items() if any(b > a for a, b in r)}
            names = file_names(inputs)
            return [(names[n], runs) for n, runs in inputs.items()], "tokenized_*.npz"
        size = self.config.windows_per_file or WINDOWS
        count = -(-len(windows) // size)
        digits = max(3, len(str(count)))
        parts = [
            (f"{name}_part{part + 1:0{digits}d}.npz", [(part * size, (part + 1) * size)])
            for part in range(count)
        ]
        last, ((start, _),) = parts[-1]
        parts[-1] = last, [(start, len(windows))]
        return parts, f"{name}_part*.npz"

    def _pad(self, store: Store) -> int:
        vocabulary = store.vocabularies.get(store.schema[self.config.column].vocab or "")
        pad = self.config.pad_id
        if pad is None:
            pad = vocabulary.roles.get("pad") if vocabulary else None
        if pad is None:
            raise TokmillError(
                "windows are to be padded, but the vocabulary has no pad token"
                if vocabulary
                else "windows are to be padded, but the store has no vocabulary",
                where=str(store.path),
                hint="--pad-id 0 takes any id (readers go by the mask), or build the store with "
                "a tokenizer that has a <|pad|> token",
            )
        size = vocabulary.size if vocabulary else 1 << 31
        if not 0 <= pad < size:
            raise UsageError(
                f"pad_id = {pad} is none of the ids 0 to {size - 1}",
                hint="--pad-id takes an id in this range",
            )
        return pad

    def _npz(
        self, windows: Windows, runs: Runs, lengths: Array, pad: int, width: int
    ) -> Iterator[bytes]:
        column = self.config.column

        def ids() -> Iterator[Array]:
            for rows in _blocks(runs, width):
                arrays = {column: np.full((len(rows), width), pad, "<i4")}
                document = np.full((len(rows), width), -1, "<i4")
                windows.store.fill(
                    windows.spans(rows), width, arrays, document, len(rows), [column]
                )
                yield arrays[column]

        def masks() -> Iterator[Array]:
            for start in range(0, len(lengths), notes.BLOCK // width + 1):
                some = lengths[start : start + notes.BLOCK // width + 1, None]
                yield (np.arange(width) < some).astype("<i4")

        arrays = {self.config.ids_name: ids(), self.config.mask_name: masks()}
        yield from deterministic_npz(arrays, (len(lengths), width))


def _blocks(runs: Runs, width: int) -> Iterator[Array]:
    """Yield the windows of a file, about a million ids at a time."""
    size = max(1, notes.BLOCK // width)
    for first, last in runs:
        for start in range(first, last, size):
            yield np.arange(start, min(start + size, last))


def _inputs(windows: Windows) -> dict[str, Runs]:
    store, base = windows.store, 0
    result: dict[str, Runs] = {}
    for number, entry in enumerate(store.shards):
        items = store.receipt(number).items
        item = store.shard(number)["item"]
        begins = np.flatnonzero(np.diff(item, prepend=-1)) if len(item) else item
        for begin, end in zip(begins, [*begins[1:], entry.records], strict=True):
            run = tuple(int(windows.firsts[base + place]) for place in (begin, end))
            result.setdefault(items[int(item[begin])].name, []).append((run[0], run[1]))
        base += entry.records
    return result


def file_names(inputs: Iterable[str]) -> dict[str, str]:
    """Return name of an input → name of its file; all file names differ.

    `data/a.jsonl` gives `tokenized_data_a.npz`. If two files would have the same name, the name
    includes the suffix, and if necessary a number.
    """
    plain = {name: _plain(name) for name in inputs}
    times = Counter(_stem(name).lower() for name in plain.values())
    result: dict[str, str] = {}
    taken: set[str] = set()
    for name, text in plain.items():
        stem = _stem(text)
        wanted = stem if times[stem.lower()] == 1 else text
        chosen, number = wanted, 1
        while chosen.lower() in taken:
            number += 1
            chosen = f"{wanted}_{number}"
        taken.add(chosen.lower())
        result[name] = f"tokenized_{chosen}.npz"
    return result


def _plain(name: str) -> str:
    text = "".join(sign if sign.isprintable() else "_" for sign in name.replace("/", "_"))
    data = text.encode("utf-8", "replace")
    if len(data) <= LONGEST:
        return data.decode()
    return data[-LONGEST:].decode("utf-8", "ignore")


def _stem(name: str) -> str:
    """Return a name without its suffix, and without a compression suffix."""
    path = PurePath(name)
    return (path.with_suffix("") if path.suffix in PACKED else path).stem


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


def deterministic_npz(
    arrays: Mapping[str, Iterator[Array]], shape: tuple[int, ...]
) -> Iterator[bytes]:
    """Yield int32 arrays of one shape as a compressed .npz; its bytes depend on them and on zlib.

    The rows of each array come in blocks, so that a file needs no memory of its size.
    """
    sink = notes.Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
        for name, blocks in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            # A fixed value; by default it depends on the operating system.
            entry.create_system = 3
            header = {"descr": "<i4", "fortran_order": False, "shape": shape}
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                for block in blocks:
                    file.write(block.data.cast("B"))
                    yield sink.take()
    yield sink.take()
