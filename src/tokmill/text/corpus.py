"""Walks as text: `corpus.txt` has a walk per line, words between blanks, blank lines between pairs.

It is what `gendata.py` and `dataprocess.py` of a BERT on walks write, beside a `vocab.txt`.
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tokmill.base.errors import UsageError
from tokmill.base.files import place_of
from tokmill.base.inflate import CAT
from tokmill.base.progress import human_count
from tokmill.builds.scan import InputFile
from tokmill.builds.source import MAX_ITEM, Frozen, Hash, Item, Request, Resources
from tokmill.store.manifest import Made
from tokmill.store.schema import Column, Drop, Drops, Records, Schema, drops_of
from tokmill.text.documents import DocumentSource, Encode, NoHash
from tokmill.text.make_document import Documents, TextOptions, select
from tokmill.text.record_blocks import BOM, Block, few_records, is_stream, record_blocks, suffix
from tokmill.text.tokenizers.tokenizer import Tokenizer
from tokmill.text.tokenizers.tokenizer_files import count_words, read_words, tokenizer_of_words

PAIR = "pair"
UNKNOWN = "words outside of the vocabulary"
BLOCK = 2 << 20
"""Bytes that are read at a time. A part ends with a block, so this is no matter of resources."""
MOST_WALKS = 1 << 13
"""Lines that become walks at a time: each takes some hundred bytes meanwhile."""


class CorpusConfig(TextOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of walks as text."""

    words: str = ""
    """File with a word per line (vocab.txt), whose lines are the ids; without it and without a
    tokenizer the words of the corpus are the vocabulary."""
    min_count: Annotated[int, Meta(ge=1)] = 1
    """Words of the corpus that are rarer than this become [UNK]."""
    specials_in_text: Literal["plain", "special", "reject"] = "plain"
    """What `[SEP]` as a word of a walk means: a word that is not known, the special token, a
    reject."""
    end_of_record: Literal["eot", "none"] = "none"
    """Whether a walk ends with the `eot` token."""
    template: Literal["refuse", "add", "none"] = "none"
    """For a tokenizer that adds tokens such as [CLS] to every text."""


