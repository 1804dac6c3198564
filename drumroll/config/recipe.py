"""A recipe from its file and back: YAML, `a.b=c` overrides, and refusals in words."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from drumroll.config.explain import explain
from drumroll.config.schema import RunConfig
from drumroll.errors import UserError

T = TypeVar("T", bound=BaseModel)


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and apply `a.b=c` overrides (values are YAML). Raises UserError naming file and key."""
    return parse(read_tree(path, overrides), str(path))


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe as it stands, with the overrides in it, not yet validated. Raises UserError for what is no recipe or no override."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file}: no such recipe")
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: expected a mapping of keys at the top level, got {type(found).__name__}")
    for text in overrides:
        _override(found, text)
    return found


def parse(tree: Mapping[str, Any], where: str = "config") -> RunConfig:
    """Validate a mapping. Raises UserError with one line a fault: key, what was expected, what was got."""
    return validate(RunConfig, tree, where)


def validate(schema: type[T], tree: Mapping[str, Any], where: str, section: str = "") -> T:
    """Validate `tree` against a schema. Raises UserError with one line a fault; `section` is the key that holds the tree, e.g. optim."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: {line}" for line in explain(schema, error, section))) from error


def dump(config: RunConfig, path: Path) -> None:
    """Write the resolved config as YAML, without what the run does not read; `load` gives it back equal."""
    tree = config.model_dump(mode="json")
    for key in (key for _, keys, _ in config.unread() for key in keys):
        *parents, leaf = key.split(".")
        node = tree
        for part in parents:
            node = node.get(part, {})
        node.pop(leaf, None)
    path.write_text(yaml.dump(tree, Dumper=_Dumper, sort_keys=False), encoding="utf-8")


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"{text!r}: expected key=value, e.g. runtime.ranks=2")
    *parents, leaf = key.split(".")
    node = tree
    for depth, part in enumerate(parents):
        child = node.get(part)
        at = ".".join(parents[: depth + 1])
        if isinstance(child, list) or (child is None and [*parents, leaf][depth + 1].isdigit()):
            raise UserError(f"{text!r}: {at} is a list, and a list is given whole: {at}=[...]")
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise UserError(f"{text!r}: {at} is a value ({child!r}), not a section")
        node = child
    try:
        node[leaf] = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{text!r}: the value is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key may stand only once, and `3e-4` (text in YAML 1.1) is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """As in the base class; raises a YAML error with the line of a key that stands twice."""
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):  # others the base class refuses
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))
