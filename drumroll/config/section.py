"""What every section of a recipe is, a plug-in's too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base of every section, plug-ins' included: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False, ser_json_inf_nan="constants")

    @field_validator("*", mode="before")
    @classmethod
    def _a_boolean_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take `true` for 1."""
        kinds = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
        if kinds & {int, float} and bool not in kinds:
            for item in value if isinstance(value, Sequence) else (value,):
                if isinstance(item, bool):
                    raise ValueError(f"expected a number, got the boolean {str(item).lower()}")
        return value


def _kinds(annotation: Any) -> Iterator[type]:
    """The classes that an annotation is made of; a literal counts as its class."""
    inner = get_args(annotation)
    if not inner:
        yield annotation if isinstance(annotation, type) else type(annotation)
    for part in inner:
        yield from _kinds(part)


class StrayOptions(ValueError):
    """Options that stand beside `name`, and not in the section of the plug-in that is selected."""

    def __init__(self, options: Sequence[str], selected: str) -> None:
        super().__init__(f"{', '.join(options)}: neither `name` nor the section of a plug-in")
        self.options = options
        self.selected = selected


class NamedSection(BaseModel):
    """`name` selects a plug-in; every other key is the section of a plug-in of that name."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="constants")
    name: str = Field(description="a plug-in of the package (`drumroll doctor` lists them), module:Name or file.py:Name")

    @model_validator(mode="after")
    def _sections_are_mappings(self) -> NamedSection:
        stray = [key for key, value in self.sections.items() if not isinstance(value, Mapping)]
        if stray:
            raise StrayOptions(stray, self.name)
        return self

    @property
    def sections(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def options(self) -> dict[str, Any]:
        """Raw options of the selected plug-in."""
        return dict(self.sections.get(self.name, {}))
