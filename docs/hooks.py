"""mkdocs hook: fills docs/config.md from the schema, so that a key is described in one place only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from drumroll import plugins
from drumroll.config import RunConfig

MARK = "<!-- every key -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark by the tables."""
    return markdown.replace(MARK, "\n".join(reference())) if MARK in markdown else markdown


def reference() -> Iterator[str]:
    """Markdown tables: the top level, each section, then each plug-in's own."""
    yield from _table("Top level", RunConfig, "")
    for name, field in RunConfig.model_fields.items():
        for section in _models(field.annotation):
            if section.model_fields.keys() != {"name"}:
                yield from _table(name, section, f"{name}.")
    for kind in ("backends", "engines"):
        for name in plugins.names(kind):
            schema = plugins.load(kind, name).Config
            if schema.model_fields:
                prefix = f"{kind.removesuffix('s')}.{name}"
                yield from _table(prefix, schema, f"{prefix}.")


def _table(title: str, schema: type[BaseModel], prefix: str) -> Iterator[str]:
    yield f"\n## {title}\n"
    if schema.__doc__ and schema.__doc__ != BaseModel.__doc__:
        yield schema.__doc__.strip().split("\n\n")[0] + "\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    yield from _rows(schema, prefix)


def _rows(schema: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in schema.model_fields.items():
        inner = _models(field.annotation)
        default = "required" if field.is_required() else "" if inner else f"`{field.get_default(call_default_factory=True)!r}`"
        yield f"| `{prefix}{name}` | {_type(field.annotation)} | {default} | {_cell(field.description or '')} |"
        for model in inner if prefix else []:
            if len(inner) > 1:
                yield f"| | | | *either* {_cell((model.__doc__ or '').strip())} |"
            yield from _rows(model, f"{prefix}{name}.")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _type(annotation: Any) -> str:
    if _models(annotation):
        return "section"
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    text = re.sub(r"Annotated\[int, .*?Gt\(gt=0\).*?\)\]", "int > 0", text.replace("typing.", "").replace("NoneType", "None"))
    text = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)
    text = re.sub(r"^Literal\[(.*)\]( \| None)?$", r"\1\2", text)
    return _cell(f"`{text}`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
