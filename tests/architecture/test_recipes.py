"""Every recipe in recipes/ is read, and its plug-in sections are checked against their schemas."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumroll import config, plugins
from drumroll.algorithms.presets import resolve
from drumroll.runtime.plan import plan

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))


def test_there_are_recipes() -> None:
    assert "quickstart.yaml" in {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_recipe_is_valid_and_plugin_sections_too(path: Path, tmp_path: Path) -> None:
    recipe = config.load(path)
    plugins.check(recipe, str(path))
    config.dump(recipe, tmp_path / "resolved.yaml")
    assert config.load(tmp_path / "resolved.yaml") == recipe
    assert recipe.algorithm is not None
    algorithm = resolve(recipe.algorithm, recipe.rollout.max_tokens)  # refuses keys that the preset would not read
    planned = plan(recipe, algorithm.needs_reference, algorithm.needs_critic)
    assert planned.world_size == recipe.runtime.ranks
    needed = {"reference": algorithm.needs_reference, "critic": algorithm.needs_critic}
    assert planned.roles == {"policy", "engine", *(role for role, is_needed in needed.items() if is_needed)}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_recipe_says_what_it_is(path: Path) -> None:
    """Recipes are read by people: the first line is a comment that says what the run shows."""
    assert path.read_text(encoding="utf-8").startswith("# ")
