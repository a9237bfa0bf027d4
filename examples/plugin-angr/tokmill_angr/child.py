"""Prints angr's CFGFast of a program as JSON: the script that the lifter runs in a child process.

It imports nothing of tokmill and is run by its path in isolated mode, so that any interpreter with
angr can run it.
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
    """Print the version of angr, without importing it."""
    try:
        found = {"version": importlib.metadata.version("angr")}
    except importlib.metadata.PackageNotFoundError as error:
        found = {"missing": str(error)}
    json.dump(found, sys.stdout)


def main(path: str) -> None:
    """Print the answer: facts, functions [address, name], blocks [function, address, bytes, …]."""
    out = os.fdopen(os.dup(1), "w")
    # Output of the analysis goes to stderr.
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
    # The value of `getrusage` would include the pages of the parent process.
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    answer = {"seconds": seconds, "peak": peak, "version": angr.__version__}
    json.dump(answer | _columns(project, graph), out)
    out.flush()
    # A normal exit would take long to free the analysis, and everything is written.
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
