"""`drumroll plan`: a recipe, for one or more world sizes, against the memory that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from drumroll import config, plugins
from drumroll.planner.advice import advise, fits
from drumroll.planner.forecast import forecast
from drumroll.planner.source import config_folder
from drumroll.planner.view import Planned, memory_here, memory_of, show, write


def run(
    recipe: Path,
    overrides: Sequence[str],
    ranks: Sequence[int] = (),
    memory: str | None = None,
    model_config: Path | None = None,
    json: Path | None = None,
) -> bool:
    """Print the plan, for each of `ranks` or for the recipe's; False when a rank does not have the memory. Launches nothing."""
    first = config.load(recipe, overrides)
    plugins.check(first, str(recipe))
    folder = config_folder(first.model.path, model_config)
    planned = [_plan(recipe, [*overrides, f"runtime.ranks={count}"], folder, memory) for count in ranks or (first.runtime.ranks,)]
    show(planned)
    if json is not None:
        write(json, planned)
    return all(one.fits is not False for one in planned)


def _plan(recipe: Path, overrides: list[str], folder: Path, memory: str | None) -> Planned:
    load = partial(_load, recipe, overrides)
    plan = forecast(load([]), folder)
    bound = memory_of(memory) if memory is not None else memory_here(plan.device, plan.ranks)
    advice = advise(load, folder, plan, bound) if bound is not None and not fits(plan, bound) else []
    return Planned(plan, bound, advice)


def _load(recipe: Path, overrides: Sequence[str], more: Sequence[str]) -> config.RunConfig:
    return config.load(recipe, [*overrides, *more])
