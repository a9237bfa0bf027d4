"""A model as single operations: each linalg operation of a module becomes a problem of its own.

The module is plain linalg on tensors, or what `iree-compile --compile-to=input` writes, printed
in the generic form that needs no knowledge of IREE's dialects. Operands become arguments; a
tensor that is filled with a constant is filled in the problem too. Equal operations are one
problem with a count.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.mlir.modules import operations, problem, toolkit
from tokmill.mlir.modules.problem import Problem

_FREE = {"arith.constant", "tensor.empty", "linalg.fill", "linalg.yield", "linalg.index"}
"""Operations that prepare data for others, and belong to them."""
_FRAME = {"return", "call", "import", "export", "barrier", "load", "join", "create"}
"""Last words of names of operations that frame a function, such as `util.return`."""
_INHERENT = re.compile(r"(?!tag$|lowering_config$|compilation_info$)[a-zA-Z]\w*")
"""Names of attributes that say what an operation computes; others are notes of other tools."""
MOST_RUNS = (1 << 64) - 1
"""How often an operation runs at most: functions that call each other twice double with each, and
a larger count says no more."""
_DEEPEST = 8
"""Operations on scalars in a row that are taken along to a problem."""


class NotSchedulable(TokmillError):
    """A module has no operation that can be scheduled alone."""


class Cut(NamedTuple):
    """The operations of a module, and what is left out of it."""

    problems: list[Problem]
    """One a different operation, in the order of the module."""
    counts: list[int]
    """How often each runs when the module runs once."""
    skipped: list[tuple[str, str]]
    """Name of an operation and why it is no problem; an operation with equal ones is one entry."""
    skipped_counts: list[int]
    """How often each of these runs; 1 where nothing says how often."""


class _SkipError(Exception):
    """An operation that is no problem of its own; the message says why."""


def cut(text: str, where: str) -> Cut:
    """Cut the text of a module into its single operations; `where` names it in errors.

    Functions count as often as they are called, from those that nobody calls. What runs an
    unknown number of times (loops, branches), has shapes that are not known or too large, or
    is not of linalg is skipped with the reason.
    """
    inside = toolkit.context()
    inside.allow_unregistered_dialects = True
    module = toolkit.parse(text, inside, where)
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    skipped: list[tuple[str, str]] = []
    skipped_counts: list[int] = []
    with inside, toolkit.ir().Location.unknown():
        functions = _functions(module)
        for function, (often, why) in zip(functions, _runs(functions), strict=True):
            for view, around in _operations(function):
                try:
                    if why or around:
                        raise _SkipError(around or why)
                    alone = _alone(view)
                except _SkipError as skip:
                    skipped.append((view.name, str(skip)))
                    skipped_counts.append(1 if why or around else often)
                else:
                    counts[alone] += often
                    names[alone] = view.name
    return _checked(counts, names, Cut([], [], skipped, skipped_counts), where)


def _checked(modules: Counter[str], names: dict[str, str], into: Cut, where: str) -> Cut:
    """Put modules of one operation into a cut, as problems or as what is skipped."""
    for text, runs in modules.items():
        count = min(runs, MOST_RUNS)
        try:
            one = problem.of_text(text, f"{where}: {names[text]}")
            (operation,) = one.operations
            if not operation.bounds:
                raise TokmillError("it has no loops", hint="")
        except TokmillError as error:
            into.skipped.append((names[text], error.what))
            into.skipped_counts.append(count)
            continue
        sizes = "x".join(map(str, operation.bounds))
        name = f"{where}: {len(into.problems)} {names[text].removeprefix('linalg.')} {sizes}"
        into.problems.append(Problem(name, text, one.operations))
        into.counts.append(count)
    if not into.problems:
        reasons = Counter[str]()
        for (name, why), count in zip(into.skipped, into.skipped_counts, strict=True):
            reasons[f"{name}: {why}"] += count
        raise NotSchedulable(
            "no operation of the module can be scheduled"
            + "".join(f"; {count:,} × {reason}" for reason, count in reasons.most_common(3)),
            where=where,
            hint="lower it to linalg on tensors of fixed shapes first",
        )
    return into


def _functions(module: Any) -> list[Any]:
    """Return what stands at the top of a module: functions, also of dialects that are unknown."""
    result, modules = [], deque([module.operation])
    while modules:
        for block in modules.popleft().regions[0].blocks:
            for operation in block.operations:
                view = operation.operation
                if view.name == "builtin.module":
                    modules.append(view)
                elif len(view.regions):
                    result.append(view)
    return result


def _facts(view: Any) -> dict[str, str]:
    """Return the names that a function or a call has among its attributes.

    They are read from the printed form: attributes of unknown operations are not in `attributes`.
    """
    text = view.get_asm(print_generic_op_form=True, skip_regions=True, large_elements_limit=8)
    pairs = re.findall(r'\b(sym_name|sym_visibility|callee) = [@"]+([^",>}]*)', text)
    return {name: value.strip('"') for name, value in reversed(pairs)}


def _runs(functions: list[Any]) -> list[tuple[int, str]]:
    """Return for each function how often it runs, and why it cannot be cut ("" if it can)."""
    facts = [_facts(view) for view in functions]
    number = {each.get("sym_name", ""): place for place, each in enumerate(facts)}
    calls: dict[int, list[tuple[int, str]]] = defaultdict(list)
    waiting: Counter[int] = Counter()
    for caller, function in enumerate(functions):
        for view, around in _inner(function):
            callee = number.get(_facts(view).get("callee", "")) if _last(view) == "call" else None
            if callee is not None:
                calls[caller].append((callee, around))
                waiting[callee] += 1
    often = [0] * len(functions)
    unknown = [""] * len(functions)
    ready = deque(place for place in range(len(functions)) if not waiting[place])
    for place in ready:
        often[place] = int(facts[place].get("sym_visibility") != "private")
    done = set(ready)
    while ready:
        caller = ready.popleft()
        for callee, around in calls[caller]:
            often[callee] = min(often[callee] + often[caller], MOST_RUNS)
            unknown[callee] = unknown[callee] or unknown[caller] or around
            waiting[callee] -= 1
            if not waiting[callee]:
                ready.append(callee)
                done.add(callee)
    for place in range(len(functions)):
        if place not in done:
            unknown[place] = "control flow: its function calls itself"
        elif not often[place] and not unknown[place]:
            unknown[place] = "nobody calls its function"
    return list(zip(often, unknown, strict=True))


def _inner(function: Any) -> Iterator[tuple[Any, str]]:
    """Yield all operations of a function in order, each with the control flow around it or ""."""
    # A stack of iterators, as the nesting of a file is not trusted.
    stack = [_contents(function, "")]
    while stack:
        for view, around in stack[-1]:
            yield view, around
            if len(view.regions) and not view.name.startswith("linalg."):
                stack.append(_contents(view, f"control flow: inside of {view.name}"))
                break
        else:
            stack.pop()


def _contents(view: Any, around: str) -> Iterator[tuple[Any, str]]:
    for region in view.regions:
        blocks = list(region.blocks)
        if len(blocks) > 1:
            around = around or f"control flow: its function has {len(blocks)} blocks"
        for block in blocks:
            for operation in block.operations:
                yield operation.operation, around


def _operations(function: Any) -> Iterator[tuple[Any, str]]:
    initial = "" if _last(function) == "func" else f"control flow: inside of {function.name}"
    for view, around in _inner(function):
        if view.name in _FREE or _last(view) in _FRAME:
            continue
        named = view.name.startswith("linalg.")
        if named or any(map(_is_tensor, (*view.operands, *view.results))):
            yield view, around or initial


def _last(view: Any) -> str:
    return str(view.name).rpartition(".")[2]


def _is_tensor(value: Any) -> bool:
    return str(value.type).startswith("tensor<")


def _alone(view: Any) -> str:
    bindings, func = toolkit.ir(), plugins.require("torch_mlir.dialects.func")
    if not view.name.startswith("linalg."):
        raise _SkipError("it is not an operation of linalg")
    if not len(view.results):
        raise _SkipError("it works on memory, not on tensors")
    for value in (*view.operands, *view.results):
        try:
            operations.shape_of(value, "")
        except TokmillError as error:
            raise _SkipError(error.what) from None
    inits = len(view.operands) - len(view.results)
    copied: dict[Any, list[Any]] = {}
    arguments: dict[Any, None] = {}
    for place, value in enumerate(view.operands):
        chain = _chain(value, place >= inits)
        if chain is not None:
            copied[value] = chain
        elif _is_tensor(value):
            arguments[value] = None
        else:
            raise _SkipError(f"it takes a {value.type} that is computed before it")
    for value in _captured(view):
        chain = _chain(value, False)
        if chain is None:
            raise _SkipError(f"its body reads a {value.type} that is computed before it")
        copied[value] = chain
    module = bindings.Module.create()
    with bindings.InsertionPoint(module.body):
        kind = bindings.FunctionType.get(
            [value.type for value in arguments], [value.type for value in view.results]
        )
        block = func.FuncOp("main", kind).add_entry_block()
    new: dict[Any, Any] = dict(zip(arguments, block.arguments, strict=True))
    with bindings.InsertionPoint(block):
        for chain in copied.values():
            for link in chain:
                if link.results[0] not in new:
                    new[link.results[0]] = _copy(link, new).results[0]
        func.ReturnOp(list(_copy(view, new).results))
    return str(module)


def _chain(value: Any, filled: bool) -> list[Any] | None:
    """Return the operations that make a scalar constant, or an empty or filled tensor.

    None for other values. They stand in an order in which each has its operands before it.
    """
    result: list[Any] = []
    wanted = deque([value])
    while wanted:
        owner = wanted.popleft().owner
        if not hasattr(owner, "operation") or len(result) > _DEEPEST:
            return None
        view = owner.operation
        name, scalar = view.name, not any(map(_is_tensor, view.results))
        if not (
            (scalar and name.startswith("arith.") and len(view.results) == 1)
            or (filled and name in ("tensor.empty", "linalg.fill"))
        ):
            return None
        result.insert(0, view)
        wanted.extend(view.operands)
    return result


def _captured(view: Any) -> list[Any]:
    own: set[Any] = set()
    used: dict[Any, None] = {}
    for region in view.regions:
        for block in region.blocks:
            own.update(block.arguments)
            for operation in block.operations:
                if len(operation.operation.regions):
                    raise _SkipError(f"control flow: its body has a {operation.operation.name}")
                own.update(operation.operation.results)
                used.update(dict.fromkeys(operation.operation.operands))
    return [value for value in used if value not in own]


def _copy(view: Any, new: dict[Any, Any]) -> Any:
    copy = view.clone().operation
    inner = [one.operation for region in copy.regions for block in region.blocks for one in
             block.operations]  # fmt: skip
    for each in (copy, *inner):
        for place, value in enumerate(each.operands):
            if value in new:
                each.operands[place] = new[value]
    for name in [one for one in copy.attributes if not _INHERENT.fullmatch(one)]:
        del copy.attributes[name]
    return copy
