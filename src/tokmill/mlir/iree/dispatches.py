"""The dispatches of a model as IREE forms them, each as a module of its own that can be measured.

IREE fuses operations into dispatches: a product with its bias and relu, a convolution that
writes into the padded input of the next. Tiles that are best for an operation alone need not be
best there. So a model is compiled to IREE's phase `flow`, where dispatches are formed, and cut.
Compilation of such a module goes on from that phase.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from tokmill.mlir.modules.problem import Problem

PHASE = "flow"
_NAME = r'@(?:"[^"]*"|[^\s:(\[]+)'
_CALL = re.compile(
    rf"\s*%\w+(?::\d+)? = flow\.dispatch ({_NAME})::({_NAME})\(([^()]*)\)"
    r"(?: \{[^{}]*\})? : \(([^()]*)\) -> (\([^()]*\)|[^()]*)"
)
_TENSOR = re.compile(r"tensor<(?:\d+x)*\w+>")
_BEGIN = "flow.executable private "


class Cut(NamedTuple):
    """The dispatches of a model."""

    problems: list[Problem]
    """One a different dispatch; its operations are not known before a space says them."""
    counts: list[int]
    """How often each runs when the model runs once."""
    skipped: list[tuple[str, str]]
    """Name of a dispatch and why it cannot run alone, an entry a call."""


def is_one(text: str) -> bool:
    """Say whether a module is a dispatch that `cut` made."""
    return _BEGIN in text


def cut(text: str) -> Cut:
    """Cut a module in the phase `flow`, as the compiler prints it, into its dispatches."""
    head, blocks = _blocks(text)
    bodies = {_first(lines[0], _BEGIN): "\n".join(lines) for lines in blocks if _BEGIN in lines[0]}
    counts: Counter[tuple[str, ...]] = Counter()
    skipped: list[tuple[str, str]] = []
    for lines in blocks:
        # What initialises weights runs once, when the model is loaded.
        if _BEGIN in lines[0] or "util.initializer" in lines[0]:
            continue
        for line in lines:
            if " = flow.dispatch " not in line:
                continue
            call = _CALL.fullmatch(line)
            name = _first(line, "flow.dispatch ")
            if call is None or call[1] not in bodies:
                skipped.append((name, "its operands are packed or of unknown sizes"))
                continue
            parts = _main(call)
            if parts is None:
                skipped.append((name, "it takes or gives what is no tensor of fixed sizes"))
            else:
                counts[(call[1], call[2], parts)] += 1
    problems = []
    for executable, entry, main in counts:
        short = entry.strip('@"').partition("_dispatch_")[2] or entry
        whole = "\n".join([*head, bodies[executable], main, "}", ""])
        problems.append(Problem(f"dispatch {short}", whole, ()))
    return Cut(problems, list(counts.values()), skipped)


def _blocks(text: str) -> tuple[list[str], list[list[str]]]:
    """Return what stands before the blocks of a module, and its blocks as lines."""
    head: list[str] = []
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("#", "module")) or "util.global private @__device_" in line:
            head.append(line)
        elif line.startswith("  ") and not line.startswith(("   ", "  }")):
            blocks.append([line])
        elif blocks and line.startswith("  "):
            blocks[-1].append(line)
    return head, blocks


def _first(line: str, after: str) -> str:
    found = re.match(_NAME, line.partition(after)[2])
    return found[0] if found else ""


def _main(call: re.Match[str]) -> str | None:
    """Return a function that calls a dispatch; None if its operands are not tensors alone."""
    executable, entry, given, kinds, results = call.groups()
    names = [each.strip() for each in given.split(",") if each.strip()]
    types = [each.strip() for each in kinds.split(",") if each.strip()]
    made, tied = [], []
    for each in (one.strip() for one in results.strip("()").split(",")):
        # A result may be written over an operand: `%5`, or `%5 as tensor<…>`.
        name, _, other = each.partition(" as ")
        if name.startswith("%"):
            place = names.index(name)
            made.append(other or types[place])
            tied.append(f"%i{place}" + (f" as {other}" if other else ""))
        else:
            made.append(name)
            tied.append(name)
    if not all(_TENSOR.fullmatch(one) for one in (*types, *made)):
        return None
    inputs = ", ".join(f"%b{place}: !hal.buffer_view" for place in range(len(types)))
    outputs = ", ".join(["!hal.buffer_view"] * len(made))
    declared = ", ".join(f"%input{place}: {one}" for place, one in enumerate(types))
    given_back = ", ".join(f"%output{place}: {one}" for place, one in enumerate(made))
    value = "%r" if len(made) == 1 else f"%r:{len(made)}"
    lines = [
        f"  util.func public @main({inputs}) -> ({outputs}) attributes {{iree.abi.stub, "
        f'iree.reflection = {{iree.abi.declaration = "sync func @main({declared}) -> '
        f'({given_back})"}}}} {{',
        *[
            f'    %i{place} = hal.tensor.import %b{place} "input{place}" : '
            f"!hal.buffer_view -> {one}"
            for place, one in enumerate(types)
        ],
        f"    {value} = flow.dispatch {executable}::{entry}"
        f"({', '.join(f'%i{place}' for place in range(len(types)))}) : ({', '.join(types)}) -> "
        + (tied[0] if len(tied) == 1 else f"({', '.join(tied)})"),
        *[
            f"    %o{place} = hal.tensor.export %r{f'#{place}' if len(made) > 1 else ''} "
            f'"output{place}" : {one} -> !hal.buffer_view'
            for place, one in enumerate(made)
        ],
        f"    util.return {', '.join(f'%o{place}' for place in range(len(made)))} : {outputs}",
        "  }",
    ]
    return "\n".join(lines)
