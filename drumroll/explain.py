"""Say what is wrong with a configuration: pydantic's faults, in the words and keys of the person who wrote the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(schema: type[BaseModel], error: ValidationError, section: str = "") -> Iterator[str]:
    """One line a fault: the key, what was expected, what was got. `section` is the key that holds the tree validated."""
    prefix = [section] if section else []
    mistyped: set[str] = set()  # keys named as the nearest of an unknown one: not reported as missing too
    for fault in sorted(error.errors(include_url=False), key=lambda fault: fault["type"] == "missing"):
        path, inside = _locate(schema, fault["loc"])
        key = ".".join(prefix + path)
        if fault["type"] == "extra_forbidden":
            near, hint = _hint(schema, str(fault["loc"][-1]), prefix + path[:-1], _locate(schema, fault["loc"][:-1])[1])
            mistyped.add(near)
            yield f"unknown key {key!r}; {hint}"
        elif fault["type"] == "missing":
            if key not in mistyped:
                yield f"missing key {key!r}"
        elif fault["type"] == "value_error":
            yield f"{key}: {fault['ctx']['error']}" if key else str(fault["ctx"]["error"])
        elif fault["type"] == "model_type":
            yield f"{key}: expected a section with keys {', '.join(inside)}; got {fault['input']!r}"
        else:
            yield f"{key}: {fault['msg']}, got {fault['input']!r}"


def _hint(schema: type[BaseModel], leaf: str, parents: list[str], valid: list[str]) -> tuple[str, str]:
    """The nearest valid key beside the unknown one (or ""), and a hint: that one, else where the key would be right."""
    near = [".".join([*parents, name]) for name in get_close_matches(leaf.lower(), valid, n=1)]
    if near:
        return near[0], f"did you mean {near[0]!r}?"
    homes = [key for key in _all_keys(schema) if key.endswith(f".{leaf}")]
    elsewhere = f"; did you mean {' or '.join(homes)}?" if homes else ""
    return "", f"valid keys here: {', '.join(valid) or 'none'}{elsewhere}"


def _all_keys(schema: type[BaseModel], parent: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield parent + name
        for model in _models_in(field.annotation):
            yield from _all_keys(model, f"{parent}{name}.")


def _locate(schema: type[BaseModel], loc: Sequence[int | str]) -> tuple[list[str], list[str]]:
    """The parts of the key at `loc` as the user wrote it, and the keys valid inside it.

    In a union pydantic puts the tag of the member it tried into `loc`. A tag is the name of the member's class, by convention: it narrows
    the search and is no key.
    """
    path: list[str] = []
    sections: list[type[BaseModel]] = [schema]
    for part in loc:
        named = [s for s in sections if s.__name__ == part]
        if named:
            sections = named
            continue
        path.append(str(part))
        fields = [s.model_fields[str(part)] for s in sections if str(part) in s.model_fields]
        if fields:
            sections = [m for f in fields for m in _models_in(f.annotation)]
    return path, [name for s in sections for name in s.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in get_args(annotation) for m in _models_in(arg)]
