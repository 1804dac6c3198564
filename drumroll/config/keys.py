"""The keys of a section as a table: name, type, default, meaning. What the schema says, in words for people."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drumroll.config.explain import models_in

REQUIRED, SECTION = "required", "section"
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}  # pydantic keeps a bound as a dataclass with one of these fields
WORDS: dict[Any, str] = {type(None): "null", Any: "any"}


@dataclass(slots=True, frozen=True)
class Key:
    name: str  # dotted, from the top of the recipe
    type: str
    default: str  # as YAML; `required` where there is none; empty for a section
    meaning: str


@dataclass(slots=True, frozen=True)
class Table:
    """The keys of one section. A section of several forms has a table for each."""

    section: str  # dotted; empty: the top level
    form: str  # which one, where the section has several; else empty
    about: str
    keys: Sequence[Key]

    @property
    def title(self) -> str:
        return " ".join([self.section or "top level", f"({self.form})" if self.form else ""]).strip()


def tables(schema: type[BaseModel], section: str = "", form: str = "") -> Iterator[Table]:
    """The table of a schema, and those of the sections inside it."""
    prefix = f"{section}." if section else ""
    yield Table(section, form, _first_paragraph(schema), [_key(prefix + name, field) for name, field in schema.model_fields.items()])
    for name, field in schema.model_fields.items():
        forms = models_in(field.annotation)
        for inner in forms:
            yield from tables(inner, prefix + name, f"with {_first_required(inner)}" if len(forms) > 1 else "")


def _first_required(schema: type[BaseModel]) -> str:
    return next(name for name, field in schema.model_fields.items() if field.is_required())


def in_words(annotation: Any) -> str:
    """An annotation for people: `int > 0`, `float | null`, `adamw | muon`, `list of str`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return SECTION
    if origin is Annotated:
        return _bounded(in_words(inner[0]), inner[1:])
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(in_words, inner)))
    if origin is tuple:
        element = in_words(inner[0])
        return f"list of {element}{'s' if element == SECTION else ''}" if Ellipsis in inner else f"list of {len(inner)}: {element}"
    if origin is dict:
        return "mapping"
    return WORDS.get(annotation) or (annotation.__name__ if isinstance(annotation, type) else str(annotation))


def as_yaml(value: Any) -> str:
    """A default as it would stand in a recipe."""
    return str(value) if isinstance(value, str) and value else json.dumps(value)


def _key(name: str, field: FieldInfo) -> Key:
    kind = _bounded(in_words(field.annotation), field.metadata)
    if field.is_required():
        default = REQUIRED
    else:
        value = field.get_default(call_default_factory=True)
        default = "" if isinstance(value, BaseModel) else as_yaml(value)
    return Key(name, kind, default, " ".join((field.description or "").split()))


def _bounded(kind: str, metadata: Sequence[Any]) -> str:
    """With the bounds that the metadata give, e.g. `float > 0, <= 1`; they stand in it bare or inside a field."""
    items = [inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]
    bounds = [asdict(item) for item in items if is_dataclass(item) and not isinstance(item, type)]
    said = ", ".join(f"{BOUNDS[name]} {value:g}" for bound in bounds for name, value in bound.items() if name in BOUNDS)
    number, bar, rest = kind.partition(" | ")
    return f"{number} {said}{bar}{rest}" if said else kind


def _first_paragraph(schema: type[BaseModel]) -> str:
    text = schema.__doc__ if schema.__doc__ != BaseModel.__doc__ else None
    return " ".join((text or "").strip().split("\n\n")[0].split())
