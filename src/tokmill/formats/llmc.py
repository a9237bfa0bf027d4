"""llm.c token shards: a header of 256 int32, then the ids.

Header: [0] magic, [1] version, [2] number of tokens, the rest 0. Magic 20240520, version 1: uint16
(GPT-2); 20240801, version 7: uint32 (Llama 3). All little-endian. Source of the format: llm.c,
`dev/data/data_common.py` and `llmc/dataloader.h`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import inside, make_folder
from tokmill.formats import exports
from tokmill.formats.notes import exporting
from tokmill.store.schema import Array
from tokmill.store.store import Store

HEADER = 1024
MAGICS: dict[int, tuple[int, np.dtype[Any]]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}
"""Magic number → (version, dtype of the ids)."""
EVALUATION = 20240522
MAX_COUNT = 1 << 31


def read_header(head: bytes, size: int, path: Path) -> np.dtype[Any] | None:
    """Return the dtype of an llm.c file from its first bytes; None for another file.

    Raises `TokmillError` if the magic number is llm.c's but version, count or size are wrong.
    """
    if len(head) < 4:
        return None
    magic = int.from_bytes(head[:4], "little")
    if int.from_bytes(head[:4], "big") in (*MAGICS, EVALUATION):
        raise TokmillError(
            "this is an llm.c file with its bytes swapped (big-endian)",
            where=f"{path}, byte 0",
            hint="write it again on a little-endian machine",
        )
    if magic == EVALUATION:
        raise TokmillError(
            "this is an llm.c evaluation file (multiple choice), not a stream of tokens",
            where=f"{path}, byte 0",
            hint="leave it out of the inputs",
        )
    if magic not in MAGICS:
        return None
    version, dtype = MAGICS[magic]
    if len(head) < HEADER:
        raise TokmillError(
            f"the llm.c header is cut off after {len(head)} of {HEADER} bytes",
            where=str(path),
            hint="copy the file again: it was cut off",
        )
    fields = np.frombuffer(head[:HEADER], "<i4")
    if fields[1] != version:
        raise TokmillError(
            f"llm.c files with magic {magic} have version {version}, this one says {fields[1]}",
            where=f"{path}, byte 4",
            hint="for a headerless file that begins like this by chance, use --dtype u2 or u4",
        )
    if HEADER + int(fields[2]) * dtype.itemsize != size:
        raise TokmillError(
            f"the header promises {fields[2]} tokens of {dtype.itemsize} bytes, "
            f"but {size - HEADER} bytes follow",
            where=f"{path}, byte 8",
            hint="its copy was cut off: fetch it again",
        )
    return dtype


class LlmcOptions(exports.ExportOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of llm.c shards."""

    name: str = "tokens"
    """First part of the file names."""
    split: str = "train"
    """Second part of the file names, by which llm.c's scripts select files."""
    shard_tokens: int = 100_000_000
    """Tokens of a shard; the last shard has the rest."""


class LlmcExport:
    """Shards `NAME_SPLIT_000000.bin` … in a folder, cut without regard to documents.

    uint16 up to 65,536 ids, uint32 above (llm.c's C loader reads uint16 alone).
    """

    Config: ClassVar[type[msgspec.Struct]] = LlmcOptions

    def __init__(self, config: LlmcOptions) -> None:
        self.config = config

    def write(self, store: Store, out: Path) -> dict[str, Any]:
        """Write the shards into the folder `out` and return files, tokens and bytes."""
        config = self.config
        if not 0 < config.shard_tokens < MAX_COUNT:
            raise UsageError(
                f"shard_tokens = {config.shard_tokens}: the header holds 1 to {MAX_COUNT - 1}",
                hint="--shard-tokens 100000000 is llm.c's own",
            )
        exports.check_column(store, config)
        dtype = exports.wide_dtype(store, config.column)
        magic, version = next((m, v) for m, (v, d) in MAGICS.items() if d == dtype)
        folder = make_folder(out)
        name = f"{config.name}_{config.split}"
        own = f"{name}_{'[0-9]' * 6}*.bin"
        ids = _Cutter(exports.pieces(store, config.column, dtype))
        starts = range(0, store.tokens, config.shard_tokens)
        files = [inside(folder, f"{name}_{number:06d}.bin") for number in range(len(starts))]
        with exporting(
            store,
            "llmc",
            config,
            folder,
            name,
            files=files,
            named=out,
            others=(f"{name}_*.bin", own),
        ) as export:
            for path, start in zip(files, starts, strict=True):
                count = min(config.shard_tokens, store.tokens - start)
                header = np.zeros(HEADER // 4, "<i4")
                header[:3] = magic, version, count
                taken = ids.take(count)
                export.put(path, exports.raw(chain([header], taken)))
                # If the file existed already, its ids were not taken yet.
                collections.deque(taken, maxlen=0)
        return exports.summary(files, store.tokens)


class _Cutter:
    """Takes exact numbers of ids off a stream of arrays."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        self._arrays = iter(arrays)
        self._rest: Array = np.zeros(0, "<u2")

    def take(self, count: int) -> Iterator[Array]:
        """Yield arrays of `count` ids together."""
        while count:
            while not len(self._rest):
                self._rest = next(self._arrays)
            piece, self._rest = self._rest[:count], self._rest[count:]
            count -= len(piece)
            yield piece
