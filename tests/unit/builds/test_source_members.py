"""What is asked of a source is declared in `Source`, with what holds where it says nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tokmill
from tokmill import plugins
from tokmill.builds.source import Source

SOURCES = Path(tokmill.__file__).parent


@pytest.mark.parametrize("kind", plugins.SOURCES)
def test_every_source_is_one(kind: str) -> None:
    part = plugins.SOURCES[kind]
    if part.extra:
        pytest.importorskip(part.target.partition(":")[0], reason=f"needs the extra {part.extra}")
    loaded = plugins.load(plugins.SOURCES, kind)
    assert issubclass(loaded, Source)
    assert not loaded.__abstractmethods__


def test_nobody_probes_a_source() -> None:
    """A name that is only looked for is one that a newcomer does not find."""
    found = []
    rooms = [SOURCES / room for room in ("builds", "cli", "formats", "text", "x86")]
    for path in (path for room in rooms for path in room.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                probes = node.func.id in ("getattr", "hasattr") and len(node.args) >= 2
                if probes and ast.unparse(node.args[0]) in ("source", "kind", "loaded"):
                    found.append(f"{path.relative_to(SOURCES)}: {ast.unparse(node)}")
    assert not found
