"""Text that nobody has checked is read in a child first: MLIR's reader may end the process.

MLIR reads brackets inside of brackets by calling itself, so a small file can exhaust the stack.
The child reads with half of the stack that this process has: what it survives is read here again.
"""

import threading
from typing import Any

from tokmill.base.children.child import Limits
from tokmill.base.children.child_calls import ChildDied, shared
from tokmill.base.errors import TokmillError

LIMITS = Limits(seconds=300, memory=8 << 30)
STACK = 4 << 20
"""Bytes; a process usually has 8 MiB."""


def check(text: str, where: str, *, whole: bool = True, seconds: float = LIMITS.seconds) -> None:
    """Read a module in a child, as `problem.of_text` does, or as `cut.cut` if not `whole`.

    Raises the errors of these functions but `cut.NotSchedulable`, and `TokmillError` if the child
    dies of it.
    """
    try:
        child = shared("tokmill.mlir.modules.guard:read", LIMITS)
        child.limits = LIMITS._replace(seconds=min(LIMITS.seconds, seconds))
        child(text, where, whole)
    except ChildDied as died:
        why = died.ended.why() if died.ended else "ended"
        raise TokmillError(
            f"MLIR cannot read the module: its reader {why}",
            where=where,
            hint="is it very large, or nested very deeply?"
            if seconds >= LIMITS.seconds
            else "allow more by --max-time",
        ) from None


def read(text: str, where: str, whole: bool) -> None:
    """Read a module with a small stack; runs in the child."""
    from tokmill.mlir.modules import cut, problem

    raised: list[BaseException] = []

    def run() -> Any:
        try:
            (problem.of_text if whole else cut.cut)(text, where)
        except cut.NotSchedulable:
            pass  # It was read without harm; `cut.cut` says the rest.
        except BaseException as error:
            raised.append(error)

    before = threading.stack_size(STACK)
    thread = threading.Thread(target=run)
    thread.start()
    threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
