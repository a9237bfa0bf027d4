"""`tokmill diff`: exit codes, what it says and writes, programs and graphs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import tokmill
from diff_sources import NEW, OLD
from x86_programs import compiles, stripped

Here = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    compiles(folder, "old", OLD, "-O1")
    compiles(folder, "new", NEW, "-O1")
    stripped(folder / "old"), stripped(folder / "new")
    return folder


def test_what_changed_is_told_and_is_the_exit_code(here: Here, built: Path, tmp_path: Path) -> None:
    out, _ = here("diff", built / "old", built / "new", "-o", "diff.json", code=1)
    assert "2 changed, without a partner 1 of old, 0 of new; " in out
    table = out[out.index("changed most") :].splitlines()[3:5]
    assert {line.split()[0] for line in table} == {"twice", "kept"}
    assert "no partner in new (removed or inlined): gone" in out and out.endswith(
        "diff.json: written\n"
    )
    written = json.loads((tmp_path / "diff.json").read_text())
    from_python = tokmill.diff(built / "old", str(built / "new"))
    assert msgspec.to_builtins(from_python) == written
    assert "changed=2" in repr(from_python) and "deleted=1" in repr(from_python)
    assert "twice" in from_python._repr_html_() and "main" not in from_python._repr_html_()
    assert (written["format"], written["version"]) == ("tokmill.diff", 2)
    assert {one["name_a"]: one["similarity"] == 1 for one in written["matched"]}["main"]
    assert [one["name"] for one in written["deleted"]] == ["gone"]
    report = json.loads(
        here("diff", built / "old", built / "new", "--html", "page.html", "--json", code=1)[0]
    )
    page = (tmp_path / "page.html").read_text()
    assert "<html" in page and "1 no partner (removed or inlined)" in page
    assert not report["same"] and not report["same_bytes"]
    assert (report["counts"]["changed"], report["counts"]["deleted"]) == (2, 1)
    assert {one["name"] for one in report["changed_most"]} == {"twice", "kept"}


def test_programs_and_functions_of_other_names(here: Here, built: Path, tmp_path: Path) -> None:
    for name, version in (("old", "1.0"), ("new", "1.1")):
        (tmp_path / version).mkdir()
        shutil.copy(built / name, tmp_path / version / "tool")
    tools = tmp_path / "1.0" / "tool", tmp_path / "1.1" / "tool"
    out, _ = here("diff", *tools, "-o", "made/x.json", "--html", "page.html", code=1)
    assert out.startswith("old: 1.0/tool, 64 bits, ") and "\nnew: 1.1/tool, " in out
    assert "<title>1.0/tool → 1.1/tool</title>" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "made" / "x.json").exists()
    _, said = here("diff", *tools, "-o", "x.BinDiff", code=2)
    assert "diff writes JSON" in said and not (tmp_path / "x.BinDiff").exists()


def test_renamed_functions_long_names_and_almost_the_same(here: Here, tmp_path: Path) -> None:
    # A symbol that is renamed, mangled and longer than a line; one constant changed in it.
    code = """int sum(int *x, int n) {{
        int s = 0; for (int i = 0; i < n; i++) s += x[i] * {}; return s; }}
    int main(int n, char **v) {{ int x[9] = {{n}}; {} return sum(x, n); }}"""
    many = 'if (n > 3) __builtin_puts("words"); x[n % 9] += n * 77;' * 400
    symbol = f"_ZN{20}{'n' * 20}{40}{'f' * 40}EPii"
    for name, factor, other in (("old", 3, "before"), ("new", 5, symbol)):
        compiles(tmp_path, name, code.format(factor, many), "-O1", f"-Dsum={other}")
    out, _ = here("diff", "old", "new", code=1)
    assert "; similarity >99.9%" in out
    line = out[out.index("changed most") :].splitlines()[3]
    assert line.startswith(f"before → {'n' * 20}::{'f' * 25}…  ")
    report = json.loads(here("diff", "old", "new", "--json", code=1)[0])
    assert report["counts"]["similarity"] < 1
    assert report["changed_most"][0]["name"] == f"before → {symbol}"


def test_the_same_program_is_exit_code_0(here: Here, built: Path) -> None:
    out, _ = here("diff", built / "old", built / "old")
    assert ", 0 changed, without a partner 0 of old, 0 of new; similarity 100.0%" in out
    # Without its symbols the code is the same, and other bytes are not.
    out, _ = here("diff", built / "old", built / "old-stripped")
    assert "no function differs; the files differ in other bytes" in out


def test_graphs_are_compared_as_programs_are(here: Here, built: Path) -> None:
    for name in ("old-stripped", "new-stripped"):
        here("cfg", built / name, "-o", f"{name}.parquet", "-q")
    graphs, _ = here("diff", "old-stripped.parquet", "new-stripped.parquet", "--json", code=1)
    programs, _ = here("diff", built / "old-stripped", built / "new-stripped", "--json", code=1)
    assert graphs == programs
    out, _ = here("diff", built / "old-stripped", "old-stripped.parquet", "--json")
    assert json.loads(out)["same_bytes"]


def test_what_cannot_be_compared_is_exit_code_2(here: Here, built: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    (tmp_path / "folder").mkdir()
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and no more")
    for other, words in (
        ("text", "not a program"),
        ("nothing", "there is no such file"),
        ("folder", "this is a folder"),
        ("damaged.parquet", "the graph cannot be read"),
    ):
        _, said = here("diff", built / "old", other, code=2)
        assert words in said and "\nhint: " in said


def test_a_name_cannot_forge_a_line(here: Here, built: Path, tmp_path: Path) -> None:
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
        shutil.copy(built / side, tmp_path / side / "a\nerror: forged")
    out, _ = here(
        "diff", tmp_path / "old/a\nerror: forged", tmp_path / "new/a\nerror: forged", code=1
    )
    assert "a\\nerror: forged, 64 bits" in out and "\nerror:" not in out


def test_outputs_replace_nothing_that_is_read(here: Here, built: Path, tmp_path: Path) -> None:
    for name in ("old", "new"):
        shutil.copy(built / name, tmp_path / name)
    before = (tmp_path / "old").read_bytes()
    for option in ("-o", "--html"):
        _, said = here("diff", "old", "new", option, tmp_path / "old", code=2)
        assert "would replace what is read" in said and "hint:" in said
    _, said = here("diff", "old", "new", "-o", "x", "--html", "./x", code=2)
    assert "--out and --html name the same file" in said
    assert (tmp_path / "old").read_bytes() == before
