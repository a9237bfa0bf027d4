"""`make similarity`: projects are compiled in several ways, split by project, and frozen."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokmill.store.store import Store
from x86_programs import C_SOURCE, compiler

OTHER = """
#include <stdio.h>
static int sum(const int *v, int n) { int s = 0; while (n--) s += v[n]; return s; }
int main(int argc, char **argv) {
    int v[] = {1, 2, argc};
    for (int i = 0; i < argc; i++) printf("%s: %d\\n", argv[i], sum(v, 3));
    return 0;
}
"""


@pytest.fixture(scope="module")
def scripts(benchmark_script: Callable[[str], ModuleType]) -> Any:
    return SimpleNamespace(
        **{
            name: benchmark_script(f"similarity_{name}")
            for name in ("programs", "projects", "stores")
        }
    )


def test_every_project_is_in_one_split(scripts: Any) -> None:
    splits = scripts.programs.splits()
    named = [name for names in splits.values() for name in names]
    assert sorted(named) == sorted(scripts.projects.PROJECTS) and len(named) >= 30
    assert set(splits) == {"train", "val", "test", "unseen"}
    small = {split for split, names in splits.items() if set(names) & set(scripts.projects.SMALL)}
    assert small == {"train", "val", "test"}
    older = scripts.programs.OLDER
    for split, names in splits.items():
        held_out = split in ("test", "unseen")
        for name in names:
            ways = scripts.programs.ways(name)
            assert any(compiler == older for compiler, _ in ways) == held_out
            assert len(ways) == len(set(ways)) >= 10


def test_projects_become_frozen_stores(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    compiler("gcc")
    sources = {"one": C_SOURCE, "two-dash": C_SOURCE + "int more(int x) { return x * 77; }",
               "three": OTHER, "broken": "int main(void) { return"}  # fmt: skip
    project, programs, stores = scripts.projects.Project, scripts.programs, scripts.stores
    fetched = tmp_path / "fetched"
    for name, text in sources.items():
        tree = fetched / name
        tree.mkdir(parents=True)
        (tree / "a.c").write_text(text)
        (tree / "config.in").write_text("#define X 1\n")
        (tree / ".version").write_text("1.0")
    table = {
        name: project(name, lambda tree: [tree / "a.c"], ("-I{made}",), made={"c.h": "@config.in"})
        for name in sources
    }
    splits = {"train": ["one"], "val": ["two-dash"], "test": ["three", "broken"], "unseen": []}
    monkeypatch.setattr(programs, "PROJECTS", table)
    monkeypatch.setattr(programs, "ways", lambda name: [("gcc", "O0"), ("gcc", "O2"), ("gc", "O0")])
    monkeypatch.setattr(programs, "fetch", lambda package, folder, suite: fetched / package)
    for module in (programs, stores):
        monkeypatch.setattr(module, "splits", lambda: splits)
    cache = tmp_path / "cache"
    assert programs.main([str(cache)]) == 0
    said = capsys.readouterr().out
    assert "left out: 6 builds of 4 projects" in said and "there is no such compiler" in said
    folder = cache / "similarity"
    log = folder / "logs" / "broken-gcc-O0.log"
    assert str(log) in said and "expected" in log.read_text()
    facts = json.loads((folder / "built.json").read_text())
    assert facts["programs"] == 6 and len(facts["left_out"]) == 6
    # The same again compiles nothing that is there.
    path = folder / "programs" / "one-1.0" / "gcc-O2" / "one"
    before = path.stat().st_mtime_ns
    programs.main([str(cache)])
    assert path.stat().st_mtime_ns == before
    assert stores.main([str(cache)]) == 0
    assert "3 stores frozen" in capsys.readouterr().out
    train, val = Store(folder / "train"), Store(folder / "val")
    assert {one["project"] for one in train} == {"one"} and {o["project"] for o in val} == {
        "two-dash"
    }
    assert {one["level"] for one in train} == {"O0", "O2"}
    # What `train` has too, token by token, is not held out; what is new is.
    assert {one["function"] for one in train} >= {"main", "dispatch"}
    assert "more" in {one["function"] for one in val}
    assert "dispatch" not in {one["function"] for one in val}
    assert not any(one["function"].startswith("sub_") for one in train)
    frozen = (folder / "frozen.json").read_text()
    assert stores.main([str(cache)]) == 0
    assert "are as they were frozen" in capsys.readouterr().out
    # Another store in its place is an error, which changes nothing.
    shutil.rmtree(folder / "val")
    shutil.copytree(folder / "train", folder / "val")
    assert stores.main([str(cache)]) == 1
    said = capsys.readouterr().err
    assert "val: has the fingerprint" in said and "hint: --freeze" in said
    splits["test"].remove("broken")
    assert stores.main([str(cache)]) == 1
    assert "similarity_splits.toml has changed" in capsys.readouterr().err
    assert (folder / "frozen.json").read_text() == frozen
    assert stores.main([str(cache), "--freeze"]) == 0
    assert Store(folder / "val").fingerprint == val.fingerprint
