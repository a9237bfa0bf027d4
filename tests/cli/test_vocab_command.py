"""`tokmill vocab`, as a user runs it."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tokmill.x86.tokens.vocabularies.vocabulary import closed, read_vocabularies, write_vocabularies
from x86_programs import C_SOURCE, compiles

Here = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiles(tmp_path_factory.mktemp("programs"), "small", C_SOURCE, "-O1")


def test_vocabularies_of_programs(here: Here, program: Path) -> None:
    first, _ = here(
        "vocab", "build", "x86", program, "-o", "v", "--rules", "semanticbbv", "--workers", 0
    )
    assert "1 program, " in first and "rules semanticbbv" in first
    made = read_vocabularies("v", "semanticbbv")
    sums = {column: sum(tokens.counts or ()) for column, tokens in made.items()}
    assert f"{sums['mne']:,} instructions" in first and sums["mne"] == sums["eflag"]
    assert 0 < sums["mne"] < sums["asm"] == sums["reg"] == sums["type"] == sums["rw"]
    again, _ = here("vocab", "build", "x86", program, "-o", "w", "--min-count", 1000, "--json",
                    "--workers", 0, "-q")  # fmt: skip
    facts = json.loads(again)
    assert facts["columns"]["mne"] < 10
    kept = sum(read_vocabularies("w", "tokmill")["asm"].counts or ())
    counted = facts["counted"]["asm"]
    assert counted["tokens"] - counted["unknown"] == kept and counted["unknown"] > kept


def test_refused_programs_are_told(here: Here, program: Path) -> None:
    Path("text").write_text("no program")
    shown, _ = here("vocab", "build", "x86", program, "text", "-o", "v", "--workers", 0, code=1)
    assert "text: refused, " in shown
    shown, _ = here("vocab", "instructions", program, "text", "-o", "i.csv", "--workers", 0, code=1)
    assert "text: refused, " in shown


def test_export_and_import(here: Here) -> None:
    write_vocabularies(Path("v"), closed())
    shown, _ = here("vocab", "export", "v", "-o", "t")
    assert shown.splitlines()[0] == "t/asm_tokens.txt"
    assert Path("t/rw_tokens.txt").read_text().startswith("[PAD]\n[SEP]\n[CLS]\n[UNK]\n[MASK]\n-\n")
    shown, _ = here("vocab", "import", "t", "--rules", "tokmill", "-o", "w")
    assert shown.count("five special tokens first") == shown.count("kept") == 6
    assert Path("w/asm.json").read_bytes() == Path("v/asm.json").read_bytes()
    assert not Path("w/ids.json").exists()
    facts = json.loads(here("vocab", "export", "w", "-o", "u", "--json")[0])
    assert len(facts["files"]) == 6
    _, said = here("vocab", "export", "v", "--format", "pkl", "-o", "p", code=1)
    assert "asm has no counts" in said


def test_import_of_older_lists(here: Here) -> None:
    Path("asm_tokens.txt").write_text("[PAD]\nB\nA\n")
    shown, said = here("vocab", "import", "asm_tokens.txt", "-o", "v")
    assert "[PAD] alone first" in shown and "renumbered" in shown
    assert "mne, type, reg, rw, eflag: no list" in said
    assert json.loads(Path("v/ids.json").read_text()) == {"asm": [0, 6, 5]}
    made = json.loads(Path("v/asm.json").read_text())
    here("vocab", "import", "v/asm.json", "-o", "v")
    assert not Path("v/ids.json").exists()
    assert made["rules"] == "semanticbbv" and made["tokens"][5:] == ["A", "B"]
    Path("rw_tokens_dict.pkl").write_bytes(pickle.dumps({"READ": 3}))
    found = json.loads(here("vocab", "import", "rw_tokens_dict.pkl", "-o", "w", "--json")[0])
    assert found["lists"][0]["ids"] == "none there" and found["map"] is None
    Path("words.txt").write_text("READ\n")
    here("vocab", "import", "words.txt", "--column", "rw", "-o", "x")
    assert json.loads(Path("x/rw.json").read_text())["column"] == "rw"


@pytest.mark.parametrize(
    "lines",
    [
        ["[PAD]", "mov", "dword [rax+0x10]", "add", "dword [rbx+0x20]", "[UNK]", "xor"],
        ["[PAD]", "[SEP]", "[CLS]", "[UNK]", "[MASK]", "mov", "0x1", "mov", "0x2", "add"],
    ],
)
def test_maps_begin_with_the_ids_of_the_file(here: Here, lines: list[str]) -> None:
    """`[PAD]` alone in front, and a repeated line: the list is arranged anew, then mapped."""
    Path("old").mkdir()
    Path("old/asm_tokens.txt").write_text("\n".join(lines) + "\n")
    here("vocab", "compress", "old", "-o", "small")
    became = json.loads(Path("small/tokens.json").read_text())["asm"]
    new = json.loads(Path("small/asm.json").read_text())["tokens"]
    ids = json.loads(Path("small/ids.json").read_text())["asm"]
    assert [new[number] for number in ids] == [became.get(token, token) for token in lines]


def test_instructions_of_chosen_files(here: Here, program: Path) -> None:
    for name in ("x/a.elf", "x/a.old"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(program, name)
    chosen = ("x", "--suffix", ".elf", "--workers", 0)
    shown, _ = here("vocab", "instructions", *chosen, "-o", "i.csv")
    head, *lines = Path("i.csv").read_text().splitlines()
    assert head == "text,bytes,code,bits,count,programs" and f"{len(lines):,} distinct" in shown
    assert "left out" in shown
    found = json.loads(here("vocab", "instructions", *chosen, "-o", "j.csv", "--json")[0])
    assert found["programs"] == 1 and sum(found["left_out"].values()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "error", "hint"),
    [
        ("build text a.txt -o v", 2, "vocabularies of 'text'", "tokenizer train"),
        ("build x86 -o v", 2, "no program is named", "vocab build x86 INPUT"),
        ("build x86 none -o v", 1, "none: there is no such file", "check the path"),
        ("export none -o v", 1, "none: there is no such folder", "check the path"),
        ("export . --format foo -o v", 2, "no format is called 'foo'", "pkl, txt"),
        ("export . -o v", 1, ".: the folder holds no x86 vocabulary", "COLUMN_tokens.txt"),
        ("import . --column asm -o v", 2, "names the column of one file", "asm mne"),
        ("import one.txt -o v", 1, "one.txt: there is no such file", "check the path"),
        ("instructions a -o i.txt", 2, "written as CSV", "-o NAME.csv"),
    ],
)
def test_what_cannot_be_done(here: Here, arguments: str, code: int, error: str, hint: str) -> None:
    shown, said = here("vocab", *arguments.split(), code=code)
    assert not shown
    first, _, second = said.partition("\nhint:")
    assert error in first and hint in second


def test_two_lists_of_one_column(here: Here) -> None:
    for folder in ("a", "b"):
        write_vocabularies(Path(folder), closed())
    _, said = here("vocab", "import", "a", "b", "-o", "w", code=2)
    assert "two lists of asm" in said and "name one of them" in said


@pytest.mark.parametrize(
    "command",
    [
        ("vocab", "build", "x86", "-o", "out"), ("vocab", "instructions", "-o", "out/i.csv"),
        ("cfg", "-o", "out"),
        ("build", "x86", "-o", "out"),
    ],
)  # fmt: skip
def test_a_list_is_as_if_its_files_were_named(
    here: Here, program: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    names = ("one", "of two", "three")
    (tmp_path / "in/deep").mkdir(parents=True)
    for name in names:
        (tmp_path / "in/deep" / name).write_bytes(program.read_bytes() + name.encode())
    Path("in/list").write_text("# two of three\ndeep/one\n\ndeep/of two\n")
    rest = ("--workers", 0, "-q")
    found = []
    for inputs in (("--files-from", "in/list"), [f"in/deep/{name}" for name in names[:2]]):
        here(*command, *inputs, *rest)
        found.append({
            path.relative_to("out"): path.read_bytes()
            for path in sorted(Path("out").rglob("*"))
            if path.is_file() and path.parent.name != "cache" and path.name != "events.jsonl"
        })  # fmt: skip
        shutil.rmtree("out")
    assert found[0] == found[1] and found[0]
    Path("in/list").write_text("deep/one\ndeep/four\n")
    _, error = here(*command, "--files-from", "in/list", *rest, code=1)
    assert "in/list, line 2: there is no such file or folder: in/deep/four" in error
    assert "in/list" not in here(*command, *rest, code=2)[1]
