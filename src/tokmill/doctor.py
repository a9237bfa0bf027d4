"""Checks of the machine and of the installed packages; nothing is changed permanently."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from tokmill import plugins
from tokmill.base.errors import MissingExtraError, TokmillError
from tokmill.base.files import write_file
from tokmill.base.locks import locked
from tokmill.base.progress import human_bytes
from tokmill.builds.execution.resources import machine_memory
from tokmill.version import __version__

LEAST_FREE = 1 << 30


class Check(msgspec.Struct, frozen=True):
    """One finding."""

    name: str
    state: Literal["ok", "failed", "absent", "note"]
    """`absent` is an extra that is not installed; only `failed` is wrong."""
    found: str
    hint: str = ""


def examine(folder: Path | str = ".") -> list[Check]:
    """Return all findings; files are tried out in `folder`."""
    folder = Path(folder)
    checks = [_python(), Check("tokmill", "ok", __version__), *_machine(folder)]
    checks += [
        _tried("rename and fsync", lambda: _rename(folder)),
        _tried("file locks", lambda: _lock(folder)),
    ]
    for extra, packages in extras().items():
        checks.append(_extra(extra, packages))
    checks += [_tried(name, check) for name, check in KNOWN_ANSWERS.items()]
    return checks


def extras() -> dict[str, dict[str, str]]:
    """Return extra → package → required versions, from the installed package's metadata."""
    found: dict[str, dict[str, str]] = {}
    try:
        lines = importlib.metadata.requires("tokmill") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?([^;]*);.*extra == ['\"]([\w-]+)['\"]", line)
        if match and match[1] != "tokmill" and match[3] != "dev":
            found.setdefault(match[3], {})[match[1]] = match[2].strip(" ()")
    if not found:
        for package, extra in plugins.EXTRA_PACKAGES.items():
            found.setdefault(extra, {})[package] = ""
    return found


def satisfies(version: str, wanted: str) -> bool:
    """Return whether a version meets conditions such as `>=0.10,<2`; other forms are ignored."""

    def key(text: str) -> tuple[int, ...]:
        numbers = [int(n) for n in re.findall(r"\d+", text.partition("+")[0])]
        while numbers and numbers[-1] == 0:
            numbers.pop()
        return tuple(numbers)

    tests: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
        ">=": lambda a, b: a >= b,
        "==": lambda a, b: a == b,
        "<=": lambda a, b: a <= b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
        "!=": lambda a, b: a != b,
    }
    conditions = re.findall(r"(>=|==|<=|!=|<|>)\s*([\w.]+)", wanted)
    return all(tests[sign](key(version), key(bound)) for sign, bound in conditions)


def _python() -> Check:
    good = sys.version_info >= (3, 11)
    found = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    return Check("Python", "ok" if good else "failed", found, "" if good else "3.11 is needed")


def _machine(folder: Path) -> list[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    checks = [Check("cores", "note", f"{cores} that this process may use")]
    total, free = machine_memory()
    if total:
        left = f"{human_bytes(free)} free of {human_bytes(total)}"
        checks.append(Check("memory", "note", left))
    space = shutil.disk_usage(folder).free
    full = space < LEAST_FREE
    hint = "a build needs about as much as its tokens: free some space" if full else ""
    found = f"{human_bytes(space)} free in {folder.absolute()}"
    return [*checks, Check("disk", "failed" if full else "ok", found, hint)]


def _tried(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", check())
    except MissingExtraError as error:
        return Check(name, "absent", error.what, error.hint)
    except TokmillError as error:
        return Check(name, "failed", error.what, error.hint)
    except Exception as error:
        # A broken wheel may raise anything; the other checks must still run.
        return Check(name, "failed", f"{type(error).__name__}: {error}", "install the extra again")


def _rename(folder: Path) -> str:
    with _scratch(folder) as name:
        path = Path(name) / "file"
        write_file(path, b"first")
        write_file(path, b"second")
        if path.read_bytes() != b"second" or len(os.listdir(name)) != 1:
            raise TokmillError(
                "a renamed file has other content than was written", hint="use another disk"
            )
    return f"work in {folder.absolute()}"


def _lock(folder: Path) -> str:
    with _scratch(folder) as name:
        path = Path(name) / ".lock"
        with locked(path, "taken", ""):
            try:
                with locked(path, "taken", ""):
                    pass
            except TokmillError:
                return f"work in {folder.absolute()}"
    raise TokmillError(
        "two processes could hold one lock",
        hint="two builds into one folder would not notice each other: use another file system",
    )


def _scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix=".tokmill-doctor-", dir=folder)
    except OSError as error:
        raise TokmillError(
            f"nothing can be written in {folder.absolute()}: {error.strerror}",
            hint="run it in a folder where you have permission to write",
        ) from None


def _extra(extra: str, packages: dict[str, str]) -> Check:
    shown, missing, old = [], [], []
    for package, wanted in packages.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
            continue
        shown.append(f"{package} {version}")
        if wanted and not satisfies(version, wanted):
            old.append(f"{package} {version} (wanted: {wanted})")
    install = f"pip install 'tokmill[{extra}]'"
    name = f"extra {extra}"
    if old:
        return Check(name, "failed", "; ".join(old), install)
    if missing:
        found = f"missing: {', '.join(missing)}" + (f"; {', '.join(shown)}" if shown else "")
        return Check(name, "absent", found, install)
    return Check(name, "ok", ", ".join(shown))


WORDS = "low lower lowest <|endoftext|>né\n"
ANSWER = [259, 32, 259, 260, 32, 259, 101, 115, 116, 32, 261, 110, 195, 169, 10]
"""Ids of `WORDS` with the merges below, worked out by hand; the id of a byte is its value."""


def _tokenizer() -> object:
    vocab = {i: bytes([i]) for i in range(256)}
    merges = [(b"l", b"o"), (b"x", b"y"), (b"xy", b"z"), (b"lo", b"w"), (b"e", b"r")]
    vocab |= {256 + i: a + b for i, (a, b) in enumerate(merges)}
    kind = plugins.require("tokmill.text.tokenizers.tokenizer").Tokenizer
    return kind(vocab, merges, ["<|endoftext|>"])


def _engine(engine: str) -> Callable[[], str]:
    def check() -> str:
        plugins.require(engine)
        data = _tokenizer().to_json()  # type: ignore[attr-defined]
        make = plugins.require("tokmill.text.encoding.encoders").make_encoder
        ids, lengths = make(data, engine=engine, specials_in_text="special")([WORDS, "", "low"])
        if ids.tolist() != [*ANSWER, 259] or lengths.tolist() != [len(ANSWER), 0, 1]:
            raise TokmillError(
                f"{engine} gives {ids.tolist()}, not {[*ANSWER, 259]}",
                hint=f"another version of {engine} may be right: pip install 'tokmill[text]'",
            )
        return "gives the known ids"

    return check


def _torch() -> str:
    torch = plugins.require("torch")
    if float(torch.ones(3) @ torch.arange(3.0)) != 3.0:
        raise TokmillError("torch computes a wrong product", hint="pip install 'tokmill[train]'")
    if not torch.cuda.is_available():
        return "computes; no GPU, runs go on the CPU"
    cards = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return f"computes; {torch.cuda.device_count()} GPU ({', '.join(sorted(cards))})"


KNOWN_ANSWERS: dict[str, Callable[[], str]] = {
    "encoder: gigatoken": _engine("gigatoken"),
    "encoder: tokenizers": _engine("tokenizers"),
    "torch": _torch,
}
