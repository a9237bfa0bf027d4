"""Find the files of the INPUT arguments, and count what is not read in folders."""

import contextlib
import os
import re
import stat
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokmill.base.errors import TokmillError, UsageError
from tokmill.base.files import address_of, machine_error, machine_errors
from tokmill.base.inflate import MAGIC
from tokmill.base.progress import human_count
from tokmill.base.remote import Absent, at_once, head, listed, sampled_input
from tokmill.store.marks import kind_of

SHOWN, MOST_SHOWN = 8, 80
"""Kinds of files that a message lists, and characters of a path."""
NOT_TEXT = "not text: "
NO_SUFFIX = "no suffix"
NOT_CHOSEN = "file that --glob does not name"
NO_PROGRAM = "file that is no program"
OTHER_NAME = "another name of a file"
LOG = "log of a table"
ASIDE = (
    (LOG, re.compile(r"(^|/)(_delta_log/|\.hoodie/|metadata/[^/]*\.metadata\.json$)")),
    ("hidden folder", re.compile(r"^(\..*|_temporary|__magic.*)/$")),
    ("hidden file", re.compile(r"(^|/)(\.|_temporary/|__magic[^/]*/)")),
)
"""What is left out by its path; parts that Hadoop has not finished are hidden, too."""
PACKED = tuple(MAGIC)
PLURALS = {
    NOT_CHOSEN: "files that --glob does not name",
    NO_PROGRAM: "files that are no program",
    OTHER_NAME: "other names of a file",
    LOG: "logs of tables",
    "file that is named twice": "files that are named twice",
    "link to a folder": "links to folders",
    "loop of links": "loops of links",
    "pipe, socket or device": "pipes, sockets or devices",
}
"""Reason → its plural, if that is not formed with s."""
OWN: ContextVar[str] = ContextVar("OWN", default="")
"""The folder of the build, absolute: it is never an input, even if it lies in an input folder."""


class FolderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which files of a folder are read. A file that is named itself is always read."""

    suffix: tuple[str, ...] = ()
    """In folders, read only files with this suffix, such as .py. May be repeated."""
    glob: tuple[str, ...] = ()
    """In folders, read only files that match this pattern, such as 'src/**/*.py' or '*.md'; with
    `!` before it, only those that do not match. May be repeated."""


class InputFile(msgspec.Struct, frozen=True):
    """A file below one of the INPUT arguments."""

    name: str
    path: Path
    size: int
    digest: str


class Inputs(NamedTuple):
    """The files, ordered by name, and reason → number of files and folders that are not read."""

    files: list[InputFile]
    left_out: dict[str, int]


class _Entry(NamedTuple):
    name: str
    """Path below the argument; for a file that was named itself, its name."""
    path: Path
    named: bool
    empty: bool = False
    """An object that a list says is empty: it may be a folder, which cannot be read."""


Fits = Callable[[Path, bytes], str]
"""Returns, from the path and the first 4 KiB, why a file is not read; "" if it is read."""


def find_files(
    inputs: Sequence[str],
    suffixes: Sequence[str],
    fits: Fits | None = None,
    choice: object = None,
    *,
    none_is_fine: bool = False,
    instead: str = "",
    once: bool = False,
) -> Inputs:
    """Return the files of the INPUT arguments, ordered by name, and counts of what is not read.

    A file that is named is always read. In a folder, at any depth, the files are read whose name
    ends in one of `suffixes` in upper or lower case (none: any) and which `fits` accepts; or, if
    `choice` has a `suffix` or `glob`, the files that these select. Hidden files, stores, runs and
    links to folders are not read. A file's name is its path below the argument, or more of the path
    if two files would have the same name. `instead`: the hint for a folder of which nothing fits.
    `once`: a file with several names is read by one of them.

    Raises:
        UsageError: no input is named, or a pattern is invalid.
        TokmillError: an input is missing, or nothing in a folder fits (unless `none_is_fine`).
        MachineError: there is no permission to read a folder or a file.
    """
    if not inputs or "" in inputs:
        raise UsageError("no input was named", hint="give files or folders: is a variable empty?")
    options = choice if isinstance(choice, FolderOptions) else FolderOptions()
    chosen = _chooser(options, suffixes)
    if options.suffix or options.glob:
        fits = None
    total: Counter[str] = Counter()
    entries: dict[str, InputFile] = {}
    for argument in inputs:
        left: Counter[str] = Counter()
        count = 0
        found = list(_entries(argument, chosen, left))
        samples = (at_once if address_of(argument) else map)(_sampled, found)
        for entry, sample in zip(found, samples, strict=True):
            if sample is None:
                continue
            size, digest, first = sample
            why = fits(entry.path, first) if fits is not None and not entry.named else ""
            place = address_of(entry.path) or os.path.abspath(entry.path)
            if why:
                left[why] += 1
            elif place in entries:
                left["file that is named twice"] += 1
                count += 1
            else:
                entries[place] = InputFile(entry.name, entry.path, size, digest)
                count += 1
        if not count and not (none_is_fine and +left):
            raise _nothing(argument, suffixes, options, left, instead)
        total += left
    for place in _other_names(entries) if once else ():
        del entries[place]
        total[OTHER_NAME] += 1
    names = _distinct({place: file.name for place, file in entries.items()})
    files = [msgspec.structs.replace(file, name=names[place]) for place, file in entries.items()]
    return Inputs(sorted(files, key=lambda file: file.name), in_order(total))


def _other_names(places: Collection[str]) -> set[str]:
    """Return names of files that have another one among them; a link goes before a file."""
    first, others = set[tuple[int, int]](), set[str]()
    for place in sorted(places, key=lambda place: (os.path.islink(place), place)):
        with machine_errors("read", place):
            facts = os.stat(place)
        if (facts.st_dev, facts.st_ino) in first:
            others.add(place)
        first.add((facts.st_dev, facts.st_ino))
    return others


def _sampled(entry: _Entry) -> tuple[int, str, bytes] | None:
    """Return what `sampled_input` does; None: the entry is a folder that a console made."""
    try:
        return sampled_input(entry.path)
    except Absent:
        if not entry.empty:
            raise
        return None


def with_lists(inputs: Sequence[str] | None, lists: Sequence[str] | None) -> list[str]:
    """Return the INPUT arguments, then the paths in lists: text files with a path on each line.

    Blank lines and lines that begin with # are ignored. A relative path in a list is relative to
    its folder; in one that is piped in (`-`), to the working directory.
    """
    result = list(inputs or ())
    if [*result, *(lists or ())].count("-") > 1:
        raise UsageError("stdin was named twice", hint="name - once, as INPUT or as a list")
    for name in lists or ():
        with machine_errors("read", name):
            data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        paths = list(_listed(name, data))
        for number, path in paths:
            if not (address_of(path) or os.path.exists(path)):
                raise TokmillError(
                    f"there is no such file or folder: {path[:MOST_SHOWN]}",
                    where=f"{name}, line {number:,}",
                    hint="a relative path in a list is relative to the folder of the list",
                )
        if not paths:
            raise TokmillError("the list names no file", where=name, hint="a path on each line")
        result += [path for _, path in paths]
    return result


def _listed(name: str, data: bytes) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(data.splitlines(), 1):
        path = os.fsdecode(line.strip())
        if path and path[0] != "#":
            whole = name == "-" or address_of(path)
            yield number, path if whole else str(Path(name).parent / path)


def in_order(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _entries(argument: str, chosen: Callable[[str], str], left: Counter[str]) -> Iterator[_Entry]:
    if address := address_of(argument):
        yield from _objects(address, chosen, left)
        return
    root = Path(argument)
    mode = None
    with machine_errors("read", root), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = root.stat().st_mode
    if mode is None:
        raise TokmillError("there is no such file or folder", where=argument, hint="check the path")
    if stat.S_ISDIR(mode):
        for path in _below(root, left):
            name = path.relative_to(root).as_posix()
            if why := chosen(name):
                left[why] += 1
            else:
                yield _Entry(name, path, False)
    elif stat.S_ISREG(mode):
        yield _Entry(root.name, root, True)
    else:
        raise TokmillError(
            "is neither a file nor a folder (a pipe or a device?)",
            where=argument,
            hint="write its content to a file first: inputs are read more than once",
        )


def _objects(address: str, chosen: Callable[[str], str], left: Counter[str]) -> Iterator[_Entry]:
    """Yield the object at an address, or else those that it names as a pattern, or those below."""
    with contextlib.suppress(Absent):
        head(address)
        yield _Entry(address.rpartition("/")[2], Path(address), True)
        return
    special = re.search(r"[*?[]", address)
    if special:
        fits = _pattern(address)
        names_hidden = address.rpartition("/")[2].startswith(".")
        for one in listed(address[: special.start()].rpartition("/")[0]):
            name = one.address.rpartition("/")[2]
            # As in a shell, a pattern does not match a hidden file.
            if fits.fullmatch(one.address) and (names_hidden or not name.startswith(".")):
                yield _Entry(name, Path(one.address), True, not one.size)
        return
    below = {one.address.removeprefix(f"{address}/"): one.size for one in listed(address)}
    stores = {name.partition("shards/")[0] for name in below if "shards/" in name}
    stores = {folder for folder in stores if f"{folder}manifest.json" in below}
    for name, size in below.items():
        if any(name.startswith(folder) for folder in stores):
            left["store"] += name.endswith("manifest.json")
        elif why := _aside(name) or chosen(name):
            left[why] += 1
        else:
            yield _Entry(name, Path(f"{address}/{name}"), False, not size)
    left += Counter()  # drops what is 0


def _below(root: Path, left: Counter[str]) -> Iterator[Path]:
    """Yield the files below a folder, in no order, and count everything else."""

    def refuse(error: OSError) -> None:
        raise machine_error("list", error.filename or root, error)

    own = OWN.get()
    for folder, folders, names in os.walk(root, onerror=refuse):
        if own and os.path.abspath(folder) == own:
            folders[:] = []
            continue
        if Path(folder) != root and (kind := kind_of(Path(folder), names)):
            left[kind] += 1
            folders[:] = []
            continue
        aside = {name: why for name in folders if (why := _aside(f"{name}/"))}
        left.update(aside.values())
        links = [n for n in folders if n not in aside and os.path.islink(os.path.join(folder, n))]
        left["link to a folder"] += len(links)
        folders[:] = sorted({*folders} - {*aside, *links})
        inside = "metadata/" * (os.path.basename(folder) == "metadata")
        for name in names:
            path = Path(folder, name)
            if why := _aside(inside + name) or _no_file(path):
                left[why] += 1
            else:
                yield path
    left += Counter()  # drops what is 0


def _aside(name: str) -> str:
    return next((why for why, pattern in ASIDE if pattern.search(name)), "")


def _no_file(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "dangling link"
    except OSError as error:
        if path.is_symlink():
            return "loop of links"
        raise machine_error("read", path, error) from error
    return "" if stat.S_ISREG(mode) else "pipe, socket or device"


def suffix_of(name: str) -> str:
    """Return the suffix by which a file is counted: `.md`, `.txt.gz`, or "no suffix"."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if not suffixes or len(suffixes[-1]) > 12 or not suffixes[-1][1:].isprintable():
        return NO_SUFFIX
    return "".join(suffixes[-2:]) if suffixes[-1] in PACKED and len(suffixes) > 1 else suffixes[-1]


