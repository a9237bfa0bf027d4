"""Nothing in the working directory is run, imported or read as settings: it may hold the input."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokmill
from diff_sources import NEW, OLD
from making import TOKENIZER
from x86_programs import compiler

SOURCES = Path(tokmill.__file__).parent
STARTED = {
    "bbv/traces/markers.py": {"Popen", "run"},
    "bbv/traces/profile.py": {"run"},
    "builds/processes.py": {"ProcessPoolExecutor"},
    "base/children/child.py": {"Popen", "Running"},
    "base/children/child_calls.py": {"Child", "Popen", "Running"},
    "cli/inspect_command.py": {"run"},  # minutes: its script runs commands that are tested here
    "mlir/iree/tune.py": {"call"},
    "mlir/measure.py": {"Child"},
    "mlir/modules/guard.py": {"shared"},
    "mlir/modules/importing.py": {"run"},
    "mlir/module_source.py": {"shared"},
    "text/learning/train_tokenizer.py": {"call"},
    "training/launch.py": {"run"},
    "x86/image/program.py": {"shared"},
}
"""File → what starts processes in it: a new one needs a command below that uses it."""
STARTS = {"subprocess.Popen", "subprocess.run", "subprocess.check_output", "subprocess.call",
          "ProcessPoolExecutor", "os.system", "os.popen", "os.posix_spawn", "run.run",
          "ray.init"}  # fmt: skip
OWN = {"tokmill.base.children.child", "tokmill.base.children.child_calls"}
MODULES = (
    "sitecustomize", "usercustomize", "tokmill", "numpy", "torch", "msgspec", "typer", "iree",
    "multiprocessing", "pickle", "socket", "random", "selectors", "resource", "psutil", "onnx",
)  # fmt: skip
LIBRARIES = (
    "libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1",
    "libstdc++.so.6", "libz.so.1", "libgomp.so.1", "libcuda.so.1", "crt1.o", "specs",
)  # fmt: skip
SETTINGS = (
    ".deepspeed_env", "ds_config.json", "pip.conf", "setup.cfg", "pyproject.toml", ".env", ".netrc",
    "default_config.yaml", ".pdbrc", "python311._pth", "pyvenv.cfg", "sitecustomize.pth",
    "hostfile", "log_config.yaml", ".gitconfig", "ray.yaml",
)  # fmt: skip
READ_NEVER = 10**18
"""When files of the hostile folder were read last, if nothing reads them."""
PROGRAMS = ("git", "valgrind", "setarch", "env", "cc", "gcc", "sh", "rm", "as", "ld", "python3")


def started(path: Path) -> Iterator[str]:
    """Yield what a source calls to start processes."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    own = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module in OWN
        for alias in node.names
        if alias.name in ("run", "call", "shared", "Child", "Running")
    }
    own |= {"Child", "Running"} if path.stem in ("child", "child_calls") else set()
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTS | own:
            yield ast.unparse(node.func).rpartition(".")[2]


