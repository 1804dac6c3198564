"""mkdocs hook: fills docs/config.md from the schema, so that a key is described in one place only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drumroll.config.keys import Table
from drumroll.reference import reference

MARK = "<!-- every key -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark by the tables."""
    return markdown.replace(MARK, "\n".join(line for table in reference() for line in lines(table))) if MARK in markdown else markdown


def lines(table: Table) -> Iterator[str]:
    """A section as Markdown."""
    yield f"\n## {table.title}\n"
    yield f"{table.about}\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in table.keys:
        default = f"`{_cell(key.default)}`" if key.default else ""
        yield f"| `{key.name}` | {_cell(key.type)} | {default} | {_cell(key.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
