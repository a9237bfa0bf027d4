"""Facts of the machine and of the installed packages."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from tokmill import plugins
from tokmill.base.bounds import machine_memory
from tokmill.base.errors import MissingExtraError
from tokmill.base.progress import human_bytes
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
    """Return all findings; `folder` is on the disk that is looked at."""
    folder = Path(folder)
    checks = [_python(), Check("tokmill", "ok", __version__), *_machine(folder)]
    checks += [_extra(extra, packages) for extra, packages in extras().items()]
    return [*checks, _gpus()]


def extras() -> dict[str, dict[str, str]]:
    """Return extra → package → required versions, from the installed package's metadata."""
    result: dict[str, dict[str, str]] = {}
    try:
        lines = importlib.metadata.requires("tokmill") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?([^;]*);.*extra == ['\"]([\w-]+)['\"]", line)
        if match and match[1] != "tokmill" and match[3] != "dev":
            result.setdefault(match[3], {})[match[1]] = match[2].strip(" ()")
    if not result:
        for package, extra in plugins.EXTRA_PACKAGES.items():
            result.setdefault(extra, {})[package] = ""
    return result


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


def _gpus() -> Check:
    try:
        torch = plugins.require("torch")
    except MissingExtraError as error:
        return Check("GPU", "absent", error.what, error.hint)
    if not torch.cuda.is_available():
        return Check("GPU", "note", "none; runs go on the CPU")
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("GPU", "note", f"{len(cards)} ({', '.join(sorted(set(cards)))})")
