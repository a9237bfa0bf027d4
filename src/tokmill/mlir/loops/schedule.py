"""Schedules: lists of actions on the operations of a module, as transform-dialect files.

An action names its operation by tag. `text` writes a whole schedule as a module of its own, which
MLIR's transform interpreter applies; the actions stand in a comment, so that `read` finds them.
"""

from collections.abc import Sequence

import msgspec

from tokmill.base.errors import TokmillError
from tokmill.base.headers import loads_json, refused


class Action(msgspec.Struct, frozen=True, tag_field="action", forbid_unknown_fields=True):
    """One change of one operation; `op` is its tag."""

    op: str


class Tile(Action, frozen=True, tag="tile"):
    """Cut loops into tiles; 0 leaves a loop whole."""

    sizes: tuple[int, ...]


class Parallel(Action, frozen=True, tag="parallel"):
    """Cut parallel loops into tiles, with one parallel loop over them; reductions stay whole."""

    sizes: tuple[int, ...]


class Fuse(Action, frozen=True, tag="fuse"):
    """Cut parallel loops into tiles, and compute the last producer's part in each."""

    sizes: tuple[int, ...]
    producer: str


class Interchange(Action, frozen=True, tag="interchange"):
    """Reorder loops: loop `order[i]` comes at place i."""

    order: tuple[int, ...]


class Pack(Action, frozen=True, tag="pack"):
    """Lay the operands out in blocks of these sizes; 0 leaves a loop as it is."""

    sizes: tuple[int, ...]


class Im2col(Action, frozen=True, tag="im2col"):
    """Make a product of matrices of a convolution."""


class Vectorize(Action, frozen=True, tag="vectorize"):
    """Make vector operations of the innermost tile; nothing comes after it."""


class Stop(Action, frozen=True, tag="stop"):
    """Leave the operation as it is now."""


AnyAction = Tile | Parallel | Fuse | Interchange | Pack | Im2col | Vectorize | Stop
Schedule = tuple[AnyAction, ...]

HEADER = "// tokmill schedule, version 1: "
MOST = 1 << 20
"""Bytes that the line of actions may have."""

_ANY = "!transform.any_op"


def text(schedule: Schedule, decomposed: Sequence[str] = ()) -> str:
    """Return a schedule as a module in the transform dialect.

    Operations of `decomposed` are made one-dimensional convolutions before they are vectorized.
    """
    lines: list[str] = []
    for number, action in enumerate(schedule):
        lines += _action(action, number, action.op in decomposed)
    actions = msgspec.json.encode(schedule).decode()
    parts = msgspec.json.encode(list(decomposed)).decode()
    inner = "\n".join(f"    {line}" for line in lines)
    return (
        f"{HEADER}{actions} {parts}\n"
        "module attributes {transform.with_named_sequence} {\n"
        f"  transform.named_sequence @__transform_main(%module: {_ANY}) {{\n"
        f"{inner}\n    transform.yield\n  }}\n}}\n"
    )


def read(text: str, where: str) -> Schedule:
    """Return the actions of a schedule that `text` wrote.

    Raises `TokmillError` if the first line does not hold them.
    """
    first, _, _ = text.partition("\n")
    wrong = TokmillError(
        "this is not a schedule of tokmill: its first line does not list actions",
        where=where,
        hint=f"it begins with {HEADER!r}",
    )
    if not first.startswith(HEADER) or len(first) > MOST:
        raise wrong
    line = first[len(HEADER) :]
    with refused(
        "the actions of the schedule cannot be read", where, hint="make the schedule again"
    ):
        # Behind the actions stands which operations are decomposed.
        result: Schedule = loads_json(line.rpartition(" [")[0].encode(), tuple[AnyAction, ...])
    return result


