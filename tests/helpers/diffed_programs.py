"""Two small programs, written by hand, and what became of their functions."""

import numpy as np

from tokmill.x86.diff.result import Diff
from tokmill.x86.graph import Edge, Graph
from x86_graphs import Block, graph_of

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;\u202e\x1b[31m\u2028'\""
PUSH, POP, RET = b"\x55", b"\x5d", b"\xc3"
LOAD_1, LOAD_2 = b"\xb8\x01\x00\x00\x00", b"\xb8\x02\x00\x00\x00"
XOR = b"\x31\xc0"


def jump(target: int, at: int) -> bytes:
    """A conditional jump of two bytes."""
    return b"\x75" + (target - at - 2).to_bytes(1, "little", signed=True)


def two() -> tuple[Graph, Graph, Diff]:
    """Two programs: `main` changed, `same` did not, `gone` is in A alone, `new` in B."""
    names = [HOSTILE, "same", "gone"]
    a = graph_of({
        0x1000: [
            Block(0x1000, [PUSH, LOAD_1, jump(0x1009, 0x1006)],
                  [(Edge.FALL, 0x1008), (Edge.BRANCH, 0x1009)]),
            Block(0x1008, [RET], [(Edge.RETURN, 0)]),
            Block(0x1009, [POP, RET], [(Edge.RETURN, 0)]),
        ],
        0x2000: [Block(0x2000, [XOR, RET], [(Edge.RETURN, 0)])],
        0x3000: [Block(0x3000, [RET], [(Edge.RETURN, 0)])],
    }, names, "old")  # fmt: skip
    b = graph_of({
        0x1000: [
            Block(0x1000, [PUSH, XOR, LOAD_2, jump(0x100A, 0x1008)],
                  [(Edge.FALL, 0x1009), (Edge.BRANCH, 0x100A)]),
            Block(0x1009, [RET], [(Edge.RETURN, 0)]),
            Block(0x100A, [POP, RET], [(Edge.RETURN, 0)]),
        ],
        0x2000: [Block(0x2000, [XOR, RET], [(Edge.RETURN, 0)])],
        0x4000: [Block(0x4000, [POP, RET], [(Edge.RETURN, 0)])],
    }, ["main", "same", "new"], "new </title>")  # fmt: skip
    diff = Diff(
        function_a=np.array([0, 1]), function_b=np.array([0, 1]),
        similarity=np.array([0.9999, 1], "f4"), confidence=np.array([0.5, 1], "f4"),
        reason=np.array([3, 0], "u1"), match_blocks=np.array([0, 2, 3]),
        block_a=np.array([0, 2, 3]), block_b=np.array([0, 2, 3]),
        block_similarity=np.array([0.6, 1, 1], "f4"), block_reason=np.array([7, 9, 0], "u1"),
        deleted=np.array([2]), inserted=np.array([2]),
        deleted_blocks=np.array([1]), inserted_blocks=np.array([1]),
        left_out={"places <b> that could not be followed": 3},
    )  # fmt: skip
    return a, b, diff
