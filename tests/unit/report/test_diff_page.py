"""The page of a diff: what its data says, and that nothing of a program is markup in it."""

import html.parser
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffed_programs import RET, XOR, two
from tokmill.x86.diff.output.diff_code import LONGEST_NAME, marks, shown
from tokmill.x86.diff.output.diff_page import (
    CHANGED,
    DELETED,
    INSERTED,
    REFERENCES,
    SAME,
    diff_page,
)
from tokmill.x86.diff.program_diff import diff_graphs
from tokmill.x86.diff.result import References
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.lift.cfg import lift
from x86_graphs import Block, graph_of


class Page(html.parser.HTMLParser):
    """The tags of a page, its data and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data = self.text = ""
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = tag + dict(attrs).get("id", "") if tag == "script" else tag  # type: ignore[operator]
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("src", "href") or (value or "").startswith("#")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "scriptdata":
            self.data += data
        else:
            self.text += data


def made(tmp_path: Path, **options: Any) -> tuple[Page, dict[str, Any]]:
    diff_page(*two(), tmp_path / "page.html", **options)
    page = Page((tmp_path / "page.html").read_text())
    return page, json.loads(page.data)


def test_programs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    page, data = made(tmp_path, called=("1.0/tool", "1.1/tool"))
    assert data["programs"] == ["1.0/tool", "1.1/tool"]
    assert "1.0/tool → 1.1/tool" in page.text and page.text.count("1.1/tool") == 3


def test_rows_and_code(tmp_path: Path) -> None:
    page, data = made(tmp_path)
    assert [row[0] for row in data["rows"]] == [CHANGED, DELETED, INSERTED, SAME]
    changed, gone, new, same = data["rows"]
    assert changed[2:] == ["1000", "main", "1000", 0.999, 0.5, "constants", 6, 7, [], 0]
    assert (gone[1], gone[3], new[1], new[3]) == ("gone", "", "", "new")
    a, b = data["code"][changed[-1]]
    # Address, instructions, marks, partner, edges, strings.
    assert a[0] == ["1000", ["push rbp", "mov eax,1", "jne → 2"], "=~=", 0, [[1, 0], [2, 2]], []]
    assert b[0][1:3] == [["push rbp", "xor eax,eax", "mov eax,2", "jne → 2"], "=!~="]
    # Block 1 has no partner on either side; block 2 is the same.
    assert [block[2:4] for block in a[1:]] == [["!", -1], ["", 2]]
    assert [block[2:4] for block in b[1:]] == [["!", -1], ["", 2]]
    assert data["code"][same[-1]][1] == []
    assert data["code"][gone[-1]] == [[["3000", ["ret"], "", -1, [], []]], []]
    assert data["code"][new[-1]][0] == []
    assert "1 changed" in page.text and "places <b> that could not be followed" in page.text


def test_other_references_are_marked(tmp_path: Path) -> None:
    """The same instructions in both, one of which refers to something else."""
    a, _, _ = two()
    diff = diff_graphs(a, a)
    diff.similarity[0], diff.block_similarity[0], diff.references_only[0] = 0.99, 0.99, True
    at, zero = np.array([0x1001], np.uint64), np.zeros(1, np.int64)
    diff.references = References(zero, zero, at, at, ["</script>old"], ["new"])
    diff_page(a, a, diff, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    data = json.loads(page.data)
    first = data["rows"][0]
    assert first[0] == REFERENCES and first[-2] == ["</script>old → new"]
    one, other = (side[0] for side in data["code"][first[-1]])
    assert one[1] == ["push rbp", "mov eax,1  ; </script>old", "jne → 2"] and one[2] == "=~="
    assert other[1][1] == "mov eax,1  ; new" and other[2] == "=~="
    assert "1 same except for references" in page.text


def test_nothing_of_a_program_is_markup(tmp_path: Path) -> None:
    page, data = made(tmp_path)
    assert "img" not in page.tags and "b" not in page.tags
    assert page.tags.count("script") == 2 and page.tags.count("title") == 1
    name = data["rows"][0][1]
    assert name.startswith("</script><img") and "\\u202e\\x1b[31m\\u2028" in name
    raw = (tmp_path / "page.html").read_text()
    assert "<img" not in raw and "\u202e" not in raw and "\x1b" not in raw
    assert "default-src 'none'" in raw and "http://www.w3.org/2000/svg" in raw
    assert raw.count("http") == 2  # The policy and the name of SVG.


def test_code_that_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    page, data = made(tmp_path, most=400)
    assert [row[-1] for row in data["rows"]] == [0, 1, 2, -1]
    assert len(data["code"]) == 3
    assert "The code of 1 function is not on this page" in " ".join(page.text.split())
    _, data = made(tmp_path, most=1)
    assert data["code"] == [] and all(row[-1] == -1 for row in data["rows"])


def test_the_same_diff_makes_the_same_page(tmp_path: Path) -> None:
    for name in ("one", "other"):
        diff_page(*two(), tmp_path / name / "page.html")
    assert (tmp_path / "one/page.html").read_bytes() == (tmp_path / "other/page.html").read_bytes()


def test_two_programs_without_functions(tmp_path: Path) -> None:
    empty = graph_of({}, [])
    a, _, diff = two()
    none = np.zeros(0, np.int64)
    for name in diff.__dataclass_fields__:
        if name not in ("left_out", "references", "other"):
            setattr(diff, name, none)
    diff.match_blocks = np.zeros(1, np.int64)
    diff_page(empty, empty, diff, tmp_path / "page.html")


def test_calls_are_compared_by_what_they_lead_to(tmp_path: Path) -> None:
    """A call of a function that moved is the same call; of another function it is a change."""

    def program(first: int, second: int, to: int, name: str) -> Graph:
        call = b"\xe8" + (to - 0x1005).to_bytes(4, "little", signed=True)
        return graph_of({
            0x1000: [Block(0x1000, [call], [(Edge.CALL, to)])],
            first: [Block(first, [RET])], second: [Block(second, [XOR, RET])],
        }, ["main", "one", "two"], name)  # fmt: skip

    a = program(0x2000, 0x3000, 0x2000, "a")
    diff = two()[2]
    diff.function_a = diff.function_b = np.arange(3)
    diff.references_only = np.zeros(3, bool)
    diff.similarity, diff.confidence = np.array([0.5, 1, 1], "f4"), np.ones(3, "f4")
    diff.reason, diff.block_reason = np.zeros(3, "u1"), np.zeros(3, "u1")
    diff.match_blocks, diff.block_a = np.arange(4), np.arange(3)
    diff.block_b, diff.block_similarity = np.arange(3), np.array([0.5, 1, 1], "f4")
    diff.deleted = diff.inserted = np.zeros(0, np.int64)
    for to, expected in ((0x2800, ""), (0x3800, "~")):
        b = program(0x2800, 0x3800, to, "b")
        diff_page(a, b, diff, tmp_path / "page.html")
        data = json.loads(Page((tmp_path / "page.html").read_text()).data)
        block = data["code"][0][1][0]
        assert block[1] == ["call one" if to == 0x2800 else "call two"]
        assert block[2] == expected
    # The name of an import may be any text.
    b.import_address, b.import_name = np.asarray([to], np.uint64), ["x block y"]
    diff_page(a, b, diff, tmp_path / "page.html")
    data = json.loads(Page((tmp_path / "page.html").read_text()).data)
    assert data["code"][0][1][0][1:3] == [["call x block y"], "~"]


def test_a_block_that_jumps_and_runs_into_another_function(tmp_path: Path) -> None:
    """`f` runs into `g`, or into `h`."""
    parts = {
        "f": "xor %eax, %eax\n1: add %edi, %eax\ndec %edi\njne 1b",
        "g": "lea 3(%rdi,%rdi,4), %rax\nxor $99, %rax\nret",
        "h": "mov (%rsi), %rax\nadd 8(%rsi), %rax\nret",
    }
    graphs = []
    for order in ("fgh", "fhg"):
        text = [".globl _start\n_start: call f\ncall g\ncall h\nud2"]
        text += [
            f".globl {n}\n.type {n}, @function\n{n}: {parts[n]}\n.size {n}, .-{n}" for n in order
        ]
        (tmp_path / f"{order}.s").write_text("\n".join([*text, ""]))
        command = ["gcc", "-nostdlib", "-static", "-o", order, f"{order}.s"]
        subprocess.run(command, cwd=tmp_path, check=True)
        graphs.append(lift(tmp_path / order))
    diff_page(*graphs, diff_graphs(*graphs), tmp_path / "page.html")
    found = json.loads(Page((tmp_path / "page.html").read_text()).data)
    lines = [line for code in found["code"] for block in code[0] for line in block[1]]
    assert any(line.startswith("jne") for line in lines)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (["push x"], ["push x"], ("", "")),
        (["push x", "mov 1"], ["push x", "mov 2"], ("=~", "=~")),
        (["push x"], [], ("!", "")),
        (["push x", "call a", "ret"], ["push x", "ret"], ("=!=", "==")),
        (["mov 1", "add 2"], ["add 3", "mov 1"], ("=!", "!=")),
        (["mov 1", "add 2"], ["sub 1", "add 3", "xor 1"], ("!~", "!~!")),
    ],
)
def test_marks(a: list[str], b: list[str], expected: tuple[str, str]) -> None:
    found = marks(a, b)
    assert found == expected
    # What is not alone has its counterpart in the same order.
    assert found[0].replace("!", "") == found[1].replace("!", "")


def test_long_and_odd_names() -> None:
    assert shown("x" * 1000, LONGEST_NAME) == "x" * (LONGEST_NAME - 1) + "…"
    assert shown("a\nb\tc\udc80", 20) == "a\\nb\\tc\\x80"
    assert len(shown("\x1b" * 1000, LONGEST_NAME)) <= LONGEST_NAME
