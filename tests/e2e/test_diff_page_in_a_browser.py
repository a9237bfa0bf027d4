"""The page of a diff in a real browser: list, code, graphs, keys, both themes, narrow windows."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from browser import DARK, browse, ground, needs_chromium, violations
from diffed_programs import HOSTILE, two
from tokmill.x86.diff.output.diff_page import diff_page

pytestmark = needs_chromium
KEYS = """<script>
const said = [];
const press = (key, target = document.body) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const now = () => {
  const row = document.querySelector("#list [aria-current]");
  const shown = document.querySelector("#detail .graphs") ? "graph" : "instructions";
  const here = document.querySelector("tr.here");
  said.push(`${row ? row.dataset.row : "-"} ${shown} ${here ? here.className : ""}`.trim());
};
const search = document.getElementById("search");
for (const key of ["j", "j", "k", "n", "n", "n", "p", "g", "+", "i"]) { press(key); now(); }
press("/");
said.push(document.activeElement.id);
search.value = "0x4000";
search.dispatchEvent(new Event("input"));
said.push(document.getElementById("found").textContent);
press("Enter", search);
now();
press("Escape");
said.push(document.body.classList.contains("open"));
document.body.dataset.said = said.join("|");
</script>"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diff") / "page.html"
    diff_page(*two(), path)
    return path


def rows(dom: str, name: str) -> list[tuple[str, str]]:
    found = re.findall(
        rf'<tr class="{name}"><td[^>]*></td><td class="a">(.*?)</td><td class="b">(.*?)</td>', dom
    )
    return [(a, b) for a, b in found]


def test_list_and_code(made: Path, tmp_path: Path) -> None:
    dom = browse(made, tmp_path / "a", "--dump-dom", fragment="#0")
    assert dom.partition("<script")[0].count("data-row=") == 4
    assert "4 of 4 functions" in dom
    assert rows(dom, "changed") == [("mov eax,1", "mov eax,2")]
    assert rows(dom, "inserted") == [("", "xor eax,eax"), ("", "ret")]
    assert rows(dom, "deleted") == [("ret", "")]
    assert ("jne → 2", "jne → 2") in rows(dom, "same")
    # The name is there as text; nothing of it became an element.
    assert HOSTILE.partition(">")[0].replace("<", "&lt;") in dom
    assert "<img" not in dom.partition("<script")[0]


@pytest.mark.parametrize(
    ("width", "fragment", "row"), [(1280, "", "0"), (1280, "#2", "2"), (400, "", "")]
)
def test_what_changed_most_is_open(
    made: Path, tmp_path: Path, width: int, fragment: str, row: str
) -> None:
    # Narrow windows begin with the list.
    dom = browse(
        made, tmp_path / "a", "--dump-dom", f"--window-size={width},900", fragment=fragment
    )
    shown = dom.partition("<script")[0]
    assert re.findall(r'data-row="(\d)" aria-current', shown) == list(row)
    assert ("Choose a function" in shown) == (not row)


def test_a_string_is_escaped_once(tmp_path: Path) -> None:
    a, b, diff = two()
    ends = np.array([0, *[1] * len(a.block_address)])
    a = replace(a, strings=["%s\n"], string=np.array([0], "u4"), block_strings=ends)
    diff_page(a, b, diff, tmp_path / "page.html")
    dom = browse(tmp_path / "page.html", tmp_path / "a", "--dump-dom", fragment="#0")
    assert '<span class="literal">"%s\\n"</span>' in dom


def test_graphs(made: Path, tmp_path: Path) -> None:
    dom = browse(made, tmp_path / "a", "--dump-dom", fragment="#0-graph")
    shown = dom.partition("<script")[0]
    assert shown.count("<svg") == 2 and shown.count("data-block=") == 6
    assert len(re.findall(r'<g class="block changed', shown)) == 2
    assert len(re.findall(r'<g class="block (?:deleted|inserted)"', shown)) == 2
    assert len(re.findall(r'<path [^>]*class="(?:fall|branch)"', shown)) == 4
    assert shown.count(' entry" data-block="0"') == 2
    places = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)"', shown)
    assert len(set(places)) >= 3 and "NaN" not in shown


def test_keys(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(made.read_text().replace("</body>", KEYS + "</body>"))
    dom = browse(page, tmp_path / "a", "--dump-dom")
    found = re.search(r'data-said="([^"]*)"', dom)
    assert found and found[1].split("|") == [
        "0 instructions", "1 instructions", "0 instructions",
        *["0 instructions inserted here"] * 2, "0 instructions deleted here",
        "0 instructions inserted here",
        "0 graph", "0 graph", "0 instructions",
        "search", "1 of 4 functions", "2 instructions", "false",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1280, 400])
def test_both_themes_and_narrow_windows(made: Path, tmp_path: Path, width: int) -> None:
    for name, flags in (("light", []), ("dark", [DARK])):
        picture = tmp_path / f"{name}.png"
        browse(
            made, tmp_path / name, f"--screenshot={picture}", f"--window-size={width},900", *flags,
            fragment="#0",
        )  # fmt: skip
    assert ground(tmp_path / "light.png") > 230
    assert ground(tmp_path / "dark.png") < 60


@pytest.mark.parametrize("fragment", ["#0", "#0-graph"])
@pytest.mark.parametrize("flags", [[], [DARK, "--window-size=400,900"]], ids=["light", "dark"])
def test_contrast_labels_and_keys(
    made: Path, tmp_path: Path, fragment: str, flags: list[str]
) -> None:
    assert violations(made, tmp_path / "axe", *flags, fragment=fragment) == []
