"""What `inspect` says of programs, their graphs, and vocabularies."""

from pathlib import Path

import pytest

from tokmill.report.describe.inspect import describe
from tokmill.x86.commands.vocab_lists import write_lists
from tokmill.x86.graphs.graph_files import write_graph
from tokmill.x86.graphs.recorded_blocks import Recorded
from tokmill.x86.tokens.rules import COLUMNS
from tokmill.x86.tokens.vocabularies.vocabulary import counted, write_vocabularies
from x86_programs import C_SOURCE, compiles


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    made = counted({column: {"a": 3, "b": 1} for column in COLUMNS}, "semanticbbv")
    write_vocabularies(tmp_path / "v", made)
    write_lists(tmp_path / "t", made)
    return tmp_path / "v"


def test_a_program_says_which_command_takes_it(tmp_path: Path) -> None:
    program = compiles(tmp_path, "p", C_SOURCE)
    facts = describe(program)
    assert facts["what"] == "an ELF program or library"
    assert facts["next"] == f"tokmill build x86 {program} -o STORE"


def test_a_program_that_will_be_refused_says_why(tmp_path: Path) -> None:
    head = bytearray(b"\x7fELF\x02\x01\x01" + bytes(57))
    head[18] = 183
    for name, data, why in (
        ("arm", head, "an ELF file for AArch64 (x86-64 and 32-bit x86 are read)"),
        ("cut", head[:10], "the ELF header is cut off (is the file complete?)"),
    ):
        (tmp_path / name).write_bytes(data)
        facts = describe(tmp_path / name)
        assert facts["problem"] == f"a build will refuse it: {why}" and "next" not in facts


def test_a_graph(tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.add("f", 0x1000, [(0x1000, b"\x55\xff\xe0", [])])
    write_graph(recorded.graph("one"), tmp_path / "g.parquet", lifter="by hand")
    facts = describe(tmp_path / "g.parquet")
    assert (facts["kind"], facts["what"]) == ("graph", "the control flow of one, 64-bit code")
    assert (facts["functions"], facts["blocks"], facts["instructions"]) == (1, 1, 2)
    assert facts["lifter"] == "by hand" and facts["not_followed"] == {"indirect jump": 1}


def test_a_list_of_tokens(vocabulary: Path) -> None:
    facts = describe(vocabulary / "reg.json")
    assert facts["what"] == "the vocabulary of the column reg of x86 code"
    assert (facts["rules"], facts["tokens"], facts["occurrences"]) == ("semanticbbv", 7, 4)
    assert facts["first"][-2:] == ["a", "b"]
    (vocabulary / "reg.json").write_text('{"column": "reg", "rules": "tokmill", "tokens": ["a"]}')
    assert "not a vocabulary of an x86 column" in describe(vocabulary / "reg.json")["problem"]


@pytest.mark.parametrize(
    ("form", "found", "occurrences"),
    [("v", "frozen", 4), ("t", "five special tokens first", "not counted")],
)
def test_a_folder_of_lists(vocabulary: Path, form: str, found: str, occurrences: int | str) -> None:
    facts = describe(vocabulary.parent / form)
    assert facts["kind"] == "vocabulary" and [row["column"] for row in facts["lists"]] == [*COLUMNS]
    assert {(row["found"], row["occurrences"]) for row in facts["lists"]} == {(found, occurrences)}


def test_a_folder_of_damaged_lists(vocabulary: Path) -> None:
    (vocabulary / "asm.json").write_text("{}")
    assert "asm.json: not a vocabulary" in describe(vocabulary)["problem"]
