"""Each byte of each file of a finished store: a flipped one is seen by `validate`, and mended."""

from pathlib import Path

import pytest

import tokmill
from crash_stores import contents, write_jsonl, write_tokenizer
from making import remove_damaged
from tokmill.base.errors import TokmillError
from tokmill.builds.build import How
from tokmill.builds.plan import Amount
from tokmill.store.checks.validate import validate
from tokmill.store.store import Store

DATA = (".safetensors", "tokenizer.json")
"""Files that one sha256 covers: of these the short run tries some bytes."""


def tiny(folder: Path) -> Path:
    write_jsonl(folder / "in" / "a.jsonl", 150)
    write_jsonl(folder / "in" / "b.jsonl", 150)
    write_tokenizer(folder / "tokenizer.json", 260)
    return build(folder)


def build(folder: Path) -> Path:
    how = How(quiet=True, amount=Amount(workers=0))
    tokenizer = folder / "tokenizer.json"
    return tokmill.build("jsonl", folder / "in", folder / "s", tokenizer=tokenizer, how=how).path


NO_PART = (".lock", "events.jsonl")


def is_seen(store: Path) -> bool:
    try:
        return not validate(Store(store)).ok
    except TokmillError:
        return True


def missed(store: Path, step: int, data_step: int, flips: int = 1) -> tuple[list[str], int]:
    """Flip bits of each file, one at a time; return what was not seen, and how many were tried.

    The steps are in bytes; `data_step` is that of files that one sha256 covers.
    """
    unseen, tried = [], 0
    for path in sorted(store.rglob("*")):
        # What is in `cache` may be lost: a stamp that does not fit has its file looked at.
        if not path.is_file() or path.name in NO_PART or path.parent.name == "cache":
            continue
        whole = path.read_bytes()
        for place in range(0, len(whole), data_step if path.name.endswith(DATA) else step):
            for nth in range(flips):
                hurt = bytearray(whole)
                hurt[place] ^= 1 << (place + 3 * nth) % 8
                path.write_bytes(hurt)
                tried += 1
                if not is_seen(store):
                    unseen.append(f"{path.name}, byte {place}, {hurt[place]:#x}")
        path.write_bytes(whole)
    return unseen, tried


def test_a_flip_of_any_byte_is_seen(fast_path: Path) -> None:
    unseen, tried = missed(tiny(fast_path), step=3, data_step=101)
    assert not unseen
    assert tried > 1700


@pytest.mark.long
def test_two_flips_of_every_byte_are_seen(fast_path: Path) -> None:
    assert missed(tiny(fast_path), step=1, data_step=1, flips=2)[0] == []


def test_a_flip_is_mended_wherever_it_is(fast_path: Path) -> None:
    """One in every 700 bytes: the same build makes the files what they were."""
    store = tiny(fast_path)
    before = contents(store)
    for path in sorted(store.rglob("*")):
        if not path.is_file() or path.name in NO_PART:
            continue
        whole = path.read_bytes()
        for place in range(0, len(whole), 3000 if path.name.endswith(DATA) else 700):
            hurt = bytearray(whole)
            hurt[place] ^= 1 << place % 8
            path.write_bytes(hurt)
            remove_damaged(store)
            build(fast_path)
            assert contents(store) == before, f"{path.name}, byte {place}"
