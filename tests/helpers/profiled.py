"""Real programs under valgrind, and stores of the blocks of what they run."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def ran(name: str) -> str:
    """Return the path of a program that system-packages installs."""
    path = shutil.which(name)
    assert path, f"{name} is missing: make system-packages"
    return str(Path(path).resolve())


def libraries(program: str) -> list[str]:
    """Return the libraries of a program and the dynamic loader."""
    said = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    return sorted({str(Path(path).resolve()) for path in re.findall(r"(/\S+) \(0x", said)})


def text_file(path: Path, size: int, seed: int = 0) -> Path:
    """Write text that repeats as text does, and some that does not."""
    draw = np.random.default_rng(seed)
    words = [f"w{n} " for n in range(500)]
    text = "".join(words[int(n)] for n in draw.zipf(1.3, size // 4) % 500)[: size // 2]
    path.write_bytes(text.encode() + draw.bytes(size - len(text)))
    return path


def exp_bbv(
    folder: Path, name: str, command: Sequence[str], interval: int, stdin: str | None = None
) -> Path:
    """Run a command under valgrind's exp-bbv; return the trace, beside which the pc file lies."""
    trace = folder / f"{name}.bb"
    subprocess.run(
        ["valgrind", "--tool=exp-bbv", f"--interval-size={interval}", f"--bb-out-file={trace}",
         f"--pc-out-file={folder / name}.pc", *command],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        input=stdin.encode() if stdin is not None else b"",
    )  # fmt: skip
    return trace