class CorpusSource(DocumentSource):
    """Files of walks; a record is a walk, and its column `pair` says of which file and pair.

    A file is one item, as the number of a pair depends on all before it; it is committed in parts.
    """

    Config: ClassVar[type[msgspec.Struct]] = CorpusConfig
    suffixes = (".txt",)
    hints: ClassVar[dict[str, str]] = {"blank line": "the file holds no walk: it has no words"}
    config: CorpusConfig

    def prepare(self) -> None:
        words = str(Path(self.config.words).absolute()) if self.config.words else ""
        self.config = msgspec.structs.replace(self.config, words=words)

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the vocabulary: a tokenizer, a list of words, or the words of the corpus."""
        if request.tokenizer is not None:
            if config.words or config.min_count > 1:
                raise UsageError(
                    "words and min_count make a vocabulary, and a tokenizer was named",
                    hint="leave one of them out",
                )
            return super().freeze(config, request)
        if config.words and config.min_count > 1:
            raise UsageError("min_count is of words of the corpus", hint="leave --words out")
        if config.words:
            ids = read_words(Path(config.words)).ids
        else:
            source = cls(config, request.inputs, {}, Resources())
            each = (source.documents(item, NoHash()) for item in source.items())
            texts = (batch.texts for batches in each for batch in batches)
            ids = count_words(texts, config.min_count)
        tokenizer = Tokenizer.from_data(tokenizer_of_words(ids))
        return {"token": Frozen(*tokenizer.vocabulary(request.roles))}

    @classmethod
    def to_predict(cls, made: Made, path: str, lines: int) -> Made:
        return Made(source=made.source, options=made.options | {"words": "", "min_count": 1})

    @classmethod
    def remark(cls, names: Sequence[str], config: Any) -> str:
        if not config.words:
            return ""
        words = read_words(Path(config.words))
        remarks = []
        if words.repeated:
            lines = human_count(words.repeated, "line")
            remarks.append(f"{lines} whose word stands again further down, where its id is")
        if words.missing:
            lacking = " ".join(words.missing)
            remarks.append(f"without {lacking}, which got the ids after its last line")
        if words.empty:
            remarks.append(
                f"{human_count(words.empty, 'line')} without a word, whose ids no word has"
            )
        return f"{config.words}: {'; '.join(remarks)}" if remarks else ""

    @property
    def schema(self) -> Schema:
        """Tokens, the bytes of each walk as UTF-8, and its pair."""
        return {**super().schema, PAIR: Column("utf8", per="record")}

    def identity(self) -> dict[str, Any]:
        """Return nothing for what only chooses the vocabulary, as that is in the plan."""
        return dict.fromkeys(("words", "min_count"))

    def cut(self, file: InputFile) -> Iterator[Item]:
        path = place_of(file.path)
        if is_stream(path):
            raise UsageError(
                "a compressed corpus is not read",
                where=path,
                hint=f"unpack it: {CAT[suffix(path)]} {shlex.quote(path)} > NEW",
            )
        yield Item(file.name, path, 0, file.size, file.digest)

    def documents(self, item: Item, digest: Hash) -> Iterator[Documents]:
        part = size = 0
        pairs = _Pairs(item.name)
        # What is hashed is cut where parts are, and blocks are read ahead of that.
        whole = msgspec.structs.replace(item, parts_done=0)
        for block in record_blocks(whole, b"\n", NoHash(), BLOCK):
            size += len(block.data)
            ends_part = size >= MAX_ITEM
            if part >= item.parts_done:
                digest.update(block.data)
            pieces = [*few_records(block, b"\n", MOST_WALKS)]
            for piece in pieces:
                documents = pairs.walks(piece._replace(done=block.done))
                documents.ends_part = ends_part and piece is pieces[-1]
                if part >= item.parts_done:
                    yield documents
            if ends_part:
                part, size = part + 1, 0

    def encoder(self, resources: Resources) -> Encode:
        assert self.frozen is not None
        return _EncodeWalks(self.frozen, self.config, resources)


class _Pairs:
    """Lines as walks of pairs: blank lines stand between pairs, however many."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = -1
        self.between = True

    def walks(self, block: Block) -> Documents:
        """Return the walks of a block; those that are not UTF-8 are rejected."""
        texts: list[str] = []
        starts: list[int] = []
        named: list[str] = []
        bad: list[str] = []
        left = [Drop(place, "too long", True) for place in block.too_long]
        place = block.start
        for line in block.data.split(b"\n")[: None if block.data[-1:] != b"\n" else -1]:
            start, place = place, place + len(line) + 1
            line = line.removeprefix(BOM) if start == 0 else line
            if not line.strip():
                self.between = True
                left.append(Drop(start, "blank line", False))
                continue
            if self.between:
                self.number, self.between = self.number + 1, False
            try:
                texts.append(line.decode().strip())
                bad.append("")
            except UnicodeDecodeError:
                texts.append("")
                bad.append("utf8")
            starts.append(start)
            named.append(f"{self.name}:{self.number}")
        drops: list[Drops] = drops_of(left)
        documents = Documents(
            texts, np.array(starts, np.int64), drops, {PAIR: named}, done=block.done
        )
        return select(documents, bad, rejected=True)


class _EncodeWalks(Encode):
    """Walks to records, with the unknown words counted."""

    def __init__(self, frozen: Frozen, config: CorpusConfig, resources: Resources) -> None:
        super().__init__(frozen, config, resources)
        self.unknown = frozen.vocabulary.roles.get("unk")

    def __call__(self, documents: Documents) -> Records:
        records = super().__call__(documents)
        if self.unknown is not None:
            ids = records.columns["token"]
            assert isinstance(ids, np.ndarray)
            if count := int((ids == self.unknown).sum()):
                records.notes[UNKNOWN] = count
        return records
