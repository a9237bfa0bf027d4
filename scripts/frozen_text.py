"""Make the frozen 25 MB of English to compete on, out of the documentation of Python projects.

Usage: python scripts/frozen_text.py FOLDER

Needs pip and about 110 MB of downloads, which stay in FOLDER/archives: source distributions, each
checked against its pinned sha256. No setup code of theirs is run. Archives that lie there already
are not downloaded, so they may come from elsewhere.

Writes FOLDER/train.txt (25,000,000 bytes at most), FOLDER/val.txt (1,000,000) and FOLDER/test.txt
(400,000, by which benchmarks/speedrun.md judges), the same bytes on every machine: pages in a
hashed order, each once, a <|endoftext|> after each. Then prints what general compressors make of
the validation text, in bits a byte, when they have seen train.txt.

The text is under the licences of its projects; nothing of it lies in this repository.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

ARCHIVES = {
    "buildbot-4.3.0.tar.gz": "cbf46a15004bb1229712285e4f2b98163a169868ea00783e5e0d7cf8d5e8d962",
    "celery-5.7.0.tar.gz": "6a5dfcf6662287204f009a02002b9e66c83d4105e47ebabdc7079108772fc6f0",
    "cinder-29.0.0.tar.gz": "6372ca98db3d7781031ce5950b44698badd6176db794ff1f74b0621be583429e",
    "django-5.2.19.tar.gz": "ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1",
    "docutils-0.23.tar.gz": "746f5060322511280a1e50eb76846ed6bf2342984b2ac04dc42caa1a8d78799e",
    "ironic-39.0.0.tar.gz": "205364829cf7ab1d03f80e4c684cf2aa6693170eae8457b9344100e43b737a5e",
    "keystone-30.0.0.tar.gz": "8f3f77175a039e408d870c6ea697a4cc4e9cf2755bd6cbc11230db4146dd7df4",
    "numpy-2.4.6.tar.gz": "f3a3570c4a2a16746ac2c31a7c7c7b0c186b95ce902e33db6f28094ed7387dda",
    "pyramid-2.1.tar.gz": "5a24bc1b5f9e0f0d1c0b6ddd1111e84c15dac44a07e3c1d24e74dd9bb4fc22eb",
    "pytest-9.2.0.tar.gz": "97c4f3b1f3c7414aa36465e09b8220f1d03627993bd51b1282e193753c80557b",
    "salt-3008.5.tar.gz": "0259deafd601d783721e5aa8ed10677d8c4d6cc12f5de17499af71590d593315",
    "scikit_learn-1.9.1.tar.gz": "629cada3e33e2b9bf376cdc7614a47a4140b8aedc1d836579e359736fbd82977",
    "scrapy-2.19.0.tar.gz": "34130726582b64c91531162ab277c4053e558876d49ba219cb43679e71d80a87",
    "setuptools-84.2.1.tar.gz": "3ff8b3b5492a0aa66960f4419365a86b84e013070d4313e4d4a6894f5d64d6bc",
    "sphinx-9.0.4.tar.gz": "594ef59d042972abbc581d8baa577404abe4e6c3b04ef61bd7fc2acbd51f3fa3",
    "sqlalchemy-2.1.9.tar.gz": "d700a8b2edfb26282a470333d6bc4a454c4acda4d201a3bea7b72fa76c217d28",
    "swift-2.38.3.tar.gz": "561b2f8acc5ce834a0a2bac200e8ccd8784cb5c4a9e3731881d2e66dec4b6006",
    "sympy-1.14.0.tar.gz": "d3d3fe8df1e5a0b42f0e7bdf50541697dbe7d23746e894990c030e2b05e72517",
    "twisted-26.10.0.tar.gz": "5f0355403e507fc23ceea85e9dbb4bc59335aabde41dd324e8b8cea180dd38de",
}
"""File of a source distribution → its sha256."""

SIZES = {"train": 25_000_000, "val": 1_000_000, "test": 400_000}
"""The most bytes of each file, separators counted."""

TEXTS = {
    "train": "dafefba4b3ac7fa834bd5dc16b5580742b4166c8edff5dd416c991159ee267c3",
    "val": "9b0cf3eb323fddc38c5cf1d9d8fcb38111a242297766e80464907c210dadc0c8",
    "test": "78b1bd2b874f89880d8ee0209ff9dfb58bc56dca4b144677132fe69e4bfda33c",
}
"""The sha256 of each file."""

SEPARATOR = "<|endoftext|>"
ORDER = b"tokmill frozen text 1\0"
"""Hashed before each page; what comes out is the order of the pages."""

FOLDERS = {"doc", "docs"}
SUFFIXES = (".rst", ".txt", ".md")
NEWS = re.compile(r"releas|changelog|changes|whats_?new|history|relnotes|news", re.IGNORECASE)
"""In a path: lists of changes, which say the same thing once a version."""
SHORTEST, LONGEST = 500, 300_000  # characters of a page
PROSE = 0.75
"""Least share of lower-case letters and spaces: below it are tables, code and lists of names."""

# pip's own index and session: its configuration, proxies, certificates and passwords. Its command
# `download` would run the setup code of a source distribution to learn its dependencies.
FETCH = """
import json, sys
from pip._internal.commands import create_command

