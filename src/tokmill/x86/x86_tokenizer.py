"""Encode programs and bytes as ids, and decode them, in memory: like `build x86`, without a
store."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self, get_args

import numpy as np

from tokmill.base.errors import UsageError, check_name, nearest
from tokmill.base.files import machine_errors, read_file
from tokmill.store.schema import PHRASE_BIT, Array, Phrases, Strings
from tokmill.store.store import Store
from tokmill.x86.graphs.lifting import graphs_of_path
from tokmill.x86.image.program import Key
from tokmill.x86.program_source import vocabularies_of
from tokmill.x86.records import Cutting, Unit, records_of
from tokmill.x86.tokens.rules import COLUMNS, decode
from tokmill.x86.tokens.templates import Templates
from tokmill.x86.tokens.vocabularies.vocabulary import (
    SPECIALS,
    TokenList,
    Vocabularies,
    closed,
    read_vocabularies,
)
from tokmill.x86.walks import Walking

PREFIXES = ("LOCK", "REP", "REPNE", "NOTRACK")
"""Tokens of `asm` that come before a mnemonic."""
ALL = 1 << 62


class Encoded(NamedTuple):
    """A function, a block or a walk as ids."""

    function: str
    """Raw symbol name, or `sub_401000`."""
    address: int
    """Address of the function or block, or of a walk's first block."""
    columns: dict[str, Array]
    """The six streams and `border` (bit 0: an instruction begins, bit 1: a block), one value for
    each token."""


class X86Tokenizer:
    """Programs and machine code to the ids of six columns, and ids back to text."""

    def __init__(
        self,
        vocab: Path | str | Store | Vocabularies | None = None,
        rules: str | None = None,
        *,
        separator: bool = False,
    ) -> None:
        """Choose rules and vocabularies.

        Args:
            vocab: a folder of vocabularies, a store or its path, or column → list; None: the
                closed ones of the rules `tokmill`.
            rules: `tokmill` or `semanticbbv`; None: those that the lists name, `semanticbbv` if
                they name none, and `tokmill` without vocabularies.
            separator: whether each instruction ends with a `[SEP]`, in all columns.

        Raises:
            UsageError: the rules are not known, or have no closed vocabularies.
            TokmillError: a vocabulary is missing, damaged or for other rules.
        """
        if isinstance(vocab, Store):
            vocab = vocab.path
        if isinstance(vocab, dict):
            given = vocab
        elif vocab is not None and rules is None:
            given = read_vocabularies(vocab)
        else:
            given = vocabularies_of(rules or "tokmill", "" if vocab is None else str(vocab))
        self.rules, self.separator = rules or next(iter(given.values())).rules, separator
        self.columns = COLUMNS
        self.vocabularies: Vocabularies = given
        """Column → its list of tokens."""
        self._templates: dict[int, Templates] = {}

    def templates(self, bits: int = 64) -> Templates:
        """Return the cache of instructions of 64-bit or 32-bit code."""
        if bits not in self._templates:
            self._templates[bits] = Templates(self.rules, bits, self.vocabularies, self.separator)
        return self._templates[bits]

    def encode_program(
        self,
        path: Path | str,
        unit: Unit = "function",
        *,
        walking: Walking | None = None,
        min_tokens: int = 100,
    ) -> Iterator[Encoded]:
        """Yield the functions, basic blocks or random walks of a program, as `build x86` would.

        Args:
            path: an ELF or PE file for x86, a graph of `tokmill cfg`, or a pickle of BinaryCorp.
            unit: function, block or walk: what is yielded one by one.
            walking: options of walks; None: those of a build without options.
            min_tokens: fewest tokens of a walk; shorter ones are left out.

        Raises:
            TokmillError: the file is none of these.
            UsageError: `unit` is not known.
        """
        check_name("no unit is", unit, get_args(Unit))
        cutting = Cutting(unit, ALL, min_tokens, walking)
        for graph in graphs_of_path(path):
            key = Key("", graph.program, "", "", "")
            for batch in records_of(graph, key, self.templates(graph.bits), cutting):
                assert batch.phrases is not None
                columns = {name: batch.phrases.expanded(name) for name in (*self.columns, "border")}
                names = batch.columns["function"]
                assert isinstance(names, Strings)
                addresses = np.asarray(batch.columns["address"]).tolist()
                for row, (name, address) in enumerate(zip(names.decoded(), addresses, strict=True)):
                    tokens = slice(*batch.offsets[row : row + 2].tolist())
                    yield Encoded(
                        name,
                        address,
                        {column: ids[tokens] for column, ids in columns.items()},
                    )

    def encode_bytes(self, code: bytes, address: int = 0, bits: int = 64) -> dict[str, Array]:
        """Return column → ids of the instructions in some bytes.

        The address is for error messages only. Raises `DecodeError` for bytes that are not
        instructions, `TypeError` for text.
        """
        sizes = [len(instruction) for instruction in decode(code, address, bits)]
        templates = self.templates(bits)
        lengths = np.array(sizes, np.uint8)
        ids = templates.numbers(np.frombuffer(bytes(code), np.uint8), lengths)
        table = templates.table()
        if len(ids):
            ids[0] |= PHRASE_BIT
        ends = np.array([0, len(ids)])
        phrases = Phrases(ids, ends, table.offsets, table.columns)
        return {column: phrases.expanded(column) for column in (*self.columns, "border")}

    def decode(self, columns: Mapping[str, Array] | Iterable[int] | Array) -> list[str]:
        """Return each instruction as text: its tokens of `asm`, special ones too.

        Args:
            columns: column → ids, of which `asm` and, if present, `border` are read; or the ids of
                `asm`. Without borders an instruction begins at a mnemonic or its prefix, and after
                a `[SEP]`.

        Raises:
            UsageError: there are no ids of `asm`, or one is out of range.
        """
        border = None
        if isinstance(columns, Mapping):
            if "asm" not in columns:
                raise UsageError("there are no ids of `asm`", hint=nearest("asm", columns))
            border, columns = columns.get("border"), columns["asm"]
        tokens = tokens_of(self.vocabularies["asm"], columns)
        begins = instruction_begins(tokens) if border is None else np.asarray(border) & 1 > 0
        places = [*np.flatnonzero(begins).tolist(), len(tokens)]
        if tokens and places[0]:
            places.insert(0, 0)
        return [" ".join(tokens[a:b]) for a, b in zip(places, places[1:], strict=False)]


