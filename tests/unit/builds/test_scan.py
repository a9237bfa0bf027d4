"""The files of inputs: each is read or counted, by whatever name, in whatever kind of source."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from making import TOKENIZER, jsonl, quick_build
from tokmill.base.errors import MachineError, TokmillError, UsageError
from tokmill.builds.plan import BuildRecipe, How, prepare
from tokmill.builds.scan import FolderOptions, find_files, in_words, with_lists
from tokmill.store.manifest import CHOICE
from tokmill.store.receipts import read_planned
from tokmill.store.store import Store

TXT = (".txt",)


def names(*inputs: Path, suffixes: tuple[str, ...] = TXT, **choice: Any) -> list[str]:
    """The names of the files found."""
    options = FolderOptions(**choice)
    return [file.name for file in find_files(list(map(str, inputs)), suffixes, None, options).files]


def put(root: Path, *files: str) -> Path:
    """Write small files that hold their own names."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_files_are_found_named_and_ordered(tmp_path: Path) -> None:
    put(tmp_path, "b/2.txt", "a/x/1.txt", "c.txt", "c.md", ".hidden/3.txt", "b/.4.txt", "D.TXT")
    assert names(tmp_path) == ["D.TXT", "a/x/1.txt", "b/2.txt", "c.txt"]
    # A file that is named is taken whatever its suffix.
    assert names(tmp_path / "c.md") == ["c.md"]
    # One that is named twice is read once.
    assert names(tmp_path, tmp_path / "c.txt") == ["D.TXT", "a/x/1.txt", "b/2.txt", "c.txt"]
    with pytest.raises(TokmillError, match="no such file"):
        names(tmp_path / "nothing")
    with pytest.raises(TokmillError, match=r"holds no \.csv or \.tsv file"):
        names(tmp_path, suffixes=(".csv", ".tsv"))
    for nothing in ((), ("",), (tmp_path, "")):
        with pytest.raises(UsageError, match="no input"):
            names(*nothing)
    with pytest.raises(UsageError, match="an input has no name"):
        quick_build("select", [""], tmp_path / "store")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokmillError, match="the folder is empty"):
        names(tmp_path / "empty")


def test_everything_that_is_not_read_is_counted(tmp_path: Path) -> None:
    root = put(
        tmp_path / "in", "a.txt", "b.md", "c.MD", "Makefile", ".env", ".git/x.txt", "d/e.txt",
        "d/_temporary/0/f.txt", "d/__magic_job-1/f.txt", "t/_delta_log/0.txt",
        "t/metadata/v1.metadata.json", ".hoodie/x.txt",
    )  # fmt: skip
    (root / "gone").symlink_to(root / "nowhere")
    (root / "one").symlink_to(root / "two")
    (root / "two").symlink_to(root / "one")
    (root / "round").symlink_to(root)
    (root / "0.txt").symlink_to(root / "a.txt")
    os.mkfifo(root / "pipe")
    store = quick_build("text", root / "a.txt", root / "store").path
    found = find_files([str(root)], TXT)
    assert [file.name for file in found.files] == ["0.txt", "a.txt", "d/e.txt"]
    assert found.left_out == {
        ".md": 2, "loop of links": 2, "dangling link": 1, "hidden file": 1,
        "hidden folder": 3, "link to a folder": 1, "no suffix": 1, "pipe, socket or device": 1,
        "store": 1, "log of a table": 3,
    }  # fmt: skip
    told = in_words(found.left_out)
    for part in ("2 .md", "1 without a suffix", "2 loops of links", "3 logs of tables", "1 store"):
        assert part in told
    shutil.rmtree(store)


