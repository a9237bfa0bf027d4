"""Checkpoints of TensorFlow, format V2, read without TensorFlow.

NAME.index                  a sorted table (`sstable`): name of a tensor → its place
NAME.data-00000-of-0000N    the data shards: the tensors one after the other, row by row
NAME.meta                   the graph, which is not needed to read tensors

Format: tensorflow/core/util/tensor_bundle in https://github.com/tensorflow/tensorflow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tokmill import plugins
from tokmill.base.errors import TokmillError, nearest
from tokmill.base.files import machine_errors
from tokmill.store.schema import Array
from tokmill.training.runs.tensorflow.bundle_entry import (
    BFLOAT16,
    DTYPES,
    TensorEntry,
    check_entry,
    entry_of,
    shards_of,
)
from tokmill.training.runs.tensorflow.sstable import Checksum, damaged, read_table, unmasked

INDEX = ".index"
MOST_TENSORS = 200_000


class TensorBundle:
    """The tensors of a checkpoint: their entries, and on request each one as an array.

    Args:
        prefix: the checkpoint without the endings of its files, `…/bert_model.ckpt`.

    Raises:
        TokmillError: the files are damaged, are missing, or are of a kind that is not read.
        MissingExtraError: the package for checksums is missing.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.index = prefix.with_name(prefix.name + INDEX)
        self.checksum: Checksum = plugins.require("google_crc32c").value
        self.shards = 0
        self.entries: dict[str, TensorEntry] = {}
        """Name of a tensor → its entry in the index."""
        try:
            self._read_index()
        except ValueError as error:
            raise damaged(self.index, str(error)) from None
        self._check_places()

    def read(self, name: str) -> Array:
        """Return a tensor; its file is mapped, so values are read when they are used.

        float32, float16, int32 and int64 keep their dtype; bfloat16 becomes float32, which is
        exact. Changes to the array do not change the file.

        Raises `TokmillError` for another dtype, a partitioned variable, a wrong checksum, or a
        name that is not there.
        """
        if name not in self.entries:
            raise TokmillError(
                f"there is no tensor {name!r}", where=str(self.prefix),
                hint=nearest(name, self.entries, "`entries` has the names"),
            )  # fmt: skip
        entry = self.entries[name]
        if entry.slices:
            raise TokmillError(
                f"the variable {name!r} was saved in {entry.slices} parts, and partitioned "
                "variables are not read",
                where=str(self.index),
                hint="let TensorFlow load it and save it without a partitioner",
            )
        if entry.dtype not in DTYPES:
            raise TokmillError(
                f"the tensor {name!r} is of {entry.kind}; what is read is float32, float16, "
                "bfloat16, int32 and int64",
                where=str(self.index),
                hint="let TensorFlow cast it and save it again",
            )
        path = self.shard_path(entry.shard)
        data: Array = np.empty(0, np.uint8)
        if entry.size:
            with machine_errors("read", path):
                # Mode c maps private pages: torch needs arrays that can be written to.
                data = np.memmap(path, np.uint8, "c", entry.offset, (entry.size,))
        if self.checksum(data) != unmasked(entry.crc):
            raise damaged(path, f"the checksum of the tensor {name!r} is wrong")
        values = np.require(data.view(DTYPES[entry.dtype]), requirements="A")
        if entry.dtype == BFLOAT16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(entry.shape)

    def shard_path(self, number: int) -> Path:
        """Return the file of a data shard."""
        name = f"{self.prefix.name}.data-{number:05}-of-{self.shards:05}"
        return self.prefix.with_name(name)

    def _read_index(self) -> None:
        for key, value in read_table(self.index, self.checksum):
            if not key:
                self.shards = shards_of(value)
            elif not self.shards:
                raise ValueError("it is no index of a checkpoint: it has no header")
            elif key[0]:  # A key that begins with a zero byte is a part of a variable.
                entry = entry_of(value)
                try:
                    name = key.decode()
                    check_entry(entry, self.shards)
                except ValueError as error:
                    raise ValueError(f"the tensor {key[:80]!r}: {error}") from None
                self.entries[name] = entry
                if len(self.entries) > MOST_TENSORS:
                    raise ValueError(f"it names more than {MOST_TENSORS:,} tensors")
        if not self.shards:
            raise ValueError("it is no index of a checkpoint: it has no header")

    def _check_places(self) -> None:
        """Refuse tensors that overlap or lie beyond their shard, and shards that are missing."""
        whole = (one for one in self.entries.items() if not one[1].slices and one[1].size)
        shard, size, end = -1, 0, 0
        for name, entry in sorted(whole, key=lambda one: one[1][2:4]):
            if entry.shard != shard:
                shard, end = entry.shard, 0
                path = self.shard_path(shard)
                if not path.is_file():
                    raise TokmillError(
                        f"there is no {path.name}, and the index names {self.shards} data shards",
                        where=str(self.index),
                        hint="fetch all files of the checkpoint into one folder",
                    )
                with machine_errors("read", path):
                    size = path.stat().st_size
            if entry.offset < end:
                raise damaged(self.index, f"the tensor {name!r} overlaps another")
            end = entry.offset + entry.size
            if end > size:
                raise damaged(path, f"it has {size:,} bytes, and {name!r} ends at byte {end:,}")
