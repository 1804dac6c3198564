"""No backend or engine name outside its own file: whoever adds one edits nothing else."""

from __future__ import annotations

import ast

import pytest

from drumroll import plugins
from tests.architecture.source import Module, docstrings, modules

PLUGIN_NAMES = {name: kind for kind in ("backends", "engines") for name in plugins.names(kind)}
CONSTANTS = "drumroll.plugins"  # SPECIFICATION_BACKEND and EMBEDDED_ENGINE
# (module, text) where the text names the library, as a module to import or to give the version of, and not the engine.
LIBRARY = {("drumroll.runtime.processes", "transformers")}


def test_the_two_constants_name_plugins_that_exist() -> None:
    assert PLUGIN_NAMES[plugins.SPECIFICATION_BACKEND] == "backends"
    assert PLUGIN_NAMES[plugins.EMBEDDED_ENGINE] == "engines"


def names_as_text(module: Module) -> dict[str, int]:
    """Plug-in names that stand as text (not prose) in a file outside their own -> line."""
    own = {name for name, kind in PLUGIN_NAMES.items() if f"{module.name}.".startswith(f"drumroll.{kind}.{name}.")}
    prose = docstrings(module.tree)
    texts = [node for node in ast.walk(module.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose]
    return {str(node.value): node.lineno for node in texts if node.value in set(PLUGIN_NAMES) - own}


@pytest.mark.parametrize("module", [m for m in modules() if m.name != CONSTANTS], ids=lambda m: m.name)
def test_no_plugin_name_as_text_outside_its_own_file(module: Module) -> None:
    wrong = [f"{module.where}:{line}: {name!r}" for name, line in names_as_text(module).items() if (module.name, name) not in LIBRARY]
    assert wrong == [], "look plug-ins up with drumroll.plugins; the two names that code may rely on are its constants"


def test_no_exception_is_left_over() -> None:
    assert {(m.name, name) for m in modules() for name in names_as_text(m)} >= LIBRARY
