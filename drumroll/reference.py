"""Every key that a recipe may have: those of the schema, of plug-ins, procedural tasks and rewards. One source for all who list them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from drumroll import plugins
from drumroll.config import RunConfig
from drumroll.config.explain import recipe_keys
from drumroll.config.keys import REQUIRED, Key, Table, as_yaml, in_words, tables
from drumroll.config.nearest import suggest
from drumroll.config.options import KINDS
from drumroll.data import tasks
from drumroll.errors import UserError
from drumroll.rewards import lookup

OPTIONS = "data.train.options"
ARGS = "rewards.args"


def reference(prefix: str = "") -> Iterator[Table]:
    """A table a section, with the keys that begin with `prefix`. A plug-in is imported only where its keys may: that takes seconds."""
    for table in _tables(prefix):
        keys = [key for key in table.keys if key.name.startswith(prefix)]
        if keys:
            yield replace(table, keys=keys)


def show(console: Console, prefix: str = "") -> None:
    """`drumroll keys`: on a terminal a block a key, elsewhere one line a key. Raises UserError, naming the nearest, where there is none."""
    shown = False
    for table in reference(prefix):
        shown = True
        if console.is_terminal:
            console.print(f"\n[bold]{escape(table.title)}[/]  [dim]{escape(table.about)}[/]", highlight=False)
            console.print(_grid(table))
        for key in table.keys if not console.is_terminal else ():
            meaning = f"{table.form}: {key.meaning}" if table.form else key.meaning
            print(key.name, key.type, key.default, meaning, sep="\t", file=console.file)  # rich would expand the tabs
    if not shown:
        hint = suggest(prefix, list(RunConfig.model_fields), recipe_keys())
        raise UserError(f"no key begins with {prefix!r}; {hint.words}")


def _grid(table: Table) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, ratio=None)
    grid.add_column(overflow="fold")
    for key in table.keys:
        default = f" [green]{escape(key.default)}[/]" if key.default else ""
        grid.add_row(escape(key.name), f"[cyan]{escape(key.type)}[/]{default}  {escape(key.meaning)}")
    return grid


def _tables(prefix: str) -> Iterator[Table]:
    yield from tables(RunConfig)
    for name, task in tasks.BUILTIN.items():
        yield from tables(task, OPTIONS, f"task: {name}")
    for fn in lookup.BUILTIN if _may_begin(ARGS, prefix) else ():
        yield _of_reward(fn)
    for key, kind in KINDS.items():
        for name in plugins.names(kind):
            section = f"{key}.{name}"
            if _may_begin(section, prefix):
                yield from tables(plugins.load(kind, name).Config, section)


def _may_begin(section: str, prefix: str) -> bool:
    return section.startswith(prefix) or prefix.startswith(f"{section}.")


def _of_reward(fn: str) -> Table:
    """The arguments of a built-in reward, from its signature; what they mean is in their annotations."""
    function = lookup.builtin(fn)
    hints = get_type_hints(function, include_extras=True)
    named = [p for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    keys = [_argument(p.name, hints[p.name], REQUIRED if p.default is inspect.Parameter.empty else as_yaml(p.default)) for p in named]
    about = (inspect.getdoc(function) or "").split("\n\n")[0]
    return Table(ARGS, f"fn: {fn}", " ".join(about.split()), keys)


def _argument(name: str, hint: Any, default: str) -> Key:
    meaning = " ".join(text for text in get_args(hint)[1:] if isinstance(text, str)) if get_origin(hint) is Annotated else ""
    return Key(f"{ARGS}.{name}", in_words(hint), default, meaning)
