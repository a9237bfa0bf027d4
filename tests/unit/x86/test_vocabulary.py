"""Lists of tokens: closed, counted, frozen."""

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tokmill.base.errors import TokmillError
from tokmill.x86.tokens.rules import COLUMNS
from tokmill.x86.tokens.tokmill_rules import TokmillRules
from tokmill.x86.tokens.vocabularies.vocabulary import SPECIALS, TokenList, closed, counted

FROZEN = {
    "asm": "32f4193051e4c1aa433b0b1c4674c934677c90fb84a425a2bb737a937a535772",
    "mne": "4d40b1fac89794817b83460859b7036038a59e3d89cfecbf1f4d59e4d4d9a40c",
    "type": "959df8695103e4d0ce5492cb73baa734b3fd20d775031627a331d17a317b9aee",
    "reg": "bf10dd2310cc23d16b4eaed5bc90f7428b96c9ca8be4da6f1e7d4b9bc857a28b",
    "rw": "3601e58643bc5bbb7185fac63cd6ca99544aa187969218ebbdbd11af4e0b1b1a",
    "eflag": "f5e17e992d619e22f246d3c59dadbcf5608e47010dceb4fefe4fee995ceb6970",
}


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    path = repository / "scripts/closed_tokens.py"
    spec = importlib.util.spec_from_file_location("closed_tokens", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_closed_lists_are_frozen() -> None:
    """Other ids are another version of the rules: raise it, and then change the digests."""
    assert TokmillRules.version == 1
    assert {name: closed()[name].vocabulary()[0].sha256 for name in COLUMNS} == FROZEN


def test_closed_lists_are_those_of_the_enumerations(script: ModuleType) -> None:
    found = script.closed_tokens()
    assert list(found) == list(COLUMNS)
    for name, tokens in found.items():
        assert closed()[name].tokens == [*SPECIALS, *tokens]


def test_documented_sizes(repository: Path) -> None:
    page = (repository / "docs/x86-tokens.md").read_text("utf-8")
    for name, tokens in closed().items():
        assert f"| `{name}` | {len(tokens)} |" in page


def test_frozen_record() -> None:
    tokens = TokenList.of("rw", "tokmill", ["READ"])
    record, raw = tokens.vocabulary()
    assert record.file == "rw.json" and record.size == 6
    assert record.roles == {"pad": 0, "sep": 1, "cls": 2, "unk": 3, "mask": 4}
    assert record.sha256 == hashlib.sha256(raw).hexdigest()
    back = TokenList.from_json(raw)
    assert (back.column, back.rules, back.tokens, back.counts) == (
        "rw",
        "tokmill",
        tokens.tokens,
        None,
    )
    assert back.to_json() == raw


def test_counted() -> None:
    counts = {"asm": {"B": 3, "A": 1, "[PAD]": 7, "C": 1}, "rw": {"READ": 4}}
    made = counted(counts, "semanticbbv")
    assert list(made) == list(COLUMNS)
    assert made["asm"].tokens == [*SPECIALS, "A", "B", "C"]
    assert made["asm"].counts == [7, 0, 0, 0, 0, 1, 3, 1]
    assert made["rw"].tokens == [*SPECIALS, "READ"]
    assert made["mne"].tokens == list(SPECIALS)
    rare = counted(counts, "semanticbbv", min_count=2)
    assert rare["asm"].tokens == [*SPECIALS, "B"] and rare["asm"].counts == [7, 0, 0, 0, 0, 3]
    assert TokenList.from_json(made["asm"].to_json()).counts == made["asm"].counts


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": ["a", *SPECIALS]},
        {"tokens": [*SPECIALS, "a", "a"]},
        {"tokens": [*SPECIALS, 5]},
        {"tokens": "abc"},
        {"column": "text"},
        {"rules": 1},
        {"counts": [1]},
        {"tokens": None},
    ],
)
def test_other_files_are_refused(change: dict[str, object]) -> None:
    good = {"column": "asm", "rules": "tokmill", "tokens": [*SPECIALS, "a"]}
    TokenList.from_json(json.dumps(good).encode())
    with pytest.raises(TokmillError, match="not a vocabulary of an x86 column") as caught:
        TokenList.from_json(json.dumps(good | change).encode(), "asm.json")
    assert caught.value.where == "asm.json" and caught.value.hint
