"""Facts of the machine and of the installed packages."""

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Sequence
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
    checks = [_extra(extra, packages) for extra, packages in extras().items()]
    return [*_machine(Path(folder)), *checks, _gpus()]


def extras() -> dict[str, list[str]]:
    """Return extra → its packages, from the installed package's metadata."""
    result: dict[str, list[str]] = {}
    try:
        lines = importlib.metadata.requires("tokmill") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        match = re.match(r"([\w.-]+)[^;]*;.*extra == ['\"]([\w-]+)['\"]", line)
        if match and match[1] != "tokmill" and match[2] != "dev":
            result.setdefault(match[2], []).append(match[1])
    if not result:
        for package, extra in plugins.EXTRA_PACKAGES.items():
            result.setdefault(extra, []).append(package)
    return result


def _machine(folder: Path) -> list[Check]:
    python = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    cores = f"{len(os.sched_getaffinity(0))} that this process may use"
    checks = [
        Check("Python", "ok", python),
        Check("tokmill", "ok", __version__),
        Check("cores", "note", cores),
    ]
    total, free = machine_memory()
    if total:
        left = f"{human_bytes(free)} free of {human_bytes(total)}"
        checks.append(Check("memory", "note", left))
    space = shutil.disk_usage(folder).free
    full = space < LEAST_FREE
    hint = "a build needs about as much as its tokens: free some space" if full else ""
    found = f"{human_bytes(space)} free in {folder.absolute()}"
    return [*checks, Check("disk", "failed" if full else "ok", found, hint)]


def _extra(extra: str, packages: Sequence[str]) -> Check:
    shown, missing = [], []
    for package in packages:
        try:
            shown.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    name = f"extra {extra}"
    if missing:
        found = "; ".join([f"missing: {', '.join(missing)}", *filter(None, [", ".join(shown)])])
        return Check(name, "absent", found, f"pip install 'tokmill[{extra}]'")
    return Check(name, "ok", ", ".join(shown))


def _gpus() -> Check:
    try:
        torch = plugins.require("torch")
    except MissingExtraError as error:
        return Check("GPU", "absent", error.what, error.hint)
    if not torch.cuda.is_available():
        return Check("GPU", "note", "none; runs use the CPU")
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("GPU", "note", f"{len(cards)} ({', '.join(sorted(set(cards)))})")
