"""GHC's assembler, which gives symbols to the functions that have local names only.

    ghc -pgma python3 -opta ghc_assembler.py …

A function of GHC ends with `.size NAME, .-NAME`; names that begin with `.L` get no symbol, and
those of constructors are said to be data. The code stays the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ENDS = re.compile(r"^\t\.size (?:\.L)?(\w+), \.-", re.MULTILINE)
LOCAL = re.compile(r"\.L(\w+)\b")
TYPE = re.compile(r"^\.type (\w+), @object\n(?=\1:)", re.MULTILINE)
LABEL = re.compile(r"^(\w+):", re.MULTILINE)


def named(text: str) -> str:
    """Return assembler text in which every function has a symbol of its type."""
    names = {name for name in ENDS.findall(text) if name.endswith(("_info", "_slow"))}
    text = LOCAL.sub(lambda found: found[1] if found[1] in names else found[0], text)
    text = TYPE.sub(lambda found: "" if found[1] in names else found[0], text)
    return LABEL.sub(
        lambda found: f".type {found[1]}, @function\n{found[0]}" if found[1] in names else found[0],
        text,
    )


if __name__ == "__main__":
    for word in sys.argv[1:]:
        if word.endswith(".s"):
            Path(word).write_text(named(Path(word).read_text()))
    sys.exit(subprocess.call(["gcc", *sys.argv[1:]]))
