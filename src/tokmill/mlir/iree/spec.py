"""Tuning specs of IREE: which operations get which `lowering_config`, as a file for `iree-compile`.

An operation is matched by what it computes (its indices, types and sizes), not by its name: IREE
generalises named operations at some levels of optimisation, and a match by name then fails
without a word. A convolution with a batch of one loses its batch before specs are applied and
gets it back behind them, without its configuration. So such a spec gives it back itself, first.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

HEADER = "// tokmill tuning spec, version 1: "
_OP, _PARAM = "!transform.any_op", "!transform.any_param"
_INTEGER = "!transform.param<i64>"


class Config(msgspec.Struct, frozen=True):
    """How an operation is tiled."""

    levels: dict[str, tuple[int, ...]]
    """Level → a tile for each loop; 0 for none."""
    pipeline: str
    """`DoubleTilingExpert`, …"""

    @property
    def text(self) -> str:
        """Return the attribute `lowering_config` as IREE prints it."""
        levels = ", ".join(
            f"{name} = [{', '.join(map(str, sizes))}]"
            for name, sizes in sorted(self.levels.items())
        )
        return f"#iree_cpu.lowering_config<{levels}>"


class Indexed(msgspec.Struct, frozen=True):
    """An operand: its shape, type, and the factors of the loops in its indices."""

    shape: tuple[int, ...]
    element: str
    matrix: list[list[int]]
    """A row a dimension: the factor of each loop, and the constant."""
    map: str
    """`affine_map<…>`."""


class Root(msgspec.Struct, frozen=True):
    """The operation that decides how a dispatch is tiled, and IREE's choice for it."""

    name: str
    kind: str
    """One of `operations.KINDS`."""
    matcher: str
    """`contraction`, `convolution` or `structured`."""
    bounds: tuple[int, ...]
    parallel: tuple[bool, ...]
    accesses: list[Indexed]
    """Inputs, and the output last."""
    arithmetic: tuple[int, ...]
    config: Config
    vector: int = 64
    """Bytes of a vector of the processor that code is made for."""


def matchable(root: Root) -> bool:
    """Return whether a spec can find such an operation."""
    return root.matcher != "" and len(root.config.levels) > 0


def identity(root: Root) -> str:
    """Return what a spec finds an operation by: equal ones cannot have different tiles."""
    return "\n".join(_MATCHERS[root.matcher](root))


def text(configs: Sequence[tuple[Root, Config]], comment: str) -> str:
    """Return a spec; `comment` is one line that stands in its header."""
    parts, pairs, batchless = [], [], False
    for number, (root, config) in enumerate(configs):
        parts.append(_matcher(f"match_{number}", root, config))
        pairs.append(f"@match_{number} -> @apply")
        batchless |= root.kind in ("conv", "pooling") and root.bounds[0] == 1
    first = (
        "    %all = transform.apply_registered_pass "
        f'"iree-codegen-insert-batch-dim-for-batchless-conv" to %root : ({_OP}) -> {_OP}\n'
    )
    within = "%all" if batchless else "%root"
    return (
        f"{HEADER}{comment}\n"
        "module attributes {transform.with_named_sequence} {\n"
        f"  transform.named_sequence @apply(%op: {_OP} {{transform.readonly}}, "
        f"%info: {_PARAM} {{transform.readonly}}) {{\n"
        f'    transform.annotate %op "compilation_info" = %info : {_OP}, {_PARAM}\n'
        "    transform.yield\n  }\n"
        + "".join(parts)
        + f"  transform.named_sequence @__kernel_config(%root: {_OP} {{transform.consumed}}) "
        f"-> {_OP} attributes {{iree_codegen.tuning_spec_entrypoint}} {{\n"
        + (first if batchless else "")
        + f"    %done = transform.foreach_match in {within} {', '.join(pairs)} : "
        f"({_OP}) -> {_OP}\n"
        f"    transform.yield %done : {_OP}\n  }}\n}}\n"
    )


def hits(text: str, roots: Sequence[Root]) -> dict[str, int]:
    """Return for matchers of a spec how many roots of a configured module obey them.

    A matcher is named by `identity`; one that no root obeys is not there.
    """
    found: dict[str, int] = {}
    for root in roots:
        if matchable(root) and _body(root, root.config) in text:
            found[identity(root)] = found.get(identity(root), 0) + 1
    return found


def _matcher(name: str, root: Root, config: Config) -> str:
    return (
        f"  transform.named_sequence @{name}(%op: {_OP} {{transform.readonly}}) "
        f"-> ({_OP}, {_PARAM}) {{\n{_body(root, config)}  }}\n"
    )


