"""Say what is wrong with a configuration: pydantic's faults, in the words and keys of the person who wrote the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from drumroll.config.nearest import Suggestion, suggest
from drumroll.config.options import plugin_options
from drumroll.config.schema import RunConfig
from drumroll.config.section import StrayOptions


def explain(schema: type[BaseModel], error: ValidationError, section: str = "") -> Iterator[str]:
    """One line a fault: the key, what was expected, what was got. `section` is the key that holds the tree validated."""
    prefix = [section] if section else []
    mistyped: set[str] = set()  # keys named as the nearest of an unknown one: not reported as missing too
    for fault in sorted(error.errors(include_url=False), key=lambda fault: fault["type"] == "missing"):
        path, inside = _locate(schema, fault["loc"])
        key = ".".join(prefix + path)
        if fault["type"] == "extra_forbidden":
            beside = _locate(schema, fault["loc"][:-1])[1]
            hint = suggest(key, beside, recipe_keys() if section or schema is RunConfig else all_keys(schema))
            mistyped.update(hint.keys)
            yield f"unknown key {key!r}; {hint.words}"
        elif fault["type"] == "missing":
            if key not in mistyped:
                yield f"missing key {key!r}"
        elif fault["type"] == "value_error":
            yield from _of_ours(key, fault["ctx"]["error"])
        elif fault["type"] == "model_type":
            yield f"{key}: expected a section with keys {', '.join(inside)}; got {fault['input']!r}"
        else:
            yield f"{key}: {fault['msg']}, got {fault['input']!r}"


def _of_ours(key: str, error: ValueError) -> Iterator[str]:
    """What a validator of the schema itself has raised."""
    if isinstance(error, StrayOptions):
        yield from (_stray(key, option, error.selected) for option in error.options)
    else:
        yield f"{key}: {error}" if key else str(error)


def unknown_option(section: str, option: str) -> str:
    """What to say of an option that the package's plug-in `section`, e.g. backend.<name>, does not have."""
    return f"unknown key {f'{section}.{option}'!r}; {_near_option(section, option).words}"


def _near_option(section: str, option: str) -> Suggestion:
    return suggest(f"{section}.{option}", plugin_options().get(section, ()), recipe_keys())


def _stray(key: str, option: str, selected: str) -> str:
    """An option that stands beside `name` and not below the plug-in's name, or a plug-in's name with something else than options below."""
    section = f"{key}.{selected}"
    if option == selected or f"{key}.{option}" in plugin_options():
        return f"{key}.{option}: expected a section with the options of that plug-in; leave it out where it is to have none"
    near = _near_option(section, option).keys if option not in plugin_options().get(section, ()) else [f"{section}.{option}"]
    if near:
        return f"unknown key {f'{key}.{option}'!r}; did you mean {' or '.join(map(repr, near))}?"
    return f"{key}: {option!r} is neither `name` nor the section of a plug-in; options go below the plug-in's name, e.g. {section}.{option}"


def recipe_keys() -> Iterator[str]:
    """Every key of a recipe, with those of the package's own plug-ins."""
    yield from all_keys(RunConfig)
    for section, names in plugin_options().items():
        yield from (f"{section}.{name}" for name in names)


def all_keys(schema: type[BaseModel], parent: str = "") -> Iterator[str]:
    """Every key of a schema and of the sections inside it."""
    for name, field in schema.model_fields.items():
        yield parent + name
        for model in models_in(field.annotation):
            yield from all_keys(model, f"{parent}{name}.")


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
            sections = [m for f in fields for m in models_in(f.annotation)]
    return path, [name for s in sections for name in s.model_fields]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation is made of, e.g. the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in get_args(annotation) for m in models_in(arg)]
