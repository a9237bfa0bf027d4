"""Tables of labelled sentences (TSV of GLUE, such as MRPC and MNLI): one or two sentences a record.

A line is a record, its columns end at tabs, and quotation marks are text. A record is
`[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`, with the column `segment` (0 up to the first `[SEP]`, 1
after it) and the number of its class in the column `label`.
"""

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.inflate import MAGIC
from tokmill.base.progress import human_count
from tokmill.builds.scan import FolderOptions
from tokmill.builds.source import Frozen, Hash, Item, Request, Resources
from tokmill.store.checks.probe import Probe, make_probe
from tokmill.store.manifest import Made
from tokmill.store.schema import (
    Array,
    Column,
    Drop,
    Drops,
    Records,
    Schema,
    Strings,
    drops_of,
    ranges,
)
from tokmill.text.documents import DocumentSource, Encoder, NoHash, surround
from tokmill.text.make_document import Documents
from tokmill.text.record_blocks import BOM, Block, record_blocks
from tokmill.text.tables.tsv_columns import (
    Layout,
    class_names,
    first_line,
    layout_of,
    split_line,
    vocabulary_of,
)

LABEL = "\tlabel"
"""Key of the class names in `Documents.kept`; no field can have this name."""


class EncodeSentences(Encoder):
    """Sentences to records."""

    def __init__(
        self, frozen: Frozen, config: Any, classes: Sequence[str], resources: Resources
    ) -> None:
        super().__init__(frozen, config.specials_in_text, resources)
        self.cls, self.sep = (frozen.vocabulary.role(role) for role in ("cls", "sep"))
        self.most = config.max_tokens
        self.numbers = {name: number for number, name in enumerate(classes)}
        self.labelled = not config.unlabelled

    def __call__(self, documents: Documents) -> Records:
        """Return the records of a batch; records with a sentence without tokens are rejected."""
        documents = self.without_specials(documents)
        sentences = [text.split("\n") for text in documents.texts]
        count = len(sentences[0]) if sentences else 1
        ids, flat = self.encoder([one for record in sentences for one in record])
        lengths = flat.reshape(-1, count)
        begins = (np.cumsum(flat) - flat).reshape(-1, count)
        good = (lengths > 0).all(1)
        drops = list(documents.drops)
        if not good.all():
            drops.append(Drops(documents.starts[~good], "empty sentence", True))
        lengths, begins = lengths[good], begins[good]
        kept = fitted(lengths, self.most)
        tokens, segments, offsets = self._laid_out(ids, begins, kept)
        sizes = [len(text.encode()) - (count - 1) for text in documents.texts]
        columns: dict[str, Array | Strings] = {
            "token": tokens,
            "segment": segments,
            "bytes": np.array(sizes, np.int64)[good],
        }
        if self.labelled:
            names = documents.kept[LABEL]
            columns["label"] = np.array([self.numbers[name] for name in names], np.int64)[good]
        lost = lengths - kept
        notes = {
            "records that were cut to max_tokens": int(lost.any(1).sum()),
            "tokens cut off": int(lost.sum()),
        }
        return Records(
            offsets,
            columns,
            documents.starts[good],
            drops,
            notes={note: number for note, number in notes.items() if number},
            ends_part=documents.ends_part,
            done=documents.done,
        )

    def probe(self, texts: Sequence[str]) -> Probe:
        """Return the ids of known texts, each as the one sentence of a record; see `make_probe`."""

        def encode(some: Sequence[str]) -> tuple[Array, Array]:
            ids, lengths = self.encoder(some)
            return surround(ids, lengths, [self.cls], [self.sep], self.dtype)

        return make_probe(encode, 1, 1, texts)

    def _laid_out(self, ids: Array, begins: Array, kept: Array) -> tuple[Array, Array, Array]:
        """Return (tokens, segments, offsets) of records.

        Args:
            ids: of all sentences, flat.
            begins: (n, sentences), where the ids of each begin.
            kept: (n, sentences), how many of them are taken.
        """
        count = kept.shape[1]
        # A run is a sentence and the [SEP] after it, the first one with the [CLS] before it.
        runs = kept + 1
        runs[:, 0] += 1
        ends = np.cumsum(runs.reshape(-1))
        total = int(ends[-1]) if len(ends) else 0
        offsets = np.concatenate([[0], ends[count - 1 :: count]]).astype(np.int64)
        tokens = np.full(total, self.sep, self.dtype)
        tokens[offsets[:-1]] = self.cls
        number = np.repeat(np.arange(runs.size), runs.reshape(-1))
        segments = (number % count).astype(np.uint8)
        sizes = kept.reshape(-1)
        tokens[ranges(ends - 1 - sizes, sizes)] = ids[ranges(begins.reshape(-1), sizes)]
        return tokens, segments, offsets


