"""Imports go downwards only, and some packages have one door."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import Module, imports, modules

LAYERS = [
    "errors types config plugins digest env packing",
    "data algorithms observe",
    "models engines backends sync rewards",
    "rollout checkpoint",
    "runtime",
    "pipelines verify planner reference",
    "cli __main__",
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer.split()}
# Package -> the only module that may import it.
DOORS = {"peft": "drumroll.models.lora", "ray": "drumroll.runtime.ray", "vllm": "drumroll.engines.vllm"}
MODULES = modules()
NAMES = {module.name for module in MODULES}


def part(name: str) -> str | None:
    """drumroll.backends.base -> backends; the package itself -> None."""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 else None


def test_every_part_of_the_package_has_its_layer() -> None:
    assert {part(name) for name in NAMES} - {None} - set(RANK) == set(), "give the new part a place in LAYERS (and in the design)"


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name)
def test_imports_go_downwards(module: Module) -> None:
    own = part(module.name)
    wrong = [
        f"{module.where}:{item.line} imports {item.target}"
        for item in imports(module)
        if item.target in NAMES and (below := part(item.target)) is not None and (own is None or RANK[below] > RANK[own])
    ]
    assert wrong == []


def test_no_cycle_between_modules_at_import() -> None:
    graph = {m.name: {i.target for i in imports(m) if i.at_import and i.target in NAMES and i.target != m.name} for m in MODULES}
    while graph:
        leaves = {name for name, targets in graph.items() if not targets & set(graph)}
        assert leaves, f"import cycle among {sorted(graph)}"
        graph = {name: targets for name, targets in graph.items() if name not in leaves}


@pytest.mark.parametrize(("package", "door"), DOORS.items())
def test_one_door(package: str, door: str) -> None:
    users = {m.name for m in MODULES for i in imports(m) if i.target.split(".")[0] == package}
    assert {name for name in users if name != door and not name.startswith(f"{door}.")} == set()


def offers_plugin(module: Module) -> bool:
    """Whether a file says `PLUGIN = ...`."""
    body = module.tree.body
    targets = [t for n in body if isinstance(n, ast.Assign) for t in n.targets] + [n.target for n in body if isinstance(n, ast.AnnAssign)]
    return any(isinstance(t, ast.Name) and t.id == "PLUGIN" for t in targets)


def within(name: str, owners: set[str]) -> bool:
    """Whether a module is one of `owners` or lies inside one."""
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def test_plugins_are_loaded_by_name_only() -> None:
    """A backend or an engine is imported by nobody: `drumroll.plugins` finds it."""
    kinds = ("drumroll.backends.", "drumroll.engines.")
    plugin = {m.name for m in MODULES if m.name.startswith(kinds) and offers_plugin(m)}
    others = [m for m in MODULES if not within(m.name, plugin)]
    assert [f"{m.where}:{i.line} imports {i.target}" for m in others for i in imports(m) if within(i.target, plugin)] == []
