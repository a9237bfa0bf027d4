"""IREE's compiler in this process.

It runs in a child, as a module may make it hang, take all memory or end the process.
"""

import ctypes
import re
from collections.abc import Sequence
from typing import Any

from tokmill import plugins
from tokmill.base.errors import TokmillError
from tokmill.mlir.modules import importing, toolkit

FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
_REMOVED = re.compile(
    r"linalg\.(?:add|sub|mul|div|div_unsigned|exp|log|abs|ceil|floor|negf|reciprocal|round|sqrt|"
    r"rsqrt|square|tanh|erf|max|min|powf|select)\b"
)
"""Named operations that IREE 3.13 no longer reads."""


class Refused(TokmillError):
    """IREE does not compile a module."""


def generalized(module: str) -> str:
    """Return a module without the named operations that IREE took out (`linalg.add`, …)."""
    if not _REMOVED.search(module):
        return module
    bindings = toolkit.ir()
    inside = toolkit.context()
    parsed = toolkit.parse(module, inside, "module")
    with inside, bindings.Location.unknown():
        passes = "builtin.module(linalg-generalize-named-ops)"
        plugins.require("torch_mlir.passmanager").PassManager.parse(passes).run(parsed.operation)
        return str(parsed)


def compiled(module: str, flags: Sequence[str] = ()) -> bytes:
    """Return the program of a module, as `iree-compile` makes it with `FLAGS` and some more.

    Raises `Refused`.
    """
    api = plugins.require("iree.compiler.api")
    session = api.Session()
    try:
        session.set_flags(*FLAGS, *importing.keep_f64_flags(module), *flags)
    except ValueError as error:
        raise Refused(f"IREE does not know the flag: {error}", hint="see iree-compile") from None
    with session.invocation() as invocation:
        messages = _Messages(api, invocation)
        source = api.Source.wrap_buffer(session, generalized(module).encode() + b"\0")
        if not invocation.parse_source(source) or not invocation.execute():
            raise Refused(messages.first, hint="another module may pass")
        output = api.Output.open_membuffer()
        invocation.output_vm_bytecode(output)
        return bytes(output.map_memory())


class _Messages:
    """What the compiler says of an invocation, by its C interface: Python's prints it."""

    def __init__(self, api: Any, invocation: Any) -> None:
        self.messages: list[str] = []
        kind = ctypes.CFUNCTYPE(
            None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        )
        self._callback = kind(self._collect)
        enable = api.ctypes_dl._dylib.ireeCompilerInvocationEnableCallbackDiagnostics
        enable.restype = None
        enable(ctypes.c_void_p(invocation._inv_p), 0, self._callback, None)

    def _collect(self, severity: int, text: int, size: int, _: Any) -> None:
        self.messages.append(ctypes.string_at(text, size).decode("utf-8", "replace"))

    @property
    def first(self) -> str:
        lines = [line for each in self.messages for line in each.splitlines() if line.strip()]
        return lines[0][:300] if lines else "IREE gives no reason"