def fitted(lengths: Array, most: int) -> Array:
    """Return how many tokens of each sentence are kept, so that a record has `most` at most.

    The longer sentence loses its last token until they fit, of equal ones the second (Google's
    `run_classifier.py`). `lengths`: (n, 1) or (n, 2); `most` counts the special tokens too, 0: any.
    """
    if not most:
        return lengths.copy()
    room = most - 1 - lengths.shape[1]
    if lengths.shape[1] == 1:
        return np.minimum(lengths, room)
    first, second = lengths.T
    a = np.minimum(first, np.maximum(room - second, (room + 1) // 2))
    return np.stack([a, np.minimum(second, room - a)], 1)


MOST_CLASSES = 10_000
"""Largest number of classes of a label column."""


class TsvConfig(FolderOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of tables of sentences."""

    sentences: tuple[str, ...] = ()
    """One or two columns, by name or number from 1; by default those of GLUE, by the header."""
    label_column: str = ""
    """The column of the class, by name or number; by default that of GLUE, by the header."""
    labels: tuple[str, ...] = ()
    """The names of the classes, in the order of their numbers; by default those in the files,
    sorted (whole numbers by value)."""
    unlabelled: bool = False
    """Make no column `label` (for files without classes)."""
    header: bool = True
    """Whether the first line of each file names the columns."""
    max_tokens: int = 512
    """Largest number of tokens of a record, with special tokens; the longer sentence is cut first.
    0: no limit."""
    specials_in_text: Literal["plain", "special", "reject"] = "plain"
    """Meaning of `[SEP]` inside a sentence: ordinary text, the special token, a reject."""


class TsvSource(DocumentSource):
    """Tables of sentences; a text of `documents` is its sentences with a newline between them."""

    Config: ClassVar[type[msgspec.Struct]] = TsvConfig
    version: ClassVar[int] = 4
    """4: names of classes are sorted."""
    without_tokenizer = (
        "--tokenizer TOKENIZER; `tokmill tokenizer train FILE.tsv --field COLUMN --model wordpiece "
        "--vocab-size 8192 -o TOKENIZER` trains one"
    )
    suffixes = tuple(f".tsv{packed}" for packed in ("", *MAGIC))
    hints: ClassVar[dict[str, str]] = {
        "columns": "lines have other numbers of columns than the first one: is it a TSV file?",
        "missing label": "--unlabelled builds files without classes",
        "label": "--labels names all classes, once each",
        "empty sentence": "--sentence names the columns of the sentences",
    }
    config: TsvConfig

    def prepare(self) -> None:
        check(self.config)
        labels = self.vocabularies.get("label")
        self.classes = class_names(labels.data) if labels else list(self.config.labels)
        self._known = frozenset(self.classes)

    @classmethod
    def freeze(cls, config: Any, request: Request) -> dict[str, Frozen]:
        """Return the tokenizer, and the names of the classes as the vocabulary `label`."""
        check(config)
        frozen = super().freeze(config, request)
        for role in ("cls", "sep"):
            frozen["token"].vocabulary.role(role)
        if not config.unlabelled:
            names = config.labels or tuple(_classes_in(cls, config, request.inputs))
            frozen["label"] = vocabulary_of(names)
        return frozen

    @classmethod
    def to_predict(cls, made: Made, path: str, lines: int) -> Made:
        options = made.options | {"unlabelled": True, "label_column": "", "labels": []}
        if lines and (texts := 1 + first_line(path).count(b"\t")) != lines:
            raise UsageError(
                f"the first line has {human_count(texts, 'text')}, and a record of the run {lines}",
                where=path,
                hint="a line is a sentence, or of pairs two with a tab between them",
            )
        if lines:
            options |= {"header": False, "sentences": ["1", "2"][:lines]}
        return Made(source=made.source, options=options)

    @property
    def schema(self) -> Schema:
        """Tokens, the sentence of each, the bytes of the sentences, and each record's class."""
        schema = super().schema
        schema = {"token": schema.pop("token"), "segment": Column("u1"), **schema}
        if not self.config.unlabelled:
            schema["label"] = Column("u4", per="record", vocab="label")
        return schema

    def encoder(self, resources: Resources) -> EncodeSentences:
        assert self.frozen is not None
        return EncodeSentences(self.frozen, self.config, self.classes, resources)

    def documents(self, item: Item, digest: Hash) -> Iterator[Documents]:
        layout = layout_of(item, self.config)
        # The first line decides the meaning of the columns in all other lines.
        digest.update(layout.first)
        for block in record_blocks(item, b"\n", digest, self.resources.block_bytes):
            yield self._documents(block, layout)

    def _documents(self, block: Block, layout: Layout) -> Documents:
        texts: list[str] = []
        labels: list[str] = []
        starts: list[int] = []
        left: list[Drop] = [Drop(place, "too long", True) for place in block.too_long]
        place = block.start
        for line in io.BytesIO(block.data):
            start, place = place, place + len(line)
            if start == 0:
                line = line.removeprefix(BOM)
                if self.config.header:
                    continue
            if not line.strip():
                left.append(Drop(start, "blank line", False))
                continue
            try:
                cells = split_line(line)
            except UnicodeDecodeError:
                left.append(Drop(start, "utf8", True))
                continue
            reason = self._reason(cells, layout)
            if reason:
                left.append(Drop(start, reason, True))
                continue
            texts.append("\n".join(cells[number] for number in layout.sentences))
            labels.append(cells[layout.label] if layout.label is not None else "")
            starts.append(start)
        kept = {} if self.config.unlabelled else {LABEL: labels}
        drops: list[Drops] = drops_of(left)
        places: Array = np.array(starts, np.int64)
        return Documents(texts, places, drops, kept, block.ends_part, block.done)

    def _reason(self, cells: Sequence[str], layout: Layout) -> str:
        """Return why a line makes no record, "" where it does."""
        if len(cells) != layout.columns:
            return "columns"
        if any(not cells[number].strip() for number in layout.sentences):
            return "empty sentence"
        if layout.label is not None:
            name = cells[layout.label]
            if not name.strip():
                return "missing label"
            if self._known and name not in self._known:
                return "label"
        return ""


def check(config: TsvConfig) -> None:
    if len(config.sentences) > 2:
        raise UsageError(
            f"a record has one or two sentences, and {len(config.sentences)} columns are named",
            hint="--sentence A --sentence B",
        )
    least = 5 if len(config.sentences) != 1 else 3
    if config.max_tokens and config.max_tokens < least:
        raise UsageError(
            f"max_tokens: {config.max_tokens} leaves no room for a sentence",
            hint=f"--max-tokens {least} is the least, and 0 cuts nothing",
        )
    if len(set(config.labels)) < len(config.labels) or not all(config.labels):
        raise UsageError("labels: a class is named twice, or has no name", hint="name each once")
    if config.unlabelled and (config.label_column or config.labels):
        raise UsageError(
            "unlabelled makes no column of classes, and label_column or labels asks for one",
            hint="leave one of them out",
        )


def _classes_in(kind: type[TsvSource], config: TsvConfig, inputs: Sequence[str]) -> list[str]:
    """Return the names of the classes, sorted; numbers by value.

    So class 1 of MRPC is what GLUE calls 1, and the parts of a data set agree.
    """
    source = kind(config, inputs, {}, Resources(block_bytes=1 << 17))
    names: dict[str, None] = {}
    for item in source.items():
        for batch in source.documents(item, NoHash()):
            names.update(dict.fromkeys(batch.kept[LABEL]))
            if len(names) > MOST_CLASSES:
                raise UsageError(
                    f"the column of the label holds more than {MOST_CLASSES:,} names",
                    where=item.path,
                    hint="--label-column names another column; --unlabelled makes none",
                )
    if not names:
        raise TokmillError(
            "no line of the files has sentences and a label",
            where=", ".join(inputs),
            hint="--sentence and --label-column name the columns; --no-header: no line does",
        )
    numbers = all(re.fullmatch(r"0|[1-9][0-9]{0,8}", name) for name in names)
    return sorted(names, key=int) if numbers else sorted(names)
