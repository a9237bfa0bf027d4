"""Write src/tokmill/builds/kinds.pyi: what editors and type checkers know of `tokmill.build`.

python scripts/build_stub.py > src/tokmill/builds/kinds.pyi
"""

import inspect
import types
import typing
from typing import Any

from tokmill import plugins
from tokmill.builds.kinds import signature_of

HEAD = '''\
"""Made by scripts/build_stub.py of the options of the sources."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from tokmill.builds.plan import How
from tokmill.store.store import Store

class Build:
'''


def in_words(annotation: Any) -> str:
    """Return a type as a stub has it; tuples may be given as lists, but never as one string."""
    if isinstance(annotation, str):
        return annotation
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]".replace("'", '"')
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(in_words, arguments))
    if origin is tuple:
        inner = ", ".join("..." if one is ... else in_words(one) for one in arguments)
        if arguments[-1] is not ...:
            return f"tuple[{inner}]"
        return f"tuple[{inner}] | list[{in_words(arguments[0])}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(in_words, arguments))}]"
    return "None" if annotation is type(None) else str(annotation.__name__)


def shown(default: Any) -> str:
    return "..." if isinstance(default, list | dict) else repr(default).replace("'", '"')


def method(name: str, help_text: str, signature: inspect.Signature) -> str:
    """Return the stub of one method."""
    lines = [f"    def {name}(", "        self,"]
    star = False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not star:
            star = True
            lines.append("        *,")
        given = "" if one.default is one.empty else f" = {shown(one.default)}"
        mark = "**" if one.kind is one.VAR_KEYWORD else ""
        lines.append(f"        {mark}{one.name}: {in_words(one.annotation)}{given},")
    return "\n".join([*lines, "    ) -> Store:", f'        """{help_text}"""', ""])


def stub() -> str:
    """Return the text of the stub."""
    from tokmill.builds.build import build

    methods = [method("__call__", "From a kind of source by name.", inspect.signature(build))]
    for kind, part in plugins.SOURCES.items():
        if part.target.startswith("."):
            name = kind.replace("-", "_")
            methods.append(method(name, f"From {part.help}.", signature_of(kind)))
    return HEAD + "\n".join(methods) + "\nbuild: Build\n"


if __name__ == "__main__":
    print(stub(), end="")