def _body(root: Root, config: Config) -> str:
    lines = _MATCHERS[root.matcher](root)
    info = (
        f"#iree_codegen.compilation_info<lowering_config = {config.text}, translation_info = "
        f"#iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<{config.pipeline}>>>"
    )
    return (
        "".join(f"    {line}\n" for line in lines)
        + f"    %info = transform.param.constant {info} -> {_PARAM}\n"
        f"    transform.yield %op, %info : {_OP}, {_PARAM}\n"
    )


def _contraction(root: Root) -> list[str]:
    left, right, out = (_loops(one) for one in root.accesses)
    every = range(len(root.bounds))
    sizes = {
        "batch": [loop for loop in every if loop in left & right & out],
        "m": [loop for loop in every if loop in (left & out) - right],
        "n": [loop for loop in every if loop in (right & out) - left],
        "k": [loop for loop in every if loop in (left & right) - out],
    }
    return [
        f"{', '.join(f'%{name}' for name in sizes)} = transform.iree.match.contraction %op, "
        f"{_types(root)} : {_OP} -> {_INTEGER}",
        *[_equal(name, [root.bounds[loop] for loop in loops]) for name, loops in sizes.items()],
    ]


def _convolution(root: Root) -> list[str]:
    image, kernel, out = (_loops(one) for one in root.accesses)
    every = range(len(root.bounds))
    mixed = [row for row in root.accesses[0].matrix if sum(map(bool, row[:-1])) > 1]
    inside = {loop for row in mixed for loop in every if row[loop]}
    sizes = {
        "batch": [loop for loop in every if loop in (image & out) - kernel - inside],
        "out_image": [loop for loop in every if loop in inside & out],
        "out_channel": [loop for loop in every if loop in (kernel & out) - image],
        "filter": [loop for loop in every if loop in inside - out],
        "in_channel": [loop for loop in every if loop in (image & kernel) - out - inside],
        "depth": [loop for loop in every if loop in image & kernel & out],
    }
    strides = [next(row[loop] for row in mixed if row[loop]) for loop in sizes["out_image"]]
    dilations = [next(row[loop] for row in mixed if row[loop]) for loop in sizes["filter"]]
    names = [*sizes, "strides", "dilations"]
    return [
        f"{', '.join(f'%{name}' for name in names)} = transform.iree.match.convolution %op, "
        f"{_types(root)} : {_OP} -> {_INTEGER}",
        *[_equal(name, [root.bounds[loop] for loop in loops]) for name, loops in sizes.items()],
        _equal("strides", strides),
        _equal("dilations", dilations),
    ]


def _structured(root: Root) -> list[str]:
    """Match by rank, sizes, and the number of operands."""
    lines = [
        f"transform.match.structured failures(propagate) %op : {_OP} {{",
        f"^bb0(%one: {_OP}):",
        f"  %rank = transform.match.structured.rank %one : ({_OP}) -> {_INTEGER}",
        *_is("rank", "rank", len(root.bounds)),
        f"  %inputs = transform.match.structured.num_inputs %one : ({_OP}) -> {_INTEGER}",
        *_is("inputs", "inputs", len(root.accesses) - 1),
    ]
    for loop, bound in enumerate(root.bounds):
        kind = "parallel" if root.parallel[loop] else "reduction"
        lines += [
            # The short form of this operation does not take the kind of a loop in LLVM 24.
            f'  %d{loop} = "transform.match.structured.dim"(%one) '
            f"<{{raw_dim_list = array<i64: {loop}>, {kind}}}> : ({_OP}) -> {_INTEGER}",
            *_is(f"d{loop}", f"b{loop}", bound),
        ]
    return [*lines, "  transform.match.structured.yield", "}"]


def _is(value: str, name: str, number: int) -> list[str]:
    return [
        f"  %{name}_is = transform.param.constant {number} : i64 -> {_INTEGER}",
        f"  transform.match.param.cmpi eq %{value}, %{name}_is : {_INTEGER}",
    ]


_MATCHERS = {
    "contraction": _contraction,
    "convolution": _convolution,
    "structured": _structured,
}


def _types(root: Root) -> str:
    left, right, out = (one.element for one in root.accesses)
    maps = ", ".join(one.map for one in root.accesses)
    return f"lhs_type = {left}, rhs_type = {right}, output_type = {out}, indexing_maps = [{maps}]"


def _equal(name: str, sizes: list[int]) -> str:
    return f"transform.iree.match.dims_equal %{name}, {sizes} : {_INTEGER}"


def _loops(one: Indexed) -> set[int]:
    return {loop for row in one.matrix for loop, factor in enumerate(row[:-1]) if factor}
