"""Real text for the benchmarks: source code and documentation that is on the machine.

No prose of this size comes in a package, so this is what it is: Python and C sources, manuals and
documentation. Files are taken in the order of their digests, each once, until the size is reached.
"""

import hashlib
import json
import sys
import sysconfig
from pathlib import Path

ROOTS = [
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "/usr/share/doc",
    "/usr/share/perl",
    "/usr/include",
    "/usr/lib/python3",
]
ENDINGS = {".py", ".pyi", ".rst", ".md", ".txt", ".h", ".hpp", ".pod", ".pm"}


def documents() -> list[tuple[str, str]]:
    """Return (digest, text) of every distinct text file, ordered by digest."""
    found: dict[str, str] = {}
    for root in ROOTS:
        for path in Path(root).rglob("*"):
            if path.suffix not in ENDINGS or not path.is_file() or path.stat().st_size > 1 << 20:
                continue
            try:
                text = path.read_text()
            except (UnicodeDecodeError, OSError):
                continue
            if len(text) >= 64 and "<|endoftext|>" not in text:
                found[hashlib.sha256(text.encode()).hexdigest()] = text.strip()
    return sorted(found.items())


def main(folder: Path, megabytes: list[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [size for size in megabytes if not (folder / f"text-{size}.jsonl").exists()]
    if not wanted:
        return
    lines = [
        json.dumps({"id": digest[:12], "text": text}, ensure_ascii=False).encode() + b"\n"
        for digest, text in documents()
    ]
    for size in wanted:
        written = 0
        private = folder / f"text-{size}.jsonl.part"
        with private.open("wb") as out:
            for line in lines:
                if written >= size * 1_000_000:
                    break
                out.write(line)
                written += len(line)
        private.rename(folder / f"text-{size}.jsonl")
        print(f"{folder / f'text-{size}.jsonl'}: {written / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]])
