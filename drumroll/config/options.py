"""Names of the options of the package's own plug-ins, read from the text of their files: importing a backend takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

KINDS = {"backend": "backends", "engine": "engines"}  # the key of a recipe -> the folder of its plug-ins
PACKAGE = Path(__file__).parents[1]


@cache
def plugin_options() -> dict[str, tuple[str, ...]]:
    """`backend.<name>` and `engine.<name>` -> the fields of `class Config` in the plug-in's file."""
    found: dict[str, tuple[str, ...]] = {}
    for key, folder in KINDS.items():
        for file in sorted((PACKAGE / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if "\nclass Config(" in text:
                name = file.parent.name if file.name == "__init__.py" else file.stem
                found[f"{key}.{name}"] = _fields(ast.parse(text))
    return found


def _fields(module: ast.Module) -> tuple[str, ...]:
    bodies = [node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Config"]
    return tuple(
        statement.target.id
        for body in bodies
        for statement in body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