class X86Coder:
    """Encodes machine code as ids of x86 columns, and decodes ids as text, for sampling."""

    def __init__(self, lists: Vocabularies) -> None:
        self.columns = list(lists)
        rules = next(iter(lists.values())).rules
        # The other columns are not returned, so their tokens may be unknown.
        none = {column: TokenList.of(column, rules, ()) for column in COLUMNS}
        self.tokenizer = X86Tokenizer(none | lists, rules)

    @classmethod
    def from_files(cls, files: Mapping[str, Path]) -> Self:
        """Read frozen lists, column → file; raises `TokmillError` for a file that is not one."""
        lists = {}
        for column, path in files.items():
            with machine_errors("read", path):
                lists[column] = TokenList.from_json(read_file(path), str(path))
        return cls(lists)

    def encode(self, text: str) -> dict[str, list[int]]:
        """Return column → ids of 64-bit instructions in hexadecimal.

        Raises `UsageError` for other text, `DecodeError` if the bytes are not instructions.
        """
        try:
            code = bytes.fromhex(text)
        except ValueError:
            raise UsageError(
                "this is not machine code in hexadecimal", hint="such as: 55 48 89 e5"
            ) from None
        ids = self.tokenizer.encode_bytes(code)
        return {column: ids[column].tolist() for column in self.columns}

    def decode(self, ids: Mapping[str, Sequence[int]]) -> str:
        """Return the `asm` of instructions, each on a new line; without it, all tokens."""
        if "asm" in ids:
            return "".join(f"\n{line}" for line in self.tokenizer.decode(ids["asm"]))
        lists = self.tokenizer.vocabularies
        return "".join(
            f"\n{column}: {' '.join(tokens_of(lists[column], ids[column]))}" for column in ids
        )


def tokens_of(tokens: TokenList, ids: Iterable[int] | Array) -> list[str]:
    """Return the tokens of some ids; raises `UsageError` for an id out of range."""
    numbers = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(tokens):
        wrong = int(numbers[(numbers < 0) | (numbers >= len(tokens))][0])
        raise UsageError(
            f"{wrong} is not an id of {tokens.column}, whose ids are 0 to {len(tokens) - 1}",
            hint="name ids of this column's vocabulary",
        )
    return [tokens.tokens[number] for number in numbers.tolist()]


def instruction_begins(tokens: Sequence[str]) -> Array:
    """Return (n,) bool: where an instruction begins, judged by the tokens of `asm` alone."""
    openers = {*closed()["mne"].tokens[len(SPECIALS) :], *PREFIXES}
    begins = np.zeros(len(tokens), bool)
    before = "[SEP]"
    for place, token in enumerate(tokens):
        begins[place] = before == "[SEP]" or (token in openers and before not in PREFIXES)
        before = token
    return begins
