"""What is read from a checkpoint, a data set or a model folder is data: nothing in it is run."""

from __future__ import annotations

import ast

import pytest

from drumroll.config import ModelConfig
from tests.architecture.source import Module, modules

# Objects do go pickled between processes that drumroll has started, by multiprocessing's pipes: no module needs one of these for it.
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_nothing_unpickles_what_lies_in_a_file(module: Module) -> None:
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in PICKLES]
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES:
            found.append(node.module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            called = f"{node.value.id}.{node.attr}"
            found += [called] if called in ("torch.load", "dcp.FileSystemReader") else []
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += ["allow_pickle"] if not (isinstance(node.value, ast.Constant) and node.value.value is False) else []
    assert not found, f"{module.where}: {found}"


def test_numpy_files_are_opened_without_pickle() -> None:
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "np.load":
                assert any(keyword.arg == "allow_pickle" for keyword in node.keywords), f"{module.where}:{node.lineno}"


def test_code_in_a_model_folder_is_not_run_unless_asked() -> None:
    assert ModelConfig(path="x").trust_remote_code is False