folder, *names = json.load(sys.stdin)
command = create_command("download")
options, _ = command.parse_args(["--ignore-requires-python"])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    for name in names:
        project = name.rpartition("-")[0]
        links = {found.link.filename: found.link for found in finder.find_all_candidates(project)}
        if name not in links:
            sys.exit(f"no index that pip knows has {name}")
        whole = {"Accept-Encoding": "identity"}
        answer = session.get(links[name].url_without_fragment, headers=whole)
        answer.raise_for_status()
        with open(f"{folder}/{name}", "wb") as file:
            file.write(answer.content)
"""


def fetch(folder: Path, archives: dict[str, str]) -> None:
    """Download the archives that are not in the folder; end the program where one is not right."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in archives if not (folder / name).exists()]
    for name in missing:
        print(f"frozen_text: downloading {name}", file=sys.stderr, flush=True)
        # One process each, into a private folder: an archive is there whole or not at all.
        private = folder / ".part"
        private.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", FETCH],
            input=json.dumps([str(private), name]),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(
                f"frozen_text: {name} could not be downloaded:\n{done.stderr.strip()}\n"
                f"hint: put the file into {folder} by other means and begin again"
            )
        (private / name).replace(folder / name)
        private.rmdir()
    for name, expected in archives.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if found != expected:
            sys.exit(
                f"frozen_text: {folder / name} has the sha256 {found}, not {expected}\n"
                "hint: remove the file and begin again"
            )


def pages(archive: Path) -> Iterator[str]:
    """Yield the pages of documentation in an archive that are prose."""
    with tarfile.open(archive) as members:
        for member in members:
            path = member.name.partition("/")[2]  # the folder on top has the version in its name
            if not member.isfile() or not path.endswith(SUFFIXES) or NEWS.search(path):
                continue
            if not FOLDERS & set(path.split("/")[:-1]):
                continue
            file = members.extractfile(member)
            assert file is not None
            try:
                text = file.read().decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue
            fits = SHORTEST <= len(text) <= LONGEST and SEPARATOR not in text
            if fits and share_of_prose(text) >= PROSE:
                yield text


def share_of_prose(text: str) -> float:
    """Return which share of a text is ASCII lower-case letters and spaces."""
    return sum(map(text.count, "abcdefghijklmnopqrstuvwxyz ")) / len(text)


def split(texts: Iterator[str], sizes: dict[str, int]) -> dict[str, bytes]:
    """Return the files: whole pages in the hashed order, as many as fit into each."""
    unique = {hashlib.sha256(ORDER + text.encode()).digest(): text for text in texts}
    rest = iter((unique[digest] + SEPARATOR).encode() for digest in sorted(unique))
    files = {}
    for name, size in sizes.items():
        taken: list[bytes] = []
        total = 0
        for page in rest:
            total += len(page)
            if total > size:
                break
            taken.append(page)
        else:
            sys.exit(f"frozen_text: the pages do not fill {name}.txt")
        files[name] = b"".join(taken)
    return files


def baselines(train: bytes, val: bytes) -> Iterator[tuple[str, int]]:
    """Yield (compressor, bytes of the validation text) for some that everyone has."""

    def xz(data: bytes) -> bytes:
        return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)

    compressors: dict[str, Callable[[bytes], bytes]] = {
        "gzip -9": lambda data: gzip.compress(data, 9, mtime=0),
        "bzip2 -9": bz2.compress,
        "xz -9e": xz,
    }
    for name, compress in compressors.items():
        yield name, len(compress(val))
    yield "xz -9e after train.txt", len(xz(train + val)) - len(xz(train))
    try:
        import zstandard
    except ModuleNotFoundError:
        return
    kind = zstandard.DICT_TYPE_RAWCONTENT
    seen = zstandard.ZstdCompressionDict(train, dict_type=kind)
    options = zstandard.ZstdCompressionParameters.from_level(22, window_log=27)
    packed = zstandard.ZstdCompressor(dict_data=seen, compression_params=options).compress(val)
    yield "zstd -22 after train.txt", len(packed)


def main() -> None:
    """Write the files and print the baselines."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python scripts/frozen_text.py FOLDER")
    folder = Path(sys.argv[1])
    fetch(folder / "archives", ARCHIVES)
    found = (page for name in ARCHIVES for page in pages(folder / "archives" / name))
    files = split(found, SIZES)
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        if digest != TEXTS[name]:
            sys.exit(f"frozen_text: {name}.txt has the sha256 {digest}, not {TEXTS[name]}")
        (folder / f"{name}.txt").write_bytes(data)
        count = data.count(SEPARATOR.encode())
        print(f"{folder / name}.txt: {count:,} pages, {len(data):,} bytes", flush=True)
    val = files["val"]
    # As tokmill counts: the bytes of the pages, without what stands between them.
    size = len(val.replace(SEPARATOR.encode(), b""))
    for name, compressed in baselines(files["train"], val):
        print(f"{name:26} {compressed:9,} bytes {8 * compressed / size:8.4f} bits a byte")


if __name__ == "__main__":
    main()