def _action(action: AnyAction, number: int, decompose: bool) -> list[str]:
    if isinstance(action, Stop):
        return []
    op = f"%o{number}"
    lines = [_match(op, action.op)]
    if isinstance(action, Tile):
        lines.append(_tile(f"%t{number}", op, action.sizes))
    elif isinstance(action, Parallel):
        lines.append(_forall(f"%t{number}", op, action.sizes))
    elif isinstance(action, Fuse):
        lines += [
            _forall(f"%t{number}", op, action.sizes),
            _match(f"%q{number}", action.producer),
            f"%u{number}, %v{number} = transform.structured.fuse_into_containing_op %q{number} "
            f"into %t{number}f : ({_ANY}, {_ANY}) -> ({_ANY}, {_ANY})",
        ]
    elif isinstance(action, Interchange):
        order = ", ".join(map(str, action.order))
        lines += [
            f"%g{number} = transform.structured.generalize {op} : ({_ANY}) -> {_ANY}",
            f"%i{number} = transform.structured.interchange %g{number} "
            f"iterator_interchange = [{order}] : ({_ANY}) -> {_ANY}",
            _tag(f"%i{number}", action.op, number),
        ]
    elif isinstance(action, Pack):
        lines += _pack(op, number, action)
    elif isinstance(action, Im2col):
        lines += [
            f"%x{number}, %c{number} = transform.structured.convert_conv2d_to_img2col {op} : "
            f"({_ANY}) -> ({_ANY}, {_ANY})",
            # It returns what it made last, the reshape of the result: the product of matrices makes
            # its operand.
            f"%y{number} = transform.get_producer_of_operand %c{number}[0] : ({_ANY}) -> {_ANY}",
            _tag(f"%y{number}", action.op, number),
        ]
    else:
        last = op
        if decompose:
            last = f"%d{number}"
            lines.append(f"{last} = transform.structured.decompose {op} : ({_ANY}) -> {_ANY}")
        lines.append(f"transform.structured.vectorize {last} : {_ANY}")
    return lines + _clean(number)


def _match(name: str, tag: str) -> str:
    return (
        f'{name} = transform.structured.match attributes {{tag = "{tag}"}} in %module : '
        f"({_ANY}) -> {_ANY}"
    )


def _tag(name: str, tag: str, number: int) -> str:
    return (
        f'%p{number} = transform.param.constant "{tag}" -> !transform.any_param\n'
        f'    transform.annotate {name} "tag" = %p{number} : {_ANY}, !transform.any_param'
    )


def _tile(name: str, op: str, sizes: tuple[int, ...]) -> str:
    loops = sum(size > 0 for size in sizes)
    results = ", ".join([_ANY] * (loops + 1))
    return (
        f"{name}, {name}l:{loops} = transform.structured.tile_using_for {op} tile_sizes "
        f"[{', '.join(map(str, sizes))}] : ({_ANY}) -> ({results})"
    )


def _forall(name: str, op: str, sizes: tuple[int, ...]) -> str:
    return (
        f"{name}, {name}f = transform.structured.tile_using_forall {op} tile_sizes "
        f"[{', '.join(map(str, sizes))}] : ({_ANY}) -> ({_ANY}, {_ANY})"
    )


def _pack(op: str, number: int, action: Pack) -> list[str]:
    sizes = ", ".join(map(str, action.sizes))
    kinds = '!transform.op<"linalg.pack">', '!transform.op<"linalg.unpack">'
    return [
        f"%k{number} = transform.structured.pack {op} packed_sizes = [{sizes}] : "
        f'({_ANY}) -> !transform.op<"linalg.generic">',
        f'%kk{number} = transform.cast %k{number} : !transform.op<"linalg.generic"> to {_ANY}',
        _tag(f"%kk{number}", action.op, number),
        f'%lp{number} = transform.structured.match ops{{["linalg.pack"]}} in %module : '
        f"({_ANY}) -> {kinds[0]}",
        f"%a{number}, %b{number}, %c{number} = transform.structured.lower_pack %lp{number} : "
        f'({kinds[0]}) -> (!transform.op<"tensor.pad">, !transform.op<"tensor.expand_shape">, '
        f'!transform.op<"linalg.transpose">)',
        f'%lu{number} = transform.structured.match ops{{["linalg.unpack"]}} in %module : '
        f"({_ANY}) -> {kinds[1]}",
        f"%e{number}, %f{number}, %h{number}, %j{number}, %m{number} = "
        f"transform.structured.lower_unpack %lu{number} : ({kinds[1]}) -> "
        '(!transform.op<"tensor.empty">, !transform.op<"linalg.transpose">, '
        '!transform.op<"tensor.collapse_shape">, !transform.op<"tensor.extract_slice">, '
        '!transform.op<"linalg.copy">)',
    ]


def _clean(number: int) -> list[str]:
    # No CSE: of two operations that share a `tensor.empty` or `linalg.fill`, fusing one into the
    # other would let both write into one buffer.
    name = f"%z{number}"
    return [
        f'{name} = transform.structured.match ops{{["func.func"]}} in %module : ({_ANY}) -> {_ANY}',
        f"transform.apply_patterns to {name} {{ transform.apply_patterns.canonicalization "
        f"}} : {_ANY}",
    ]
