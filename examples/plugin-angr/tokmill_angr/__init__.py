"""A lifter for tokmill: angr's CFGFast, which runs in a child process with limits.

angr needs old versions of many packages, so it may be installed in another environment: the
variable `TOKMILL_ANGR_PYTHON` names the interpreter there.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tokmill import plugins
from tokmill.base.children.child import Limits, run
from tokmill.base.errors import MachineError, MissingExtraError, TokmillError
from tokmill.base.headers import loads_json
from tokmill.x86.graph import Edge, Graph
from tokmill.x86.image.image import Program, offsets
from tokmill.x86.image.program import open_program

if TYPE_CHECKING:
    from iced_x86 import Instruction

VERSION = 2
"""Raised when the graph of some program changes."""
PYTHON = "TOKMILL_ANGR_PYTHON"
CHILD = Path(__file__).with_name("child.py")
SECONDS = 3600.0
MEMORY = 8 << 30
ANSWER = 60.0
"""Seconds in which the child must report its version."""
OUTPUT = 4 << 30
"""Largest size of an answer in bytes."""
HINT = "tokmill's own lifter needs much less time and memory: --lifter native"


class Answer(msgspec.Struct, frozen=True):
    """The output of the child; addresses are those of the file."""

    bits: int = 64
    functions: list[tuple[int, str]] = []
    """Address and name ("": none) of each function."""
    blocks: list[tuple[int, int, str, list[int]]] = []
    """Number of the function, address, bytes in hexadecimal, addresses of successors."""
    padding: list[int] = []
    """Addresses of blocks that angr regards as padding between functions."""
    seconds: float = 0.0
    """CPU time of loading and analysis, without imports."""
    peak: int = 0
    """Largest resident memory in bytes."""
    version: str = ""
    missing: str = ""
    """The module that could not be imported."""


def lift(path: Path | str, *, seconds: float = SECONDS, memory: int = MEMORY) -> Graph:
    """Return the control flow of a program as angr's CFGFast (normalized) finds it.

    Import stubs and padding are left out. Raises `TokmillError` for a file that is no x86 program
    and for an analysis that takes more than `seconds` or `memory` (anonymous resident bytes),
    `MissingExtraError` if angr is not installed.
    """
    program = open_program(path)
    if program.kind == "relocatable":
        raise TokmillError(
            "an object file, to which angr gives other addresses",
            where=str(path),
            hint="link it, or lift it with --lifter native",
        )
    return graph_of(analyse(path, seconds=seconds, memory=memory), program)


def packages() -> list[str]:
    """Return angr and its version; [] if it is not installed.

    Raises `MachineError` if its interpreter cannot be run.
    """
    version = _version_in(os.environ.get(PYTHON) or sys.executable)
    return [f"angr {version}"] if version else []


@functools.cache
def _version_in(interpreter: str) -> str:
    command = [interpreter, "-I", str(CHILD), "--version"]
    try:
        answer: Answer = loads_json(
            run(command, Limits(seconds=ANSWER), lifeline=False).out, Answer
        )
        return answer.version
    except OSError as error:
        raise _not_run(interpreter, error) from None
    except ValueError:
        return ""


def _not_run(interpreter: str, error: OSError) -> MachineError:
    return MachineError(f"{interpreter} cannot be run: {error.strerror}", hint=f"{PYTHON} names it")


def analyse(path: Path | str, *, seconds: float = SECONDS, memory: int = MEMORY) -> Answer:
    """Run angr on a program and return its answer; limits and errors are those of `lift`."""
    command = [os.environ.get(PYTHON) or sys.executable, "-I", str(CHILD), str(Path(path))]
    try:
        ended = run(command, Limits(seconds=seconds, memory=memory, output=OUTPUT))
    except OSError as error:
        raise _not_run(command[0], error) from None
    if ended.passed:
        raise TokmillError(f"angr {ended.why()}", where=str(path), hint=HINT)
    try:
        answer: Answer = loads_json(ended.out, Answer)
    except ValueError:
        raise TokmillError(f"angr {ended.why()}", where=str(path), hint=HINT) from None
    if answer.missing:
        raise MissingExtraError(
            f"angr cannot be imported: {answer.missing}",
            hint=f"set {PYTHON} to an interpreter that has it, or pip install 'tokmill-angr[angr]'",
        )
    return answer


def graph_of(answer: Answer, program: Program) -> Graph:
    """Return an answer as a graph; iced-x86 finds the instructions and the kinds of edges."""
    stubs = [(one.address, one.stop) for one in program.sections if one.stubs]
    begun = {(number, address) for number, address, _, _ in answer.blocks}
    order = [
        number
        for number, (address, _) in sorted(enumerate(answer.functions), key=lambda one: one[1])
        if (number, address) in begun and not any(low <= address < high for low, high in stubs)
    ]
    place = {number: i for i, number in enumerate(order)}
    kept = [block for block in answer.blocks if block[0] in place]
    entry = [address for address, _ in answer.functions]
    # From the entry on, then what lies before it.
    blocks = sorted(kept, key=lambda one: (place[one[0]], one[1] < entry[one[0]], one[1]))
    decoder = plugins.require("iced_x86").Decoder
    lengths: list[int] = []
    count, edge_count, calls = [], [], {}
    edges: list[tuple[int, int]] = []
    for _, address, code, ways in blocks:
        instructions = list(decoder(answer.bits, bytes.fromhex(code), ip=address))
        lengths += map(len, instructions)
        count.append(len(instructions))
        found = _edges(instructions[-1], ways)
        edges += found
        edge_count.append(len(found))
        if (0, Edge.INDIRECT) in found:
            calls[instructions[-1].ip] = instructions[-1].is_call_near_indirect
    owner = np.asarray([place[block[0]] for block in blocks], np.int64)
    return Graph(
        program=Path(program.name).name,
        bits=answer.bits,
        function_address=np.asarray([answer.functions[i][0] for i in order], np.uint64),
        function_name=[answer.functions[i][1] for i in order],
        function_blocks=np.searchsorted(owner, np.arange(len(order) + 1)).astype(np.int64),
        block_address=np.asarray([block[1] for block in blocks], np.uint64),
        block_bytes=offsets(np.asarray([len(block[2]) // 2 for block in blocks], np.int64)),
        code=np.frombuffer(bytes.fromhex("".join(block[2] for block in blocks)), np.uint8),
        block_instructions=offsets(np.asarray(count, np.int64)),
        lengths=np.asarray(lengths, np.uint8),
        block_edges=offsets(np.asarray(edge_count, np.int64)),
        edge_target=np.asarray([target for target, _ in edges], np.uint64),
        edge_kind=np.asarray([kind for _, kind in edges], np.uint8),
        unresolved=[
            (address, "indirect call" if calls[address] else "indirect jump")
            for address in sorted(calls)
        ],
    )


def _edges(last: Instruction, ways: list[int]) -> list[tuple[int, int]]:
    """Return the edges (target, kind) of a block with this last instruction; `FALL` comes last.

    `ways`: the addresses of angr's successors. A direct target is read from the instruction,
    because angr gives no successor in import stubs.
    """
    flows = plugins.require("iced_x86").FlowControl
    direct = {
        flows.UNCONDITIONAL_BRANCH: Edge.JUMP,
        flows.CONDITIONAL_BRANCH: Edge.BRANCH,
        flows.XBEGIN_XABORT_XEND: Edge.BRANCH,
        flows.CALL: Edge.CALL,
    }
    flow, found = last.flow_control, []
    falls = flow not in (flows.UNCONDITIONAL_BRANCH, flows.INDIRECT_BRANCH, flows.RETURN)
    if flow in direct and last.near_branch_target:
        found.append((last.near_branch_target, int(direct[flow])))
    elif flow in (flows.INDIRECT_BRANCH, flows.INDIRECT_CALL):
        known = sorted({way for way in ways if not falls or way != last.next_ip})
        found += [(way, int(Edge.INDIRECT)) for way in known or [0]]
    elif flow == flows.RETURN:
        found.append((0, int(Edge.RETURN)))
    if falls and last.next_ip in ways:
        found.append((last.next_ip, int(Edge.FALL)))
    return found
