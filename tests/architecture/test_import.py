"""`import drumroll` is instant, writes nothing and needs no torch; so do configuration and the plan of a run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'torch', 'transformers', 'datasets', 'numpy'}:
            raise ImportError(f'{name} may not be imported here')
sys.meta_path.insert(0, Block())
"""
NEED_NO_TORCH = ["drumroll", "drumroll.config", "drumroll.types", "drumroll.errors", "drumroll.plugins", "drumroll.runtime.plan"]


def python(code: str, cwd: Path) -> str:
    """Output of a fresh interpreter; fails with its error text."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", NEED_NO_TORCH)
def test_imports_without_torch(module: str, repository: Path) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not there yet")
    python(f"{BLOCK}\nimport {module}", repository)


def test_a_recipe_is_read_without_torch(repository: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("{max_steps: 1, run_dir: r, pipeline: sft, model: {path: m}, data: {train: {task: sort}}, backend: {name: x}}")
    assert python(f"{BLOCK}\nfrom drumroll import config\nprint(config.load({str(recipe)!r}, ['seed=4']).seed)", repository) == "4"


def test_import_is_instant(repository: Path) -> None:
    code = "import time; t = time.perf_counter(); import drumroll; print(time.perf_counter() - t)"
    assert min(float(python(code, repository)) for _ in range(3)) < 0.2


def test_import_writes_nothing(repository: Path, tmp_path: Path) -> None:
    """No file (bytecode apart), no environment variable, no logger handler, no warning filter."""
    code = f"""
import sys, os, logging, warnings
sys.dont_write_bytecode = True
sys.path.insert(0, {str(repository)!r})
opened = []
def hook(event, args):
    if event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+'):
        opened.append(args[0])
sys.addaudithook(hook)
before = (dict(os.environ), list(logging.root.handlers), list(warnings.filters))
import drumroll
assert before == (dict(os.environ), list(logging.root.handlers), list(warnings.filters))
print(opened)
"""
    assert python(code, tmp_path) == "[]"
    assert list(tmp_path.iterdir()) == []


def test_help_is_quick_and_needs_no_torch(repository: Path) -> None:
    if importlib.util.find_spec("drumroll.cli") is None:
        pytest.skip("drumroll.cli is not there yet")
    python(f"{BLOCK}\nimport drumroll.cli", repository)
