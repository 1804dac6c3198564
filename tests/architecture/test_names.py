"""No backend or engine name outside its own file: whoever adds one edits nothing else."""

from __future__ import annotations

import ast

import pytest

from drumroll import plugins
from tests.architecture.source import Module, docstrings, modules

PLUGIN_NAMES = {name: kind for kind in ("backends", "engines") for name in plugins.names(kind)}
CONSTANTS = "drumroll.plugins"  # SPECIFICATION_BACKEND and EMBEDDED_ENGINE


def test_the_two_constants_name_plugins_that_exist() -> None:
    assert PLUGIN_NAMES[plugins.SPECIFICATION_BACKEND] == "backends"
    assert PLUGIN_NAMES[plugins.EMBEDDED_ENGINE] == "engines"


@pytest.mark.parametrize("module", [m for m in modules() if m.name != CONSTANTS], ids=lambda m: m.name)
def test_no_plugin_name_as_text_outside_its_own_file(module: Module) -> None:
    own = {name for name, kind in PLUGIN_NAMES.items() if f"{module.name}.".startswith(f"drumroll.{kind}.{name}.")}
    prose = docstrings(module.tree)
    wrong = [
        f"{module.where}:{node.lineno}: {node.value!r}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and node not in prose and isinstance(node.value, str) and node.value in set(PLUGIN_NAMES) - own
    ]
    assert wrong == [], "look plug-ins up with drumroll.plugins; the two names that code may rely on are its constants"
