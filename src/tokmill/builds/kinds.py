"""`tokmill.build`: the function, and for each kind of source one with its options by name.

Editors and type checkers read kinds.pyi, which scripts/build_stub.py writes of the same structs.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any

import msgspec

from tokmill import plugins
from tokmill.base.errors import nearest
from tokmill.builds import build as builds
from tokmill.store.store import Store
from tokmill.terminal.frame import field_docs


class Build:
    """Builds a store: `build("jsonl", …)`, or `build.jsonl(…)`, whose help lists its options."""

    __call__ = staticmethod(builds.build)

    def __getattr__(self, name: str) -> Any:
        kind = name.replace("_", "-")
        if kind not in plugins.SOURCES:
            names = [one.replace("-", "_") for one in plugins.SOURCES]
            raise AttributeError(f"tokmill.build.{name}: no such kind; {nearest(name, names)}")

        def made(*arguments: Any, **options: Any) -> Store:
            return builds.build(kind, *arguments, **options)

        struct = plugins.load(plugins.SOURCES, kind).Config
        docs = "".join(f"\n    {key}: {text}" for key, text in field_docs(struct).items())
        made.__doc__ = f"Build a store from {plugins.SOURCES[kind].help}.\n\nOptions:{docs}"
        made.__signature__ = signature_of(kind)  # type: ignore[attr-defined]
        made.__name__ = made.__qualname__ = name
        return made

    def __dir__(self) -> list[str]:
        return sorted(kind.replace("-", "_") for kind in plugins.SOURCES)


def signature_of(kind: str) -> inspect.Signature:
    """Return the signature of `build.KIND`: that of `build`, with the fields of the options."""
    source = plugins.load(plugins.SOURCES, kind)
    first = [*inspect.signature(builds.build).parameters.values()][1:-1]
    if not source.has_tokenizer:
        first = [one for one in first if one.name not in ("tokenizer", "roles")]
    hints = typing.get_type_hints(source.Config)
    given = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
            annotation=hints[field.name],
        )
        for field in msgspec.structs.fields(source.Config)
    ]  # fmt: skip
    return inspect.Signature([*first, *given], return_annotation="Store")


build = Build()
