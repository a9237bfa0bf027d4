"""IREE's compiler in this process, in parts: up to the dispatches, their configuration, the rest.

It runs in a child, as a candidate may make it hang, take all memory or end the process. What
stands before the configuration is the same for all candidates of a module and is kept.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.mlir.iree import dispatches as cutting
from tokmill.mlir.iree.spec import Config, Indexed, Root
from tokmill.mlir.modules import operations, toolkit

FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
)
PROCESSOR = "--iree-llvmcpu-target-cpu="
"""Which processor code is for; this one, if no flag says another."""
SOURCES, CONFIGURED, END = "executable-sources", "executable-configurations", "end"
"""Phases: dispatches as linalg, with a configuration each, compiled."""
_REMOVED = re.compile(
    r"linalg\.(?:add|sub|mul|div|div_unsigned|exp|log|abs|ceil|floor|negf|reciprocal|round|sqrt|"
    r"rsqrt|square|tanh|erf|max|min|powf|select)\b"
)
"""Named operations that IREE 3.13 no longer reads."""
KEPT = 8
"""Modules whose dispatches are kept."""
_kept: OrderedDict[tuple[str, ...], str] = OrderedDict()


class Refused(TokmillError):
    """IREE does not compile a module, or not with these tiles."""


def complete(flags: Sequence[str]) -> list[str]:
    """Return all flags of a compilation: those given, and what is always said."""
    named = any(flag.startswith(PROCESSOR) for flag in flags)
    return [*FLAGS, *([] if named else [f"{PROCESSOR}host"]), *flags]


def dispatches(module: str, flags: Sequence[str] = ()) -> str:
    """Return the text of a module whose operations stand in dispatches."""
    key = (module, *flags)
    if key not in _kept:
        begin = cutting.PHASE if cutting.is_one(module) else ""
        _kept[key] = _run(known(module), begin, SOURCES, flags)
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]


def configured(module: str, spec: str = "", flags: Sequence[str] = ()) -> tuple[str, list[Root]]:
    """Return the text of a module with configurations, and the roots of its dispatches.

    Raises `Refused` if IREE declines a configuration.
    """
    found: list[Root] = []
    text = _run(dispatches(module, flags), SOURCES, CONFIGURED, flags, spec, found)
    return text, found


def known(module: str) -> str:
    """Return a module without the named operations that IREE took out (`linalg.add`, …)."""
    if cutting.is_one(module) or not _REMOVED.search(module):
        return module
    bindings = toolkit.ir()
    inside = toolkit.context()
    parsed = toolkit.parse(module, inside, "module")
    with inside, bindings.Location.unknown():
        passes = "builtin.module(linalg-generalize-named-ops)"
        plugins.require("torch_mlir.passmanager").PassManager.parse(passes).run(parsed.operation)
        return str(parsed)


def formed(module: str, flags: Sequence[str] = ()) -> str:
    """Return a module with its dispatches formed, as `dispatches.cut` reads it."""
    text: str = _run(known(module), "", cutting.PHASE, flags)
    return text


def compiled(text: str, flags: Sequence[str] = ()) -> bytes:
    """Return the program of a configured module; raises `Refused`."""
    code: bytes = _run(text, CONFIGURED, END, flags)
    return code


def whole(module: str, spec: str = "", flags: Sequence[str] = ()) -> bytes:
    """Return the program of a module, compiled in one go as `iree-compile` does."""
    code: bytes = _run(known(module), "", END, flags, spec)
    return code


def _run(
    text: str,
    begin: str,
    end: str,
    flags: Sequence[str],
    spec: str = "",
    found: list[Root] | None = None,
) -> Any:
    api = plugins.require("iree.compiler.api")
    with tempfile.TemporaryDirectory(prefix="tokmill-") as folder:
        session = api.Session()
        path = Path(folder) / "spec.mlir"
        path.write_text(spec)
        # A flag stays for all sessions of the process, so the one without a spec says so.
        of_spec = f"--iree-codegen-tuning-spec-path={path if spec else ''}"
        try:
            session.set_flags(*complete(flags), of_spec)
        except ValueError as error:
            raise Refused(
                f"IREE does not know the flag: {error}", hint="see iree-compile"
            ) from None
        with session.invocation() as invocation:
            said = _Said(api, invocation)
            source = api.Source.wrap_buffer(session, text.encode() + b"\0")
            said.phases(begin, end)
            if not invocation.parse_source(source) or not invocation.execute():
                raise Refused(said.first, hint="other tiles, or another module")
            if found is not None:
                # The module is no longer the invocation's then.
                operation = invocation.export_module()
                made = str(operation)
                found += roots(operation, _vector(made))
                return made
            output = api.Output.open_membuffer()
            if end == END:
                invocation.output_vm_bytecode(output)
                return bytes(output.map_memory())
            invocation.output_ir(output)
            return bytes(output.map_memory()).decode()


class _Said:
    """What the compiler says of an invocation, by its C interface: Python's has no phases."""

    def __init__(self, api: Any, invocation: Any) -> None:
        self._library, self._invocation = api.ctypes_dl._dylib, invocation
        self.messages: list[str] = []
        kind = ctypes.CFUNCTYPE(
            None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        )
        self._callback = kind(self._hear)
        self._call("ireeCompilerInvocationEnableCallbackDiagnostics", 0, self._callback, None)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype = None
        function(ctypes.c_void_p(self._invocation._inv_p), *arguments)

    def _hear(self, severity: int, text: int, size: int, _: Any) -> None:
        self.messages.append(ctypes.string_at(text, size).decode("utf-8", "replace"))

    def phases(self, begin: str, end: str) -> None:
        if begin:
            self._call("ireeCompilerInvocationSetCompileFromPhase", begin.encode())
        self._call("ireeCompilerInvocationSetCompileToPhase", end.encode())

    @property
    def first(self) -> str:
        """Return the first error in one line."""
        lines = [line for each in self.messages for line in each.splitlines() if line.strip()]
        found = re.sub(r"/\S*/spec\.mlir", "the spec", lines[0]) if lines else ""
        return found[:300] or "IREE gives no reason"


