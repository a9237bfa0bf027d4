"""Large programs a window at a time: the same graph but for little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokmill.x86.graph import Graph
from tokmill.x86.image.program import open_program
from tokmill.x86.lift import windows
from tokmill.x86.lift.cfg import lift
from x86_programs import C_SOURCE, check_graph, compiles, stripped


def blocks(graph: Graph) -> set[tuple[int, int, int]]:
    """Return function, address and bytes of all blocks."""
    owner = np.repeat(graph.function_address, np.diff(graph.function_blocks))
    sizes = np.diff(graph.block_bytes)
    return set(zip(owner.tolist(), graph.block_address.tolist(), sizes.tolist(), strict=True))


@pytest.mark.parametrize("path", ["/bin/bash", "/usr/bin/gzip"])
def test_windows_find_what_is_found_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lift(path)
    monkeypatch.setattr(windows, "WINDOW", len(whole.code) // 4)
    monkeypatch.setattr(windows, "LARGE", 0)
    parts = list(windows.windows(open_program(path)))
    assert 3 <= len(parts) <= 5
    graph = lift(path)
    check_graph(graph, Path(path), whole=False)
    assert graph.program == whole.program
    found, known = set(graph.function_address.tolist()), set(whole.function_address.tolist())
    # Parts in another window than the rest of their function stand for themselves.
    unwind = open_program(path).unwind
    assert known <= found <= known | set(unwind.start[unwind.fragment].tolist())
    assert len(blocks(graph) & blocks(whole)) >= 0.95 * len(blocks(whole))
    names = dict(zip(whole.function_address.tolist(), whole.function_name, strict=True))
    assert graph.function_name == [names.get(one, "") for one in graph.function_address.tolist()]
    reasons = [reason for _, reason in graph.unresolved]
    assert reasons.count("leads out of the code") == 0


def test_without_tables_windows_are_cut_at_padding(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiles(built, "windowed", C_SOURCE, "-O2", "-static")
    bare = stripped(path, ".eh_frame", ".eh_frame_hdr")
    whole = lift(bare)
    monkeypatch.setattr(windows, "WINDOW", 200_000)
    monkeypatch.setattr(windows, "LARGE", 0)
    graph = lift(bare)
    check_graph(graph, bare, whole=False)
    found, known = set(graph.function_address.tolist()), set(whole.function_address.tolist())
    assert len(found & known) >= 0.9 * len(known)
    assert len(found - known) <= 0.1 * len(known)


def test_windows_tile_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    program = open_program("/bin/bash")
    assert len(list(windows.windows(program))) == 1
    monkeypatch.setattr(windows, "WINDOW", 100_000)
    monkeypatch.setattr(windows, "LARGE", 0)
    seen: dict[int, int] = {}
    for window in windows.windows(program):
        mine = [part for part in window.sections if part.execute and not part.stubs]
        assert sum(len(part.data) for part in mine) <= 2 * (windows.WINDOW + windows.SEARCH)
        for part in mine:
            seen[part.address] = part.stop
    code = {s.address: s.stop for s in program.sections if s.execute and not s.stubs}
    for start, stop in code.items():
        while start < stop:
            start = seen.pop(start)
        assert start == stop
    assert not seen
