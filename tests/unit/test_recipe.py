"""Recipes: TOML, `extends`, `--set`, and errors that say where and what was meant."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from tokmill.base.errors import UsageError
from tokmill.base.headers import loads_toml
from tokmill.base.recipe import convert, merge, overrides, read_toml


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    size: int = 1
    mode: Literal["a", "b"] = "a"


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    name: str = ""
    rate: float = 0.5
    inner: Inner = Inner()
    maybe: Inner | None = None
    names: tuple[str, ...] = ()
    free: dict[str, Any] = {}


def test_a_recipe_becomes_a_struct(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('name = "x"\nnames = ["a", "b"]\n[inner]\nsize = 3\n[free]\nanything = 1\n')
    assert convert(Outer, read_toml(path)) == Outer(
        name="x", names=("a", "b"), inner=Inner(size=3), free={"anything": 1}
    )
    assert convert(Outer, {}) == Outer()


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"inner": {"size": 10**400}}, "inner.size"),
        ({"free": {"seeds": [1, -(1 << 63) - 1]}}, "free.seeds"),
        ({"rate": 1 << 63}, "rate"),
    ],
)
def test_numbers_have_64_bits(value: dict[str, Any], key: str) -> None:
    with pytest.raises(UsageError, match=f"{key}: a whole number of") as caught:
        convert(Outer, value, "r.toml")
    assert caught.value.where == "r.toml"
    assert convert(Outer, {"inner": {"size": -(1 << 63)}}).inner.size == -(1 << 63)


def test_extends_merges_tables_and_replaces_values(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/b.toml").write_text('name = "b"\nnames = ["x"]\n[inner]\nsize = 1\nmode="b"')
    (tmp_path / "a.toml").write_text('extends = "base/b.toml"\nnames = []\n[inner]\nsize = 2\n')
    (tmp_path / "c.toml").write_text('extends = "a.toml"\nrate = 0.25\n')
    assert read_toml(tmp_path / "c.toml") == {
        "name": "b",
        "names": [],
        "rate": 0.25,
        "inner": {"size": 2, "mode": "b"},
    }
    value = merge(read_toml(tmp_path / "c.toml"), overrides(["inner.size=5", "name=z"]))
    assert convert(Outer, value) == Outer(name="z", rate=0.25, inner=Inner(size=5, mode="b"))


def test_extends_looks_beside_the_file_and_among_the_shipped_recipes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "decoder-tiny").mkdir(parents=True)
    (here / "other.toml").write_text("rate = 1")
    monkeypatch.chdir(here)
    (tmp_path / "a.toml").write_text('extends = "decoder-tiny"')
    # A run is often called as its recipe is.
    assert read_toml(tmp_path / "a.toml") == read_toml("decoder-tiny.toml")
    (tmp_path / "b.toml").write_text('extends = "other.toml"')
    with pytest.raises(UsageError, match="no such recipe") as caught:
        read_toml(tmp_path / "b.toml")
    assert caught.value.where == str(tmp_path / "other.toml")


def test_cycles_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with pytest.raises(UsageError, match="extends itself"):
        read_toml(tmp_path / "a.toml")
    (tmp_path / "c.toml").write_text('extends = "c.toml"')
    with pytest.raises(UsageError, match="extends itself"):
        read_toml(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("name = x", "not TOML"),
        ('extends = "nothing.toml"', "no such recipe"),
        ("extends = 5", "extends is not the path"),
        (r'extends = "\u0000"', "extends is not the path"),
        ("\x80", "not TOML"),
        ("\0" * (1 << 24 | 1), "not TOML: it has more than 16,777,216 bytes"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "a.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=what):
        read_toml(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("a=1", {"a": 1}),
        ("a=1.5", {"a": 1.5}),
        ("a=true", {"a": True}),
        ("a=text", {"a": "text"}),
        ('a="1"', {"a": "1"}),
        ("a=[1, 2]", {"a": [1, 2]}),
        ("a.b-c.d=x=y", {"a": {"b-c": {"d": "x=y"}}}),
        ("a={b = 1}", {"a": {"b": 1}}),
        ("a=", {"a": ""}),
        ("a=/some/path.txt", {"a": "/some/path.txt"}),
        ("a=<|endoftext|>", {"a": "<|endoftext|>"}),
    ],
)
def test_settings_are_read_as_toml_or_text(setting: str, value: Any) -> None:
    assert overrides([setting]) == value


@pytest.mark.parametrize("setting", ["a", "=1", "a..b=1", "a b=1", ".a=1"])
def test_settings_of_another_form_are_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="not of the form"):
        overrides([setting])


def test_settings_merge_and_one_key_has_one_value() -> None:
    assert overrides(["a.b=1", "a.c=2", "a.b=1"]) == {"a": {"b": 1, "c": 2}}
    for settings in (["a.b=1", "a.b=3"], ["a.b=1", "a=3"], ["a=3", "a.b=1"], ["a=[1]", "a=1"]):
        with pytest.raises(UsageError, match=r"is given twice: .+ and "):
            overrides(settings)


def test_recipes_are_utf8_in_every_locale(tmp_path: Path) -> None:
    """TOML is; with the locale's encoding, é was two other letters or an error."""
    (tmp_path / "r.toml").write_text('join = "\u00e9"\n', "utf-8")
    code = (
        "import sys; from tokmill.base.recipe import read_toml as r; print(ascii(r(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code, tmp_path / "r.toml"],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "{'join': '\\xe9'}\n", done.stderr


def test_tables_merge() -> None:
    assert merge({"a": {"b": 1}}, {"a": 5}) == {"a": 5}
    base = {"a": {"b": 1}}
    merge(base, {"a": {"c": 2}})
    assert base == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("value", "what", "hint"),
    [
        ({"nmae": "x"}, "nmae: there is no such key", "'name'"),
        ({"inner": {"szie": 1}}, "inner.szie: there is no such key", "'size'"),
        ({"maybe": {"szie": 1}}, "maybe.szie: there is no such key", "'size'"),
        ({"inner": {"size": "x"}}, "inner.size: expected `int`, got `str`", "recipe schema"),
        ({"inner": {"mode": "c"}}, "inner.mode: 'c' is not known", "one of a, b"),
        ({"rate": True}, "rate: expected `float`", "recipe schema"),
        ({"names": "x"}, 'names: a list is needed, not "x"', """--set 'names=["x"]'"""),
        ({"names": "x, y"}, "names: a list is needed", """--set 'names=["x", "y"]'"""),
        ({"names": 3}, "names: a list is needed, not 3", "--set 'names=[3]'"),
        ({"names": "3,1.5"}, "names: a list is needed", "--set 'names=[3, 1.5]'"),
        ({"names": True}, "names: expected `array`", "recipe schema"),
        ({"names": [1]}, "names[0]: expected `str`", "recipe schema"),
        ({"inner": 5}, "inner: expected `object`", "recipe schema"),
        (overrides(["name=2026-11-28"]), "name: expected `str`", """--set 'name="2026-11-28"'"""),
    ],
)
def test_wrong_keys_and_types(value: Any, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        convert(Outer, value, "r.toml")
    assert str(caught.value).startswith(f"r.toml: {what}")
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("form", ["{} = 1", "[{}]", "x = {{{} = 1}}", "x = {{y = 1, {} = 1}}"])
def test_a_key_of_thousands_of_parts_is_refused_at_once(form: str) -> None:
    """tomllib takes time and memory that grow with their square: 40 KB were 1.6 GB."""
    with pytest.raises(ValueError, match="more than 100 parts"):
        loads_toml(form.format(".".join(["a"] * 5000)))
    assert loads_toml(form.format(".".join(["a"] * 20)))
    assert loads_toml('x = "' + ".".join(["a"] * 5000) + '"')
