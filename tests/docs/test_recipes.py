"""Every recipe that is shipped can be read, and has only keys that exist."""

import importlib
from pathlib import Path

import pytest

from tokmill import plugins
from tokmill.base import recipe
from tokmill.base.errors import UsageError
from tokmill.builds.plan import BuildRecipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.parametrize(
    "path", sorted(RECIPES.rglob("*.toml")), ids=lambda path: str(path.relative_to(RECIPES))
)
def test_recipe_parses(path: Path) -> None:
    stated = recipe.read_toml(path)
    if "source" in stated:
        chosen = recipe.convert(BuildRecipe, stated, str(path))
        kind = plugins.load(plugins.SOURCES, chosen.source)
        recipe.convert(kind.Config, chosen.options, str(path))
    else:
        configs = pytest.importorskip(
            "tokmill.training.recipe.resolve", reason="needs the extra train"
        )
        names = importlib.import_module("tokmill.training.recipe.read_recipe")
        configs.from_dict(names.merged(stated, {}, str(path)), str(path))


def test_recipes_explain_themselves() -> None:
    for path in RECIPES.rglob("*.toml"):
        text = path.read_text("utf-8")
        assert text.startswith("# "), f"{path.name}: the first line says what the recipe is for"
        assert "#   tokmill " in text, f"{path.name}: the command that runs it is missing"


def test_recipes_are_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = recipe.shipped()
    assert len(shipped) == len(list(RECIPES.rglob("*.toml"))), "two recipes have one name"
    for name, path in shipped.items():
        relative = path.relative_to(RECIPES)
        for spelling in (name, f"{name}.toml", str(Path("recipes", relative))):
            assert recipe.find(spelling) == path
        assert recipe.find(f"elsewhere/{name}.toml") == Path(f"elsewhere/{name}.toml")
    (tmp_path / "decoder-tiny").write_text("[data]\nbatch = 3\n")
    assert recipe.read_toml("decoder-tiny") == {"data": {"batch": 3}}, "a file of one's own wins"


def test_a_misspelt_recipe() -> None:
    with pytest.raises(UsageError) as caught:
        recipe.read_toml("decoder-tny")
    assert caught.value.hint == "did you mean decoder-tiny?"
