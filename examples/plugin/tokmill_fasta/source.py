"""The kind of input: `tokmill build fasta FILE… -o STORE`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tokmill.base.errors import TokmillError
from tokmill.base.files import reading
from tokmill.builds.scan import FolderOptions, find_files
from tokmill.builds.source import Frozen, Hash, Item, Request, Source
from tokmill.store.schema import Column, Drop, Records, Schema, Strings, drops_of
from tokmill.store.vocab import Vocabulary

BASES = b"ACGTN"
IDS = np.full(256, 255, np.uint8)
IDS[list(BASES)] = IDS[list(BASES.lower())] = np.arange(len(BASES))


class FastaSource(Source):
    """FASTA files: a record for each sequence, `token` (A C G T N are 0 to 4) and its `name`.

    A sequence with another letter is rejected, one without letters is skipped.
    """

    Config = FolderOptions
    version = 1
    has_tokenizer = False

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        tokens = {"column": "token", "rules": "bases", "tokens": [chr(base) for base in BASES]}
        data = json.dumps(tokens).encode()
        digest = hashlib.sha256(data).hexdigest()
        return {"token": Frozen(Vocabulary("token.json", digest, len(BASES)), data)}

    @property
    def schema(self) -> Schema:
        return {"token": Column("u1", vocab="token"), "name": Column("utf8", per="record")}

    def items(self) -> Iterator[Item]:
        files = find_files(self.inputs, (".fasta", ".fa"), choice=self.config)
        self.left_out = files.left_out
        for file in files.files:
            yield Item(file.name, str(file.path.absolute()), 0, file.size, file.digest)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        with reading(item.path) as file:
            data = file.read()
        digest.update(data)
        names, parts, starts, drops = [], [], [], []
        for start, name, sequence in sequences(data, item.path):
            if not sequence:
                drops.append(Drop(start, "empty", rejected=False))
                continue
            ids = IDS[np.frombuffer(sequence, np.uint8)]
            if (ids == 255).any():
                drops.append(Drop(start, "letter", rejected=True))
                continue
            names.append(name)
            parts.append(ids)
            starts.append(start)
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        token = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        columns = {"token": token, "name": Strings.of(names)}
        yield Records(offsets, columns, np.array(starts, np.int64), drops_of(drops))


def sequences(data: bytes, path: str) -> Iterator[tuple[int, str, bytes]]:
    """Yield (byte of the header, name, letters) of each sequence of a FASTA file."""
    starts = [match.start() for match in re.finditer(rb"^>", data, re.MULTILINE)]
    if data[: starts[0] if starts else None].strip():
        raise TokmillError(
            "the file does not begin with a header", where=path, hint="a line such as >name"
        )
    for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
        header, _, body = data[start + 1 : end].partition(b"\n")
        name = (header.split() or [b""])[0].decode("utf-8", "replace")
        yield start, name, b"".join(body.split())
