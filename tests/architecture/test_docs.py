"""Public functions say what they do, and the documents point at things that exist."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest

from drumroll.verify.markdown import BY_HAND
from tests.architecture.source import ROOT, Module, modules

GUIDE_FILE, GUIDE_FUNCTION = 400, 60  # lines; guides, not limits


def public(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Public functions and classes of a body, and public methods of those classes."""
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.append(node)
            if isinstance(node, ast.ClassDef):
                found += public(node.body)
    return found


def contract_methods() -> set[str]:
    """Methods that a Protocol of the package declares: it documents them, once for all who implement it."""
    classes = [node for module in modules() for node in module.tree.body if isinstance(node, ast.ClassDef)]
    protocols = [c for c in classes if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in c.bases)]
    return {node.name for protocol in protocols for node in public(protocol.body)}


CONTRACT = contract_methods()


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_every_public_function_has_a_docstring(module: Module) -> None:
    wrong = [
        f"{module.where}:{node.lineno} {node.name}"
        for node in public(module.tree.body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is None and not _obvious(node)
    ]
    assert wrong == []


def _obvious(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A contract's method, a property, or a body of one statement: the name and the contract say it all."""
    decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
    return node.name in CONTRACT or bool(decorators & {"property", "overload", "override"}) or len(node.body) == 1


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_every_file_says_what_it_is_for(module: Module) -> None:
    assert not module.tree.body or ast.get_docstring(module.tree) is not None


def test_sizes_are_reported() -> None:
    """A guide, not a limit: shown as a warning, so that nobody games it."""
    for module in modules():
        lines = len(module.path.read_text(encoding="utf-8").splitlines())
        if lines > GUIDE_FILE:
            warnings.warn(f"{module.where}: {lines} lines; is there a second noun inside?", stacklevel=1)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (size := node.end_lineno - node.lineno + 1) > GUIDE_FUNCTION:
                    warnings.warn(f"{module.where}:{node.lineno} {node.name}: {size} lines", stacklevel=1)


def functions_of(path: Path) -> set[str]:
    """Names of the functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_failure_cases_point_at_tests_that_exist(repository: Path) -> None:
    """Each row of docs/failure-cases.md: `tests/dir/file.py::test_name`."""
    text = (repository / "docs/failure-cases.md").read_text(encoding="utf-8")
    references = [(repository / file, name) for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)]
    assert [f"{file}::{name}" for file, name in references if not file.is_file() or name not in functions_of(file)] == []
    rows = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    assert rows, "the table is empty"
    assert [row for row in rows if "::test_" not in row] == [], "a case without its test"
    promised = {*range(1, 6), *range(7, 14), *range(15, 18), *range(19, 22), 27, 31, 34, *range(37, 40), *range(41, 45), *range(46, 55)}
    promised |= {56, 58, 59, 62, 63, 65, 66, 68}
    assert promised - {int(row.split("|")[1]) for row in rows} == set(), "a case that was promised has no row"


def test_what_only_a_gpu_can_show_is_named_as_not_verified(repository: Path) -> None:
    """`drumroll verify --markdown` keeps this part of the document only where it writes over it."""
    _, heading, by_hand = (repository / "docs/verified.md").read_text(encoding="utf-8").partition(BY_HAND)
    assert heading and all(word in by_hand for word in ("benchmarks/gpu_check.sh", "NCCL", "pinned host memory", "CUDA IPC"))


LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


DOCUMENTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str, repository: Path) -> None:
    document = repository / name
    wrong = [target for target in LINK.findall(document.read_text(encoding="utf-8")) if not (document.parent / target).exists()]
    assert wrong == []
