"""The class `Tokenizer`: text ↔ ids, and the vocabulary of a store."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self, get_args

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, nearest
from tokmill.base.files import machine_errors, make_folder, write_file
from tokmill.store.vocab import Vocabulary, find_roles
from tokmill.text.encoding.encoders import TokenizersEncoder, make_encoder
from tokmill.text.tokenizers import tokenizer_files, tokenizer_json
from tokmill.text.tokenizers.patterns import resolve_pattern, segments

Specials = Literal["special", "plain"]


BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
BYTE_STEPS = (
    {"type": "Replace", "pattern": {"String": tokenizer_json.SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
"""Steps of decoders of models with byte fallback; the bytes of their tokens are known."""
KEYS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
"""Of an added token in a tokenizer_config.json."""
LONGEST_TEXT = 10**30
"""`model_max_length` in a tokenizer_config.json if texts may have any length."""


class Tokenizer:
    """A tokenizer, from any file format.

    Texts are encoded by the package `tokenizers`, one at a time. Builds encode many together, with
    the engines of `tokmill.text.encoding.encoders`, which give equal ids.
    """

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Iterable[tuple[bytes, bytes]],
        special_tokens: Iterable[str] | Mapping[str, int] | None = None,
        *,
        pattern: str = "gpt2",
    ) -> None:
        """Make a byte-level BPE tokenizer.

        Args:
            vocab: id → bytes.
            merges: pairs of tokens, first learned first.
            special_tokens: names, or names with their ids. A name that is in the vocabulary keeps
                its id; other names get the next free ids.
            pattern: how text is cut into words: a name or a regular expression.
        """
        vocab = dict(vocab)
        specials: dict[str, int] = {}
        if isinstance(special_tokens, Mapping):
            specials = dict(special_tokens)
            for token, number in specials.items():
                if vocab.setdefault(number, token.encode()) != token.encode():
                    raise UsageError(
                        f"the id {number} of {token!r} is {vocab[number]!r} already",
                        hint="each id stands for one token",
                    )
        else:
            numbers = {token: number for number, token in sorted(vocab.items(), reverse=True)}
            for token in special_tokens or ():
                number = numbers.setdefault(token.encode(), max(vocab, default=-1) + 1)
                vocab[number] = token.encode()
                specials[token] = number
        cut = resolve_pattern(pattern)
        data = tokenizer_json.byte_level(vocab, list(merges), specials, pattern=cut)
        self._set(data, "tokenizer")

    @classmethod
    def from_file(cls, path: Path | str) -> Self:
        """Read a tokenizer.json or its folder, or a vocab.txt (`tokenizer_files.read`)."""
        data, named = tokenizer_files.read(path)
        tokenizer = cls.from_data(data, str(path))
        tokenizer.named = named
        return tokenizer

    @classmethod
    def from_json(cls, raw: bytes | str, where: str = "tokenizer.json") -> Self:
        """Read the content of a tokenizer.json."""
        return cls.from_data(tokenizer_json.parse(raw, where), where)

    @classmethod
    def from_data(cls, data: dict[str, Any], where: str = "tokenizer.json") -> Self:
        """Take the parsed content of a tokenizer.json."""
        tokenizer = cls.__new__(cls)
        tokenizer._set(data, where)
        return tokenizer

    def _set(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where
        self._encoders: dict[str, TokenizersEncoder] = {}
        self.named: dict[str, str] = {}
        """Role → token, as a tokenizer_config.json beside the file says."""

    @cached_property
    def vocab(self) -> dict[int, bytes]:
        """Id → the bytes of the token, including added tokens, ordered by id."""
        return tokenizer_json.token_bytes(self.data)

    @cached_property
    def merges(self) -> list[tuple[bytes, bytes]]:
        """Merges as pairs of byte strings, first learned first; empty for models without."""
        kind = tokenizer_json.is_byte_level(self.data)
        spell = partial(tokenizer_json.spelling_bytes, byte_level=kind)
        return [(spell(a), spell(b)) for a, b in self.data["model"].get("merges") or []]

    def __repr__(self) -> str:
        return f"Tokenizer(size={self.size}, specials={[*self.specials]})"

    @cached_property
    def specials(self) -> dict[str, int]:
        """Special token → id, by id."""
        specials = tokenizer_json.added_tokens(self.data, special_only=True)
        return dict(sorted(specials.items(), key=lambda item: item[1]))

    @property
    def size(self) -> int:
        """Largest id + 1, including added tokens."""
        return max(self._spelled, default=-1) + 1

    def _encoder(self, specials: str) -> TokenizersEncoder:
        modes = get_args(Specials)
        if specials not in modes:
            raise UsageError(f"specials = {specials!r} is not known", hint=nearest(specials, modes))
        if specials not in self._encoders:
            encoder = make_encoder(
                self.to_json(), engine="tokenizers", specials_in_text=specials, threads=False
            )
            assert isinstance(encoder, TokenizersEncoder)
            if hasattr(model := encoder.tokenizer.model, "_resize_cache"):
                # Its entries outlive it: 50 KB for each run that is opened.
                model._resize_cache(0)
            self._encoders[specials] = encoder
        return self._encoders[specials]

    def encode(self, text: str, specials: Specials = "special") -> list[int]:
        """Return the ids of a text.

        Args:
            text: any text without lone surrogates.
            specials: with `special`, the name of a special token in the text becomes the token (of
                overlapping names the leftmost, then the longest); with `plain` it stays text.

        Raises:
            TokmillError: the tokenizer cannot be loaded, the text has a lone surrogate or a
                character without a token, or the pattern takes too long.
        """
        try:
            ids: list[int] = self._encoder(specials)([text])[0].tolist()
        except TokmillError as error:
            error.where = self.where if error.where == "tokenizer.json" else ""
            raise
        return ids

    def encode_iterable(
        self, chunks: Iterable[str], specials: Specials = "special"
    ) -> Iterator[int]:
        """Yield the ids of a text that arrives in parts (lines of a file), in constant memory.

        The ids are those of the whole text: words and special tokens may cross parts. If the
        pattern is not one of `patterns.PATTERNS`, or there is a normalizer, the whole text between
        two special tokens is held in memory; where a token depends on what stands beside it, the
        whole text.
        """
        tokens, places = self._encoder(specials).cuts
        for piece, is_token in segments(chunks, tokens, places):
            yield from [tokens[piece]] if is_token else self.encode(piece, specials)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises `TokmillError` for an id that the vocabulary does not have.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ids as they are, or the text that the file's decoder writes."""
        vocab = self.vocab
        numbers = [int(i) for i in ids]
        try:
            tokens = [vocab[number] for number in numbers]
        except KeyError as error:
            raise TokmillError(
                f"the vocabulary has no id {error.args[0]} (size {self.size})",
                where=self.where,
                hint="the ids are of another tokenizer",
            ) from None
        decoders = tokenizer_json.flatten(self.data.get("decoder"), "decoders")
        if not tokenizer_json.is_byte_level(self.data) and not (
            self.data["model"].get("byte_fallback") and all(step in BYTE_STEPS for step in decoders)
        ):
            spelled = [self._spelled[number] for number in numbers]
            # `tokenizers` writes spaces between the tokens of a file without a decoder.
            text = self._decoder.decode(spelled) if decoders else " ".join(spelled)
            return str(text).encode()
        raw = b"".join(tokens)
        if any(step.get("type") == "Strip" and step.get("start") == 1 for step in decoders):
            raw = raw.removeprefix(b" ")
        return raw

    @cached_property
    def _spelled(self) -> dict[int, str]:
        return tokenizer_json.spelled_tokens(self.data)

    @cached_property
    def _decoder(self) -> Any:
        library = plugins.require("tokenizers")
        empty = json.loads(library.Tokenizer(library.models.BPE()).to_str())
        bare = {**empty, "decoder": self.data["decoder"]}
        try:
            return library.Tokenizer.from_str(json.dumps(bare)).decoder
        except Exception as error:
            raise TokmillError(
                f"the decoder cannot be loaded: {error}",
                where=self.where,
                hint="is it written by a newer version of tokenizers?",
            ) from None

    def to_json(self) -> bytes:
        """Return the canonical tokenizer.json: equal tokenizers give equal bytes."""
        return tokenizer_json.canonical(self.data)

    def vocabulary(
        self, role_overrides: Mapping[str, str] | None = None
    ) -> tuple[Vocabulary, bytes]:
        """Return the record of this vocabulary for a store, and the content of its file.

        Args:
            role_overrides: role → token; they replace roles that follow from names.
        """
        raw = self.to_json()
        roles = find_roles(
            tokenizer_json.added_tokens(self.data),
            {**self.named, **(role_overrides or {})},
            where=self.where,
        )
        digest = hashlib.sha256(raw).hexdigest()
        return Vocabulary(file="tokenizer.json", sha256=digest, size=self.size, roles=roles), raw

    def save(
        self, path: Path | str, roles: Mapping[str, int] | None = None, *, segments: bool = False
    ) -> Path:
        """Write tokenizer.json and the files that `transformers.AutoTokenizer` needs beside it.

        Args:
            path: the file, or a folder for `tokenizer.json`.
            roles: role → id; None: from the names of special tokens.
            segments: whether the model reads the segment of each token, which transformers' object
                is then asked to give.

        Returns:
            The path of the tokenizer.json.

        Raises:
            UsageError: files of another program have the names of the files beside it.
        """
        path = Path(path)
        if path.is_dir() or not path.suffix:
            path = path / "tokenizer.json"
        check_sibling_files(path)
        make_folder(path.parent)
        *rest, (_, data) = self.files(roles, segments=segments).items()
        # `check_sibling_files` knows by the first one what a killed writer has left.
        for name, content in reversed(rest):
            write_file(path.with_name(name), content)
        return write_file(path, data)

    def files(
        self, roles: Mapping[str, int] | None = None, *, segments: bool = False
    ) -> dict[str, bytes]:
        """Return name → content of the files that `save` writes; tokenizer.json comes last."""
        names = {role: key for key, role in tokenizer_files.NAMED.items()}
        tokens = {number: token for token, number in self.specials.items()}
        roles = find_roles(self.specials, self.named) if roles is None else roles
        named = {names[role]: tokens[number] for role, number in roles.items() if number in tokens}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": LONGEST_TEXT,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                str(token["id"]): {key: token.get(key, False) for key in KEYS}
                for token in self.data.get("added_tokens") or []
            },
            **named,
        }
        if segments:
            config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        return {
            "special_tokens_map.json": _json(named),
            "tokenizer_config.json": _json(config),
            "tokenizer.json": self.to_json(),
        }


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()


def check_sibling_files(path: Path) -> None:
    """Refuse to replace files beside a tokenizer.json that tokmill did not write.

    tokmill's files are recognised by `model_max_length` of tokenizer_config.json: transformers
    writes 1e30 as a float, which is another number.
    """
    config, named = (path.with_name(name) for name in BESIDE)
    there = [file for file in (config, named) if file.exists()]
    if not there:
        return
    with machine_errors("read", config):
        data = config.read_bytes() if config.is_file() else b""
    try:
        is_ours = json.loads(data or b"{}").get("model_max_length") == LONGEST_TEXT
    except (ValueError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise UsageError(
            "the file is not one of tokmill, and would be replaced",
            where=str(there[0]),
            hint="choose a new folder, as files that belong to a tokenizer are written beside it",
        )
