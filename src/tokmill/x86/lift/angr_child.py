"""angr's CFGFast of one program, printed as JSON: the script that `angr.py` runs in a child.

It imports nothing of tokmill and is run by its path in isolated mode, so that any interpreter that
has angr can run it.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

MISSING = 4
VERSION = "--version"


def version() -> None:
    """Print the version of angr, which takes no import of it."""
    try:
        found = {"version": importlib.metadata.version("angr")}
    except importlib.metadata.PackageNotFoundError as error:
        found = {"missing": str(error)}
    json.dump(found, sys.stdout)


def main(path: str) -> None:
    """Print the answer: facts, functions [address, name], blocks [function, address, bytes, …]."""
    out = os.fdopen(os.dup(1), "w")
    # Whatever the analysis prints goes elsewhere.
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import angr
    except ImportError as error:
        json.dump({"missing": str(error)}, out)
        out.flush()
        sys.exit(MISSING)
    logging.disable(logging.CRITICAL)
    started = time.process_time()
    project = angr.Project(path, auto_load_libs=False)
    graph = project.analyses.CFGFast(normalize=True)
    seconds = time.process_time() - started
    # Not what `getrusage` says: that begins with the pages of the process that started this one.
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    answer = {"seconds": seconds, "peak": peak, "version": angr.__version__}
    json.dump(answer | _columns(project, graph), out)
    out.flush()
    # Taking the analysis apart takes long, and nothing is left to be written.
    os._exit(0)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _columns(project: Any, graph: Any) -> dict[str, Any]:
    program = project.loader.main_object
    base = program.mapped_base - program.linked_base
    functions: list[tuple[int, str]] = []
    blocks: list[tuple[int, int, str, list[int]]] = []
    padding: list[int] = []
    ways: dict[int, list[int]] = {}
    for source, target, facts in graph.graph.edges(data=True):
        inside = not target.is_simprocedure and not target.is_syscall
        if inside and facts.get("jumpkind") != "Ijk_Ret":
            ways.setdefault(source.addr, []).append(target.addr - base)
    for function in graph.kb.functions.values():
        if function.is_plt or function.is_simprocedure or function.is_syscall:
            continue
        if function.is_alignment:
            padding += [address - base for address in function.block_addrs_set]
            continue
        symbol = program.symbols_by_addr.get(function.addr)
        name = symbol.name if symbol is not None else ""
        number = len(functions)
        functions.append((function.addr - base, name))
        for address in sorted(function.block_addrs_set):
            node = graph.model.get_any_node(address)
            if node is not None and node.size and program.contains_addr(address):
                code = project.loader.memory.load(address, node.size).hex()
                blocks.append((number, address - base, code, sorted(ways.get(address, ()))))
    return {
        "bits": project.arch.bits,
        "functions": functions,
        "blocks": blocks,
        "padding": sorted(padding),
    }


if __name__ == "__main__":
    if sys.argv[1] == VERSION:
        version()
    else:
        main(sys.argv[1])
