"""Every recipe that is shipped can be read, and has only keys that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokmill import plugins, recipe
from tokmill.build.prepare import BuildRecipe

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
        configs = pytest.importorskip("tokmill.train.config", reason="needs the extra train")
        configs.from_dict(stated, str(path))


def test_recipes_explain_themselves() -> None:
    for path in RECIPES.rglob("*.toml"):
        text = path.read_text("utf-8")
        assert text.startswith("# "), f"{path.name}: the first line says what the recipe is for"
        assert "#   tokmill " in text, f"{path.name}: the command that runs it is missing"