LOOKALIKES = {
    "plan.json": '{"steps": ["a", "b"], "format": 1}',
    "manifest.json": '{"name": "app"}',
    "metrics.jsonl": '{"text": "a metric"}',
    "recipe.json": '{"eggs": 2}',
    ".lock": "",
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_folder_that_holds_a_file_of_such_a_name_is_read(name: str, tmp_path: Path) -> None:
    """Records of a third of the input were lost so."""
    for part in ("a", "b"):
        (tmp_path / "in" / part).mkdir(parents=True)
        jsonl(tmp_path / f"in/{part}/x.jsonl", [{"text": f"{part} {i}"} for i in range(10)])
    (tmp_path / "in/b" / name).write_text(LOOKALIKES[name])
    store = quick_build("jsonl", tmp_path / "in", tmp_path / "s")
    assert len(store) == 20 + (name == "metrics.jsonl")


def test_stores_and_runs_are_left_out_by_what_they_hold(tmp_path: Path) -> None:
    """Also the one that is being built, and one that was only begun."""
    jsonl(tmp_path / "x.jsonl", [{"text": "one"}])
    quick_build("jsonl", tmp_path, tmp_path / "made")
    run = put(tmp_path / "run", "metrics.jsonl")
    (run / "recipe.json").write_text('{"data": {}, "model": {}, "task": {}, "optim": {}}')
    (run / "schema.json").write_text('{"columns": {}, "schema": {}}')
    store = quick_build("jsonl", tmp_path, tmp_path / "made", how=How(quiet=True, yes=True))
    assert store.manifest.left_out == {"run": 1}
    other = quick_build("jsonl", tmp_path, tmp_path / "other")
    assert other.manifest.left_out == {"run": 1, "store": 1}
    assert len(store) == 1


def test_suffixes_and_patterns(tmp_path: Path) -> None:
    put(tmp_path, "a.py", "B.PY", "c.md", "src/d.py", "src/x/e.py", "src/x/f.md", "tests/g.py")
    assert names(tmp_path, suffix=(".py",)) == [
        "B.PY",
        "a.py",
        "src/d.py",
        "src/x/e.py",
        "tests/g.py",
    ]
    assert names(tmp_path, suffix=("md",)) == ["c.md", "src/x/f.md"]
    assert names(tmp_path, glob=("src/**/*.py",)) == ["src/d.py", "src/x/e.py"]
    assert names(tmp_path, glob=("src/*.py",)) == ["src/d.py"]
    assert names(tmp_path, glob=("*.md",)) == ["c.md", "src/x/f.md"]
    assert names(tmp_path, glob=("[ac].*",)) == ["a.py", "c.md"]
    assert names(
        tmp_path, glob=("src/x[!a]e.py", "src[+-9]d.py", "*[!/x]d.py", "c[^a[~~&&]md")
    ) == ["c.md"]
    assert names(tmp_path, suffix=(".py",), glob=("!tests/**", "!B.?Y")) == [
        "a.py", "src/d.py", "src/x/e.py",
    ]  # fmt: skip
    with pytest.raises(TokmillError, match=r"holds no \.rs file"):
        names(tmp_path, suffix=(".rs",))
    for wrong in ("", "[z-a]", "[[:alpha:]].py"):
        with pytest.raises(UsageError, match="--glob"):
            names(tmp_path, glob=(wrong,))


def test_a_choice_is_no_part_of_the_identity(tmp_path: Path) -> None:
    """The plan lists the files."""
    put(tmp_path / "in", "a.txt", "b.md")

    def plan(**options: Any) -> Any:
        recipe = BuildRecipe(
            source="text", inputs=(str(tmp_path / "in"),), tokenizer=str(TOKENIZER), options=options
        )
        return prepare(recipe).plan

    whole, part = plan(), plan(suffix=[".md", ".txt"])
    assert (whole.recipe_id, whole.plan_id) == (part.recipe_id, part.plan_id)
    assert plan(glob=["*.md"]).recipe_id == whole.recipe_id
    assert plan(glob=["*.md"]).plan_id != whole.plan_id


def test_two_inputs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    put(tmp_path, "a/__init__.py", "b/__init__.py", "b/c/__init__.py", "b/d.py", "x/b/d.py")
    files = [tmp_path / "a/__init__.py", tmp_path / "b/__init__.py"]
    assert names(*files) == ["a/__init__.py", "b/__init__.py"]
    assert names(tmp_path / "a", tmp_path / "b", suffixes=(".py",)) == [
        "a/__init__.py", "b/__init__.py", "c/__init__.py", "d.py",
    ]  # fmt: skip
    assert names(tmp_path / "b", tmp_path / "x/b", suffixes=(".py",)) == [
        "__init__.py", "c/__init__.py", f"{tmp_path.name}/b/d.py", "x/b/d.py",
    ]  # fmt: skip
    store = quick_build("text", files, tmp_path / "s")
    assert [item.name for item in read_planned(store.path)] == ["a/__init__.py", "b/__init__.py"]


def test_text_of_any_suffix_is_read_and_what_is_none_is_counted(tmp_path: Path) -> None:
    import gzip

    root = put(tmp_path / "in", "a.py", "README.md", "Makefile", "LICENSE", "b/c.rs", "ä ö.txt")
    (root / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (root / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (root / "wide.txt").write_bytes("wide".encode("utf-16"))
    (root / "empty.txt").write_bytes(b"")
    (root / "log.gz").write_bytes(gzip.compress(b"text\n"))
    (root / "tar.gz").write_bytes(gzip.compress(b"name\0\0\0"))
    # The character that the first 4 KiB end in is whole in the file.
    (root / "cut.txt").write_bytes(b"a" * 4095 + "ä".encode())
    store = quick_build("text", root, tmp_path / "s")
    assert len(store) == 8
    assert store.manifest.left_out == {
        "not text: .txt": 2, "empty file": 1, "not text: .gz": 1, "not text: .png": 1,
    }  # fmt: skip
    # What turns out to be none only later is a reject.
    (root / "late.txt").write_bytes(b"a" * 5000 + b"\xff")
    store = quick_build("text", root, tmp_path / "s", how=How(quiet=True, max_rejects=1))
    assert store.manifest.rejected == {"utf8": 1}


def test_what_is_left_out_is_said_once_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "in"
    root.mkdir()
    jsonl(root / "x.jsonl", [{"text": "one"}])
    store = quick_build("jsonl", root, tmp_path / "s")
    assert store.manifest.left_out is not None and not store.manifest.left_out
    before = store.manifest
    put(root, "a.md", "b.md", "c.csv")
    store = quick_build("jsonl", root, tmp_path / "s", how=How())
    told = capsys.readouterr().err
    assert "left out of the folders: of other kinds: 2 .md, 1 .csv" in told
    assert store.manifest.left_out == {".md": 2, ".csv": 1} and "--suffix" not in told
    assert (store.manifest.plan_id, store.fingerprint) == (before.plan_id, before.fingerprint)
    from tokmill.store.checks.validate import validate

    assert validate(Store(store.path)).ok


def test_a_folder_without_files_of_the_kind_names_the_suffix_that_it_has(tmp_path: Path) -> None:
    put(tmp_path, "a.json", "b.json", "c.md")
    with pytest.raises(
        TokmillError, match=r"no .jsonl file \(of other kinds: 2 .json, 1 .md\)"
    ) as e:
        find_files([str(tmp_path)], (".jsonl",))
    assert "--suffix .json reads those" in e.value.hint


def test_lists_name_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsdecode(b"\xe9t\xe9.txt")
    root = put(tmp_path / "in", "a.txt", "b c.txt", "d/e.txt")
    (root / odd).write_text("odd")
    data = f"# these\na.txt\n\n  b c.txt \r\n{root / 'd'}\n./{odd}".encode(errors="surrogateescape")
    (root / "list").write_bytes(data)
    wanted = [str(root / name) for name in ("a.txt", "b c.txt", "d", odd)]
    assert with_lists(["x"], [str(root / "list")]) == ["x", *wanted]
    assert with_lists(None, None) == []
    # As if the paths had been named, from wherever.
    monkeypatch.chdir(root)
    found = find_files(with_lists([], ["list"]), TXT)
    assert found == find_files(["a.txt", "b c.txt", str(root / "d"), odd], TXT)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a.txt\n")))
    assert with_lists(["d"], ["-"]) == ["d", "a.txt"]
    with pytest.raises(UsageError, match="stdin was named twice"):
        with_lists(["-"], ["-"])
    put(root, "empty")
    (root / "empty").write_text("# nothing\n")
    with pytest.raises(TokmillError, match="names no file"):
        with_lists([], ["empty"])
    (root / "list").write_text("a.txt\n# no\n\nmissing\nb c.txt\n")
    with pytest.raises(TokmillError, match="no such file or folder: missing") as caught:
        with_lists([], ["list"])
    assert caught.value.where == "list, line 4"
    with pytest.raises(MachineError):
        with_lists([], ["no list"])


def test_options_that_choose_files_are_in_no_identity():
    assert FolderOptions.__struct_fields__ == CHOICE
