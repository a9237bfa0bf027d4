"""The files beside a trace: where its blocks lie, what was mapped, what its intervals cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tokmill.base.files import sampled
from tokmill.base.inflate import MAGIC

SIDECARS = {"pc": ".pc", "map": ".map", "cpi": ".intervals.csv"}
"""Option → suffix of the file beside a trace, whose name else is the same."""
ABOUT = ".about.json"
"""What `tokmill bbv profile` also writes beside a trace; no build reads it."""
SUFFIXES = (".bb", ".bbv")


def stem_of(trace: Path) -> Path:
    """Return the path of a trace without `.bb` and the suffix of a compression."""
    for suffix in (*MAGIC, *SUFFIXES):
        if trace.name.lower().endswith(suffix) and len(trace.name) > len(suffix):
            trace = trace.with_name(trace.name[: -len(suffix)])
    return trace


def without_sidecars(
    left_out: Mapping[str, int], traces: Iterable[Path], named: Sequence[str]
) -> dict[str, int]:
    """Return the counts of files that a scan left out, without those beside the traces.

    `named`: the arguments; what lies beside a trace that was named itself was never counted.
    """
    left = Counter(left_out)
    for trace in traces:
        if str(trace) in named:
            continue
        stem = stem_of(trace)
        left.subtract(
            Path(end).suffix or end
            for end in (*SIDECARS.values(), ABOUT)
            if stem.with_name(stem.name + end).is_file()
        )
    return {why: count for why, count in left.items() if count > 0}


class Sidecars:
    """Finds the files that belong to traces."""

    def __init__(
        self, named: Mapping[str, Sequence[str]], options: Iterable[str] = SIDECARS
    ) -> None:
        """Take the files that were named for all traces, by option, and the options to look for."""
        self.named = {name: paths[0] for name, paths in named.items() if paths}
        self.options = tuple(options)
        self._digests: dict[str, str] = {}

    def of(self, trace: Path) -> Iterator[tuple[str, str]]:
        """Yield (path, sampled digest) of the files of a trace.

        Raises `TokmillError` if a named one cannot be read.
        """
        stem = stem_of(trace.absolute())
        for name in self.options:
            path = self.named.get(name) or f"{stem}{SIDECARS[name]}"
            if name not in self.named and not Path(path).is_file():
                continue
            if path not in self._digests:
                self._digests[path] = sampled(Path(path))[1]
            yield path, self._digests[path]

    def roles(self, trace: Path, others: Iterable[str]) -> dict[str, str]:
        stem, there = stem_of(trace), set(others)
        places = {name: self.named.get(name) or f"{stem}{end}" for name, end in SIDECARS.items()}
        return {name: path for name, path in places.items() if path in there}