def _vector(text: str) -> int:
    """Return the bytes of a vector of the processor that a module is compiled for."""
    said = re.search(r"native_vector_size = (\d+)", text)
    return int(said[1]) if said else 64


def roots(module: Any, vector: int = 64) -> list[Root]:
    found = []
    for function, operation in _configured(module):
        config = _config(operation, function)
        if "distribution" in config.levels:
            found.append(replace(_root(operation, config), vector=vector))
    return found


def _configured(view: Any, function: Any = None) -> Any:
    for region in view.regions:
        for block in region.blocks:
            for operation in block.operations:
                inner = operation.operation
                if inner.name.startswith("linalg.") and "lowering_config" in inner.attributes:
                    yield function, operation
                elif not inner.name.startswith("linalg."):
                    yield from _configured(inner, inner if inner.name == "func.func" else function)


def _config(operation: Any, function: Any) -> Config:
    text = str(operation.operation.attributes["lowering_config"])
    levels = {
        name: tuple(map(int, sizes.replace("[", "").replace("]", "").split(",")))
        for name, sizes in re.findall(r"(\w+) = \[([^\]]*)\]", text)
        if sizes.strip()
    }
    info = str(function.attributes["translation_info"]) if function is not None else ""
    pipeline = re.search(r"pipeline<(\w+)>", info)
    return Config(levels, pipeline[1] if pipeline else "")


def _root(operation: Any, config: Config) -> Root:
    linalg = plugins.require("iree.compiler.dialects.linalg")
    view = operation.operation
    maps = operations.maps_of(linalg, operation, "the dispatch")
    loops = maps[0].n_dims
    accesses = []
    for one, value in zip(maps, view.operands, strict=False):
        shape, element = _type(value.type)
        rows = [operations.row_of(str(result), loops) for result in one.results]
        if any(row is None for row in rows):
            return Root(view.name, "generic", "", (), (), [], (), config)
        accesses.append(Indexed(shape, element, [row for row in rows if row], f"affine_map<{one}>"))
    bounds, parallel = _loops(accesses, loops)
    names = [inner.operation.name for inner in view.regions[0].blocks[0].operations]
    kind, matcher = _kind(linalg, operation, accesses, names, len(view.results))
    return Root(
        view.name,
        kind,
        matcher if all(bounds) else "",
        bounds,
        parallel,
        accesses,
        operations.arithmetic_of(names),
        config,
    )


def _kind(
    linalg: Any, operation: Any, accesses: list[Indexed], names: list[str], results: int
) -> tuple[str, str]:
    """Return which of `operations.KINDS` an operation is, and how a spec finds it."""
    if results != 1:
        return "generic", ""
    if len(accesses) == 3 and linalg.isa_contraction_op(operation):
        return "matmul", "contraction"
    if len(accesses) == 3 and linalg.isa_convolution_op(operation):
        multiplies = any(name.startswith("arith.mul") for name in names)
        return ("conv", "convolution") if multiplies else ("pooling", "structured")
    return "generic", "structured"


def _type(kind: Any) -> tuple[tuple[int, ...], str]:
    if hasattr(kind, "shape"):
        return tuple(kind.shape), str(kind.element_type)
    return (), str(kind)


def _loops(accesses: list[Indexed], loops: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    bounds, written = [0] * loops, [False] * loops
    for place, access in enumerate(accesses):
        for row, size in zip(access.matrix, access.shape, strict=True):
            used = [loop for loop in range(loops) if row[loop]]
            if len(used) == 1 and row[used[0]] == 1 and row[loops] == 0 and size > 0:
                bounds[used[0]] = size
            if place == len(accesses) - 1:
                for loop in used:
                    written[loop] = True
    return tuple(bounds), tuple(written)
