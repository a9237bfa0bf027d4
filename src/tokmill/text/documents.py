"""Common parts of all text sources: read documents, then encode them as records of tokens."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import place_of
from tokmill.builds.finish import hint
from tokmill.builds.scan import Fits, InputFile, Inputs, find_files
from tokmill.builds.source import Frozen, Hash, Item, Request, Resources, Source, cut
from tokmill.store.checks.probe import Probe, make_probe
from tokmill.store.manifest import Made
from tokmill.store.schema import RESERVED, Array, Column, Records, Schema, Strings, id_dtype
from tokmill.text.encoding.encoders import make_encoder, utf8_buffer
from tokmill.text.make_document import Documents, TextOptions, select
from tokmill.text.record_blocks import EXPANDS, is_stream
from tokmill.text.tokenizers.tokenizer_json import added_tokens, beside_model, template_tokens


class Encoder(ABC):
    """Turns a batch of documents into records, with a tokenizer's engine."""

    def __init__(self, frozen: Frozen, specials_in_text: str, resources: Resources) -> None:
        mode = "special" if specials_in_text == "special" else "plain"
        self.encoder = make_encoder(
            frozen.data, engine=resources.engine, specials_in_text=mode, threads=resources.threads
        )
        self.engine = self.encoder.name
        """`gigatoken` or `tokenizers`."""
        reject = specials_in_text == "reject"
        data = beside_model(frozen.data) if reject else {}
        self.specials = tuple(added_tokens(data, special_only=True))
        self.dtype = np.dtype(id_dtype(frozen.vocabulary.size)).newbyteorder("<")

    def without_specials(self, documents: Documents) -> Documents:
        """Reject the documents with a name of a special token, where these are to be rejected."""
        if not self.specials:
            return documents
        has = [any(name in text for name in self.specials) for text in documents.texts]
        reasons = ["special token" if one else "" for one in has]
        return select(documents, reasons, rejected=True)

    @abstractmethod
    def __call__(self, documents: Documents) -> Records:
        """Return the records of a batch of documents."""

    @abstractmethod
    def probe(self, texts: Sequence[str]) -> Probe:
        """Return the ids of known texts; see `make_probe`."""


class DocumentSource(Source):
    """A source whose records are documents of text."""

    Config: ClassVar[type[msgspec.Struct]] = TextOptions
    version: ClassVar[int] = 3
    """2: fields are not stripped by default. 3: no model makes special tokens of plain text."""
    without_tokenizer: ClassVar[str] = (
        "--tokenizer tokenizer.json, or --vocab-size 8192 to train one on the input"
    )
    """Hint where no tokenizer was named."""
    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of the files that are read in folders; none: all that `fits` accepts."""
    is_bounded = False
    reads_addresses = True

    @property
    def frozen(self) -> Frozen | None:
        """The tokenizer; None where documents are read alone."""
        return self.vocabularies.get("token")

    @classmethod
    def freeze(cls, config: msgspec.Struct, request: Request) -> dict[str, Frozen]:
        if request.tokenizer is None:
            raise UsageError("no tokenizer was named", hint=cls.without_tokenizer)
        from tokmill.text.tokenizers.tokenizer import Tokenizer

        vocabulary, data = Tokenizer.from_file(request.tokenizer).vocabulary(request.roles)
        return {"token": Frozen(vocabulary, data)}

    @classmethod
    def to_predict(cls, made: Made, path: str, lines: int) -> Made:
        if not lines or not issubclass(cls.Config, TextOptions):
            return super().to_predict(made, path, lines)
        shared = (*TextOptions.__struct_fields__, "strip")
        options = {key: value for key, value in made.options.items() if key in shared}
        return Made(source="text", options={**options, "record": "line"})

    @property
    def schema(self) -> Schema:
        """Tokens, the UTF-8 bytes of each document, and the kept fields."""
        assert self.frozen is not None
        schema: Schema = {
            "token": Column(id_dtype(self.frozen.vocabulary.size), vocab="token"),
            "bytes": Column("u4", per="record"),
        }
        for name in getattr(self.config, "keep", ()):
            column = column_name(name)
            if column in schema:
                raise UsageError(
                    f"two fields to keep would be the column {column!r}",
                    hint="leave one of them out of --keep",
                )
            schema[column] = Column("utf8", per="record")
        return schema

    def fits(self) -> Fits | None:
        """Return the function that checks files in folders; None: only the suffix is checked."""
        return None

    def find(self) -> Inputs:
        return find_files(self.inputs, self.suffixes, self.fits(), self.config)

    def items(self) -> Iterator[Item]:
        """Yield the files, cut into items of 64 MiB if that is possible."""
        files = self.find()
        self.left_out = files.left_out
        for file in files.files:
            yield from self.cut(file)

    def cut(self, file: InputFile) -> Iterator[Item]:
        """Yield the items of one file; a compressed one is one item."""
        path = place_of(file.path)
        if is_stream(path):
            yield Item(file.name, path, 0, file.size, file.digest, expands=EXPANDS)
        else:
            yield from cut(file)

    @abstractmethod
    def documents(self, item: Item, digest: Hash) -> Iterator[Documents]:
        """Yield an item's documents, prepared."""

    def content(self, item: Item, digest: Hash) -> Iterator[None]:
        for batch in self.documents(item, digest):
            if batch.ends_part:
                yield

    def encoder(self, resources: Resources) -> Encoder:
        assert self.frozen is not None
        return Encode(self.frozen, self.config, resources)

    def probe(self, texts: Sequence[str]) -> Probe:
        """Return the ids that the engine gives known texts; see `make_probe`."""
        return self._encoder.probe(texts)

    @cached_property
    def _encoder(self) -> Encoder:
        return self.encoder(self.resources)

    def read(self, item: Item, digest: Hash) -> Iterator[Records]:
        yield from map(self._encoder, self.documents(item, digest))