def _chooser(options: FolderOptions, suffixes: Sequence[str]) -> Callable[[str], str]:
    """Return a function: name of a file in a folder → why it is not read ("": it is read)."""
    given = [text if text.startswith(".") else f".{text}" for text in options.suffix]
    endings = tuple(suffix.lower() for suffix in (given or suffixes))
    wanted = [_pattern(text) for text in options.glob if not text.startswith("!")]
    unwanted = [_pattern(text[1:]) for text in options.glob if text.startswith("!")]
    if wanted and not given:
        endings = ()

    def why(name: str) -> str:
        if endings and not name.lower().endswith(endings):
            return suffix_of(name)
        if wanted and not any(pattern.fullmatch(name) for pattern in wanted):
            return NOT_CHOSEN
        return NOT_CHOSEN if any(pattern.fullmatch(name) for pattern in unwanted) else ""

    return why


def _pattern(text: str) -> re.Pattern[str]:
    """Return a glob as a regular expression: `*` matches no `/`, `**/` any depth; a glob without
    `/` matches in any folder.
    """
    if not text or "[[:" in text:
        hint = "such as --glob 'src/**/*.py'; a class is written [0-9], not [[:digit:]]"
        raise UsageError(f"--glob {text!r} is not a pattern", hint=hint)
    text = text.removeprefix("./").removeprefix("/")
    whole = text if "/" in text else f"**/{text}"
    result = ""
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", whole, re.DOTALL):
        if piece == "**/":
            result += "(?:[^/]*/)*"
        elif piece == "**":
            result += ".*"
        elif piece in ("*", "?"):
            result += f"[^/]{piece}".replace("?", "")
        elif len(piece) > 2 and piece[0] == "[":
            inner = re.sub(r"[\\\[&|~]", r"\\\g<0>", piece[1:-1])
            result += f"(?!/)[^{inner[1:]}]" if inner[0] in "!^" else f"(?!/)[{inner}]"
        else:
            result += re.escape(piece)
    try:
        with warnings.catch_warnings():
            # `--` may mean a difference in a later Python; here it is a range that ends with `-`.
            warnings.simplefilter("ignore", FutureWarning)
            return re.compile(result, re.DOTALL)
    except re.error as error:
        raise UsageError(
            f"--glob {text!r} is not a pattern: {error}", hint="such as --glob 'src/**/*.py'"
        ) from None


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Return absolute path → name, with more of the path where two names were equal."""
    parts = {place: Path(place).parts for place in names}
    depth = {place: len(Path(name).parts) for place, name in names.items()}

    def name(place: str) -> str:
        # Names are written to JSON files, so they must be valid text.
        joined = "/".join(parts[place][-depth[place] :]).lstrip("/")
        return joined.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

    while True:
        result = {place: name(place) for place in names}
        times = Counter(result.values())
        equal = [
            place
            for place, one in result.items()
            if times[one] > 1 and depth[place] < len(parts[place])
        ]
        if not equal:
            return result
        for place in equal:
            depth[place] += 1


def in_words(left_out: Mapping[str, int], most: int = SHOWN) -> str:
    """Return the counts of what was not read as one line, the most frequent kinds first."""
    parts: list[str] = []
    suffixes, texts = [], []
    for why, count in in_order(left_out).items():
        if why.startswith(NOT_TEXT):
            texts.append(_files(why.removeprefix(NOT_TEXT), count))
        elif why.startswith(".") or why == NO_SUFFIX:
            suffixes.append(_files(why, count))
        else:
            parts.append(human_count(count, why, PLURALS.get(why, f"{why}s")))
    if texts:
        parts.append(f"not text: {_some(texts, most)}")
    if suffixes:
        parts.append(f"of other kinds: {_some(suffixes, most)}")
    return "; ".join(parts)


def _files(suffix: str, count: int) -> str:
    return f"{count:,} without a suffix" if suffix == NO_SUFFIX else f"{count:,} {suffix}"


def _some(parts: list[str], most: int) -> str:
    more = len(parts) - most
    return ", ".join(parts[:most]) + (f" and {more} more kinds" if more > 0 else "")


def _nothing(
    argument: str,
    suffixes: Sequence[str],
    options: FolderOptions,
    left: Mapping[str, int],
    instead: str,
) -> TokmillError:
    kinds = " or ".join(options.suffix or ([] if options.glob else suffixes))
    what = f"the folder holds no {kinds} file" if kinds else "the folder holds no file to read"
    if not +Counter(left):
        return TokmillError("the folder is empty", where=argument, hint="check the path")
    hint = "check the pattern" if options.suffix or options.glob else "name the files themselves"
    if kinds and not options.suffix:
        other = next((why for why in in_order(left) if why.startswith(".")), "")
        how = f"--suffix {other} reads those; " if other else ""
        hint = instead or f"{how}plain text of any kind: tokmill build text"
    return TokmillError(f"{what} ({in_words(left)})", where=argument, hint=hint)
