"""Recipes: TOML into strict structs, with `extends` and `--set a.b=c`."""

import difflib
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tokmill.base.errors import UsageError, nearest
from tokmill.base.files import read_file
from tokmill.base.headers import loads_toml

T = TypeVar("T")
LARGEST = 1 << 24
"""Bytes of a recipe."""


def shipped() -> dict[str, Path]:
    """Return the recipes that come with the package: name (such as decoder-tiny) → file."""
    here = Path(__file__).parents[1]
    # In a wheel they are in the package, in a clone of the repository at its root.
    folder = here / "recipes" if (here / "recipes").is_dir() else here.parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.rglob("*.toml"))}


def find(name: Path | str) -> Path:
    """Return the file of a recipe, given its path or the name of a shipped recipe.

    If there is no such file, `decoder-tiny`, `decoder-tiny.toml` and (as in the documents)
    `recipes/text/decoder-tiny.toml` all name the same shipped recipe.
    """
    path = Path(name)
    return path if path.exists() else _shipped(path) or path


def _shipped(path: Path) -> Path | None:
    recipe = shipped().get(path.name.removesuffix(".toml"))
    if recipe is None or path.parts not in (
        (path.name,),
        ("recipes", recipe.parent.name, recipe.name),
    ):
        return None
    return recipe


def read_toml(path: Path | str) -> dict[str, Any]:
    """Return a TOML file as a dict, merged over the files that it `extends`.

    `extends` is relative to the file, or the name of a shipped recipe; `path` may be such a name
    too.
    """
    return _read(find(path), ())


def other_recipe(path: Path | str) -> str:
    """Return a hint for a recipe that does not exist: the nearest shipped one."""
    close = difflib.get_close_matches(Path(path).name.removesuffix(".toml"), shipped(), n=1)
    if close:
        return f"did you mean {close[0]}?"
    return "give the path of a .toml file, or a name that `tokmill recipe list` shows"


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in seen:
        raise UsageError(
            "the recipe extends itself",
            where=str(path),
            hint="take `extends` out of one of the files",
        )
    if not path.is_file():
        raise UsageError("there is no such recipe", where=str(path), hint=other_recipe(path))
    try:
        data = read_file(path, LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        value = loads_toml(data.decode())
    except ValueError as error:
        raise UsageError(
            f"the recipe is not TOML: {error}", where=str(path), hint="strings need quotes"
        ) from None
    parent = value.pop("extends", None)
    if parent is None:
        return value
    if not isinstance(parent, str) or "\0" in parent:
        raise UsageError(
            "extends is not the path of a recipe",
            where=str(path),
            hint='extends = "other.toml", the path of a file, or a shipped recipe',
        )
    sibling = path.parent / parent
    # Not `find`: what lies in the working directory is neither beside the file nor shipped.
    base = sibling if sibling.is_file() else _shipped(Path(parent)) or sibling
    return merge(_read(base, (*seen, resolved)), value)


def merge(
    base: Mapping[str, Any], over: Mapping[str, Any], once: str | None = None
) -> dict[str, Any]:
    """Return `base` updated with the keys of `over`, recursively in nested tables.

    `once`: the prefix of the keys, which may have one value only; None: `over` wins.
    """
    result = dict(base)
    for key, value in over.items():
        before = result.get(key, value)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            result[key] = merge(before, value, None if once is None else f"{once}{key}.")
        elif once is None or before is value or before == value:
            result[key] = value
        else:
            what = f"{once}{key} is given twice: {before!r} and {value!r}"
            raise UsageError(what, where="command line", hint="give one value")
    return result


def overrides(settings: Sequence[str]) -> dict[str, Any]:
    """Return `a.b=c` settings as nested dicts; a value that is not TOML is taken as a string."""
    result: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key.strip()):
            raise UsageError(
                f"--set {setting!r} is not of the form a.b=value",
                hint="--set optim.lr=0.001, for example",
            )
        try:
            value = loads_toml(f"value = {text}")["value"]
        except ValueError:
            value = text
        nested: Any = value
        for part in reversed(key.strip().split(".")):
            nested = {part: nested}
        result = merge(result, nested, once="")
    return result


Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Part = Annotated[float, Meta(ge=0, lt=1)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
AboveZero = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
"""Types of numbers among options; `convert` refuses others. A part is below 1, a share up to 1."""


def check_types(options: msgspec.Struct, where: str = "") -> None:
    """Refuse values that the types of options do not allow; of options that were made by hand."""
    convert(type(options), msgspec.to_builtins(options), where)


def convert(kind: type[T], value: Mapping[str, Any], where: str = "") -> T:
    """Turn a dict into a struct; an unknown key or a wrong type is an error with its path."""
    check_numbers(value, where)
    _check_keys(kind, value, "", where)
    try:
        return msgspec.convert(value, type=kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        key = place.rstrip("`")
        choices = _choices(kind, key)
        given: Any = value
        for part in key.split("."):
            given = given.get(part) if isinstance(given, Mapping) else None
        if "Expected `array`" in message and type(given) in (str, int, float):
            raise UsageError(
                f"{key}: a list is needed, not {_toml(given)}",
                where=where,
                hint=f"--set '{key}={_as_list(given)}'",
            ) from None
        hint = "`tokmill recipe schema train` (or build, or a source) lists keys and types"
        if "Expected `str" in message and type(given) in (int, float, date):
            hint = f"quote a text of digits: --set '{key}=\"{given}\"'"
        if "enum value" in message:
            message = f"{given!r} is not known"
        elif re.search("[<>]", message) and given is not None:
            message = f"{message}, not {given}"
        raise UsageError(
            f"{key}: {message[:1].lower()}{message[1:]}" if key else message,
            where=where,
            hint=f"one of {', '.join(choices)}" if choices else hint,
        ) from None


def check_numbers(value: Any, where: str = "", place: str = "") -> None:
    """Refuse a whole number of more than 64 bits anywhere in nested dicts and lists."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise UsageError(
            f"{place}: a whole number of {value.bit_length():,} bits",
            where=where,
            hint=f"numbers are {-(1 << 63)} to {(1 << 63) - 1}",
        )
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_numbers(inner, where, f"{place}.{key}" if place else key)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_numbers(inner, where, place)


def _choices(kind: Any, key: str) -> list[str]:
    for part in key.partition("[")[0].split("."):
        struct = struct_of(kind)
        if struct is None:
            return []
        kind = typing.get_type_hints(struct).get(part)
    if typing.get_origin(kind) is not typing.Literal:
        return []
    return [str(value) for value in typing.get_args(kind)]


def _as_list(given: str | float) -> str:
    """Return `a,b` or a single value written as a TOML list."""
    parts = given.split(",") if isinstance(given, str) else [given]
    return f"[{', '.join(_toml(part) for part in parts)}]"


def _toml(value: str | float) -> str:
    """Return a value as TOML; a string that holds a number is written as that number."""
    text = str(value).strip()
    try:
        float(text)
    except ValueError:
        return f'"{text}"'
    return text


def struct_of(annotation: Any) -> type[msgspec.Struct] | None:
    """Return the struct class in an annotation such as `X` or `X | None`, or None."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def _check_keys(kind: Any, value: Any, path: str, where: str) -> None:
    struct = struct_of(kind)
    if struct is None or not isinstance(value, Mapping):
        return
    hints = typing.get_type_hints(struct)
    names = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
    for key, inner in value.items():
        place = f"{path}.{key}" if path else key
        if key not in names:
            raise UsageError(
                f"{place}: there is no such key", where=where, hint=nearest(key, names)
            )
        _check_keys(hints[names[key]], inner, place, where)