def column_name(field: str) -> str:
    name = "".join(c if c.isalnum() else "_" for c in field) or "_"
    taken = name in RESERVED or name in ("token", "bytes")
    return name if name.isidentifier() and not taken else f"field_{name}"


class Encode(Encoder):
    """Encodes documents as records, with the eot token and the handling of special tokens."""

    def __init__(self, frozen: Frozen, config: TextOptions, resources: Resources) -> None:
        super().__init__(frozen, config.specials_in_text, resources)
        prefix, suffix = template_tokens(beside_model(frozen.data))
        no_end = config.end_of_record == "eot" and "eot" not in frozen.vocabulary.roles
        if (prefix or suffix) and config.template == "refuse":
            raise TokmillError(
                f"the tokenizer puts tokens around every text ({len(prefix)} before, "
                f"{len(suffix)} after)",
                where=frozen.vocabulary.file,
                hint="--template add writes them into the store, --template none leaves them out"
                + "; and with --end-of-record none, as it has no `eot` token" * no_end,
            )
        self.prefix = prefix if config.template == "add" else []
        self.suffix = list(suffix) if config.template == "add" else []
        if config.end_of_record == "eot":
            if no_end:
                raise TokmillError(
                    "documents are to end with the `eot` token, but the tokenizer has none",
                    where=frozen.vocabulary.file,
                    hint="--end-of-record none, or name it: --role 'eot=<token>'",
                )
            eot = frozen.vocabulary.roles["eot"]
            if self.suffix[-1:] != [eot]:
                self.suffix.append(eot)

    def __call__(self, documents: Documents) -> Records:
        documents = self.without_specials(documents)
        data, places = utf8_buffer(documents.texts)
        ids, offsets = self._ids(data, places)
        columns: dict[str, Array | Strings] = {"token": ids, "bytes": np.diff(places)}
        for name, values in documents.kept.items():
            columns[column_name(name)] = Strings.of(values)
        return Records(
            offsets,
            columns,
            documents.starts,
            documents.drops,
            ends_part=documents.ends_part,
            done=documents.done,
        )

    def probe(self, texts: Sequence[str]) -> Probe:
        """Return the ids of known texts, with what stands around each; see `make_probe`."""

        def encode(some: Sequence[str]) -> tuple[Array, Array]:
            return self._ids(*utf8_buffer(some))

        return make_probe(encode, len(self.prefix), len(self.suffix), texts)

    def _ids(self, data: Array, places: Array) -> tuple[Array, Array]:
        ids, lengths = self.encoder.encode_utf8(data, places)
        return surround(ids, lengths, self.prefix, self.suffix, self.dtype)


def surround(
    ids: Array, lengths: Array, prefix: Sequence[int], suffix: Sequence[int], dtype: Any
) -> tuple[Array, Array]:
    """Return (ids, offsets) with `prefix` before and `suffix` after each run of ids."""
    n, extra = len(lengths), len(prefix) + len(suffix)
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(lengths + extra, out=offsets[1:])
    if not extra:
        return ids.astype(dtype), offsets
    result = np.empty(int(offsets[-1]), dtype)
    inner = np.ones(len(result), bool)
    for place, value in enumerate(prefix):
        result[offsets[:-1] + place] = value
        inner[offsets[:-1] + place] = False
    for place, value in enumerate(reversed(suffix)):
        result[offsets[1:] - 1 - place] = value
        inner[offsets[1:] - 1 - place] = False
    result[inner] = ids
    return result, offsets


class NoHash:
    """A digest that does nothing."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Ignore the content."""


def iter_documents(
    inputs: Sequence[str], kind: str, options: Mapping[str, Any] | None = None
) -> Iterator[list[str]]:
    """Yield the documents that a build of this kind would read, in batches of texts.

    Raises `TokmillError` with the reasons and a hint if all of them were left out.
    """
    source_kind = plugins.load(plugins.SOURCES, kind)
    config = recipe.convert(source_kind.Config, dict(options or {}), f"options of {kind}")
    source: DocumentSource = source_kind(config, list(inputs), {}, Resources())
    any_text, paths = False, []
    why = Counter[str]()
    for item in source.items():
        paths.append(item.path)
        for documents in source.documents(item, NoHash()):
            any_text = any_text or len(documents.texts) > 0
            for drops in documents.drops if not any_text else ():
                why[drops.reason] += len(drops.offsets)
            yield list(documents.texts)
    if why and not any_text:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in why.items())
        raise TokmillError(
            f"not one document was found ({counts})",
            where=", ".join(inputs),
            hint=hint(source_kind, config, list(dict.fromkeys(paths))[:4], why),
        )