def test_every_place_that_starts_a_process_is_known() -> None:
    found = {
        path.relative_to(SOURCES).as_posix(): set(started(path)) for path in SOURCES.rglob("*.py")
    }
    assert {file: names for file, names in found.items() if names} == STARTED


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs: text, two versions of a program with their sources, stripped."""
    root = tmp_path_factory.mktemp("built")
    (root / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n\n" * 50)
    for name, source in (("old", OLD), ("new", NEW)):
        (root / name).mkdir()
        (root / name / "a.c").write_text(source)
        tool, plain = root / f"{name}.dbg", root / f"{name}.elf"
        run = [compiler("gcc"), "-g", "-O1", "-o", str(tool), str(root / name / "a.c")]
        subprocess.run(run, check=True)
        subprocess.run([compiler("objcopy"), "--strip-all", str(tool), str(plain)], check=True)
    return root


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory with programs, modules and settings; whatever is used leaves a note."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    note = tmp_path / "used"
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(note)!r}, 'a').write('{name}.py ')\n")
    for name in PROGRAMS:
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> {note}\n")
        (folder / name).chmod(0o755)
    for name in (*LIBRARIES, *SETTINGS):
        (folder / name).write_text(f"echo {name} >> {note}\n")
    subprocess.run([compiler("git"), "init", "-q", str(folder)], check=True)
    (folder / ".gitattributes").write_text("* filter=x diff=x\n")
    with (folder / ".git/config").open("a") as file:
        for section, key in (("filter", "clean"), ("diff", "textconv"), ("core", "fsmonitor")):
            name = ' "x"' if section != "core" else ""
            file.write(f"[{section}{name}]\n\t{key} = echo git {section} >> {note}; cat\n")
    (folder / ".valgrindrc").write_text(f"--log-file={note}\n")
    (folder / ".gdbinit").write_text(f"shell echo gdb >> {note}\n")
    (folder / "wandb").mkdir()
    (folder / "wandb/settings").write_text("[default]\nrun_group = planted\n")
    (folder / "config-defaults.yaml").write_text("planted:\n  value: 1\n")
    (folder / "matplotlibrc").write_text("backend: module://sitecustomize\nlines.linewidth: 40\n")
    for path in folder.rglob("*"):
        os.utime(path, ns=(READ_NEVER, path.stat().st_mtime_ns))
    return folder


def tokmill_in(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a folder that PATH names too, as some have it."""
    path = os.pathsep.join(["", ".", os.environ["PATH"]])
    return subprocess.run(
        [Path(sys.executable).with_name("tokmill"), *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


COMMANDS: dict[str, list[str]] = {
    "a function in a child": [
        "tokenizer", "train", "{in}/a.txt", "-o", "{out}", "--vocab-size=270",
    ],
    "processes of a pool": ["cfg", "{in}/old.elf", "{in}/new.elf", "-o", "{out}", "--workers=2"],
}  # fmt: skip
LONG: dict[str, list[str]] = {
    "valgrind": ["bbv", "profile", "-o", "{out}", "--", "/bin/true"],
    "a compiler": ["bbv", "profile", "--measured", "-o", "{out}", "--", "/bin/true"],
    "DeepSpeed": [
        "train", "{store}", "-o", "{out}", "--set", "run.engine=deepspeed", "--set", "run.steps=2",
        "--set", "model.dim=16", "--set", "model.layers=1", "--set", "model.heads=2",
        "--set", "task.length=8",
    ],
    "MLIR": ["rl", "search", "relu 64", "--evaluations", "2", "--runs", "1"],
    "torchrun": [
        "train", "{store}", "-o", "{out}", "--processes", "2", "--set", "run.steps=2",
        "--set", "model.dim=16", "--set", "model.layers=1", "--set", "model.heads=2",
        "--set", "task.length=8",
    ],
    "wandb": [
        "train", "{store}", "-o", "{out}", "--set", "run.steps=2", "--set", "run.track=[\"wandb\"]",
        "--set", "model.dim=16", "--set", "model.layers=1", "--set", "model.heads=2",
        "--set", "task.length=8",
    ],
}  # fmt: skip


def nothing_was_used(kind: list[str], built: Path, hostile: Path) -> None:
    out = hostile.parent / "out"
    names = {"in": str(built), "out": str(out), "store": str(built / "store")}
    names["tokenizer"] = str(TOKENIZER)
    ran = tokmill_in(hostile, *(word.format(**names) for word in kind))
    used = hostile.parent / "used"
    assert not used.exists(), f"{used.read_text()}\n{ran.stderr}"
    read = [
        p.name for p in hostile.rglob("*") if p.is_file() and p.stat().st_atime_ns != READ_NEVER
    ]
    assert read == []
    # /bin/true is too short to be timed.
    refused = 1 if "--measured" in kind else 0
    assert ran.returncode in (0, refused), ran.stderr


@pytest.mark.parametrize("kind", COMMANDS)
def test_children_use_nothing_of_the_working_directory(
    kind: str, built: Path, hostile: Path
) -> None:
    nothing_was_used(COMMANDS[kind], built, hostile)


@pytest.mark.long
@pytest.mark.parametrize("kind", LONG)
def test_slow_children_use_nothing_of_the_working_directory(
    kind: str, built: Path, hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toy import cycles, make_store

    monkeypatch.setenv("WANDB_MODE", "offline")
    if kind in ("torchrun", "wandb", "DeepSpeed") and not (built / "store").exists():
        make_store(built / "store", cycles(60))
    nothing_was_used(LONG[kind], built, hostile)
    logs = list(hostile.parent.glob("out/wandb/offline-*/*.wandb"))
    assert len(logs) == (kind == "wandb")
    assert not any(b"planted" in path.read_bytes() for path in logs)


def test_figures_are_drawn_by_no_settings_of_the_working_directory(
    built: Path, hostile: Path, tmp_path: Path
) -> None:
    from toy import cycles, make_store

    store = make_store(tmp_path / "store", cycles(20))
    (tmp_path / "empty").mkdir()
    for place in ("empty", "hostile"):
        ran = tokmill_in(
            tmp_path / place, "plot", "lengths", store, "-o", tmp_path / f"{place}.svg"
        )
        assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "empty.svg").read_bytes() == (tmp_path / "hostile.svg").read_bytes()
    assert not (tmp_path / "used").exists()


def test_a_program_of_the_user_has_its_own_environment() -> None:
    """A profiled program may be Python, which finds its modules beside itself."""
    from tokmill.base.bounds import SAFE_PATH, environment_of_users

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONSAFEPATH", SAFE_PATH)
        assert "PYTHONSAFEPATH" not in environment_of_users()
        patch.setenv("PYTHONSAFEPATH", "1")
        assert environment_of_users()["PYTHONSAFEPATH"] == "1"
