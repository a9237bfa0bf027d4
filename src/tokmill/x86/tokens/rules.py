"""Instructions to tokens: the protocol of rules, and public functions for a few instructions.

A set of rules turns an instruction into six streams. `asm` and `reg` have an entry a token, `type`
and `rw` have runs, `mne` and `eflag` one string for all tokens. For many instructions use
`tokmill.x86.tokens.templates`, which gives equal tokens.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Protocol, TypedDict

from tokmill import plugins
from tokmill.base.errors import TokmillError, UsageError, check_name

if TYPE_CHECKING:
    from iced_x86 import Instruction

COLUMNS = ("asm", "mne", "type", "reg", "rw", "eflag")
"""The six streams, in the order in which they are written."""
ONCE = ("mne", "eflag")
"""Those with one token an instruction."""

Runs = list[tuple[str, int]]


class DecodeError(TokmillError):
    """Bytes that are not an instruction, or an instruction that the rules cannot handle."""


class Tokens(TypedDict):
    """The six streams of one instruction of n tokens."""

    asm: list[str]
    """(n): the mnemonic and the parts of the operands."""
    mne: str
    """Name of the `Mnemonic`."""
    type: Runs
    """Kind of the token's operand; the runs sum to n."""
    reg: list[str]
    """(n): the register that a token names."""
    rw: Runs
    """Whether the operand is read or written; the runs sum to n."""
    eflag: str
    """Flags that the instruction reads and changes."""


class Rules(Protocol):
    """How an instruction becomes tokens.

    Tokens may depend on the bytes of the instruction but not on its address, and on numbers in it
    (`tokmill.x86.tokens.canonical`) only through their class.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    """Raised when the tokens of any instruction change."""
    bits: int
    """64 or 32."""

    def __init__(self, bits: int = 64) -> None: ...

    def tokens(self, instruction: "Instruction") -> Tokens:
        """Return the tokens of a decoded instruction."""
        ...


def make_rules(name: str, bits: int = 64) -> Rules:
    """Return a set of rules by its name.

    Raises `UsageError` for an unknown name and for other `bits` than 64 and 32.
    """
    if bits not in (64, 32):
        raise UsageError(f"code of {bits} bits is not known", hint="bits=64 or bits=32")
    check_name("no rules are", name, plugins.RULES)
    return plugins.load(plugins.RULES, name)(bits)


def decode(code: bytes, address: int, bits: int) -> Iterator["Instruction"]:
    """Yield the instructions in some bytes, which follow one another.

    Raises `DecodeError`, with address and bytes, for an invalid instruction; `TypeError` for text,
    `ValueError` for an impossible address.
    """
    try:
        code = bytes(memoryview(code))
    except TypeError:
        raise TypeError(
            f"machine code is bytes, not {type(code).__name__}: bytes.fromhex makes them of text"
        ) from None
    if not 0 <= address < 1 << 64:
        raise ValueError(f"the address {address} is not from 0 to 2**64 - 1")
    for instruction in plugins.require("iced_x86").Decoder(bits, code, ip=address):
        if not instruction:
            place = instruction.ip - address
            raise not_decoded(code[place : place + 15], instruction.ip, bits)
        yield instruction


def not_decoded(code: bytes, address: int, bits: int) -> DecodeError:
    return DecodeError(
        f"no instruction of {bits}-bit code: {code.hex(' ') or 'no bytes'}",
        where=f"{address:#x}",
        hint=f"the bytes are data, are cut off, or are {96 - bits}-bit code",
    )


def tokenize_binary_instruction(
    instruction_bytes: bytes, address: int, rules: str = "tokmill", bits: int = 64
) -> Tokens:
    """Return the six streams of exactly one instruction.

    Args:
        instruction_bytes: one instruction, all of it and nothing else.
        address: its address, for error messages only; tokens do not depend on it.
        rules: `tokmill` or `semanticbbv`; docs/x86-tokens.md has both.
        bits: 64 or 32.

    Raises:
        DecodeError: the bytes are not exactly one instruction.
        TypeError: text was given instead of bytes.
        ValueError: the address is not from 0 to 2**64 - 1.
    """
    tokens = tokenize_bytes(instruction_bytes, address, rules, bits)
    if not tokens:
        raise not_decoded(b"", address, bits)
    if len(tokens) > 1:
        raise DecodeError(
            f"{len(tokens)} instructions, not one: {instruction_bytes.hex(' ')}",
            where=f"{address:#x}",
            hint="tokenize_bytes takes several",
        )
    return tokens[0]


def tokenize_bytes(
    code: bytes,
    address: int,
    rules: str = "tokmill",
    bits: int = 64,
) -> list[Tokens]:
    """Return the six streams of each instruction in some bytes.

    Args:
        code, address, rules, bits: as for `tokenize_binary_instruction`, but for any number of
            instructions.

    Raises:
        DecodeError, TypeError, ValueError: as in `tokenize_binary_instruction`.
        UsageError: the rules are not known.
    """
    maker = make_rules(rules, bits)
    return [maker.tokens(instruction) for instruction in decode(code, address, bits)]


def align(tokens: Tokens) -> dict[str, list[str]]:
    """Return lists of equal length: runs written out, `mne` and `eflag` on every token."""
    count = len(tokens["asm"])
    return {
        "asm": tokens["asm"],
        "mne": [tokens["mne"]] * count,
        "type": expand(tokens["type"]),
        "reg": tokens["reg"],
        "rw": expand(tokens["rw"]),
        "eflag": [tokens["eflag"]] * count,
    }


def expand(runs: Runs) -> list[str]:
    """Return runs written out: [("READ", 2)] → ["READ", "READ"]."""
    return [name for name, count in runs for _ in range(count)]
