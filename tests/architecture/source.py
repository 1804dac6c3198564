"""The package as syntax trees: what the rules of this folder are checked on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str  # drumroll.backends.base
    path: Path
    tree: ast.Module

    @property
    def where(self) -> str:
        """The path from the root of the repository."""
        return str(self.path.relative_to(ROOT))


@dataclass(frozen=True)
class Import:
    """One imported module, as the file names it."""

    target: str
    line: int
    at_import: bool  # runs when the file is imported: neither inside a function nor under `if TYPE_CHECKING`


def modules(folder: str = "drumroll") -> list[Module]:
    """Every module of the package (or of another folder), sorted by path."""
    return [_module(path) for path in sorted((ROOT / folder).rglob("*.py"))]


def _module(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))


def imports(module: Module) -> Iterator[Import]:
    """Every import of a file, `from a import b` as both a and a.b (b may be a module or a name in one)."""
    yield from _imports(module.tree.body, at_import=True)


def _imports(body: list[ast.stmt], at_import: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}: write the whole name"
            assert node.module is not None
            yield Import(node.module, node.lineno, at_import)
            yield from (Import(f"{node.module}.{alias.name}", node.lineno, at_import) for alias in node.names)
        else:
            inner = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_type_checking(node)
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                for child in getattr(node, field, []):
                    nested = child.body if isinstance(child, ast.ExceptHandler | ast.match_case) else [child]
                    yield from _imports(nested, inner)


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def docstrings(tree: ast.Module) -> set[ast.Constant]:
    """The constants that are docstrings."""
    owners = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    first = [owner.body[0] for owner in owners if owner.body]
    return {node.value for node in first if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
