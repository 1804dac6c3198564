"""What `drumroll verify` does: verify what is asked for, show it, and write it down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from drumroll import config as configs
from drumroll import plugins
from drumroll.config import NamedSection, RunConfig
from drumroll.errors import UserError
from drumroll.observe.checks import write_rows
from drumroll.runtime.local import resolve_device
from drumroll.runtime.worker import model_spec, optim_spec
from drumroll.verify import markdown, page, suite
from drumroll.verify.batches import SPLITS
from drumroll.verify.cell import Cell
from drumroll.verify.matrix import Matrix, mark, show_matrix
from drumroll.verify.suite import Setup
from drumroll.verify.variants import EVERYTHING, Variant
from drumroll.verify.view import show, show_verdict

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RANKS = 2


@dataclass(slots=True, frozen=True, kw_only=True)
class Outputs:
    """Files to write beside what is shown; None: not."""

    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None


def run(
    backend: str | None = None,
    *,
    every: bool = False,
    recipe: Path | None = None,
    ranks: int | None = None,
    models: Sequence[str] = (),
    dtype: str = "float32",
    device: str = "auto",
    only: str = "",
    timeout_s: float | None = None,
    outputs: Outputs = Outputs(),
    console: Console | None = None,
) -> bool:
    """Verify one backend, all of the package (`every`), or what a recipe would run; True when every check ran and passed.

    `models`: folders, hub ids or builtin:NAME; none: small models made for it, or the recipe's. `ranks`: none: 2, or the recipe's. `only`:
    text in the name of the variants to run. `timeout_s`: of one scenario. Raises UserError for input that makes no sense.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: expected {' or '.join(DTYPES)}")
    if every == bool(backend or recipe):
        raise UserError("expected the name of a backend, --all or --config RECIPE; --all goes with neither of the others")
    console = console or Console()
    setup = Setup(ranks=ranks or RANKS, models=models, only=only, device=device, timeout_s=timeout_s)
    setup = replace(setup, model=replace(setup.model, compute_dtype=DTYPES[dtype]))
    names = suite.backends_of_the_package() if every else [backend] if backend else []
    if recipe is not None:
        section, setup = _as_the_recipe(configs.load(recipe), str(recipe), backend, ranks, setup)
        names = [section.name]
    started = time.monotonic()
    title = f"{', '.join(names) if not every else 'all backends'} on {setup.ranks} rank{'s' if setup.ranks > 1 else ''}, {_dtype(setup)}"
    console.print(f"[dim]{escape(title)}: {plugins.SPECIFICATION_BACKEND} first; then a line a variant[/]", highlight=False, soft_wrap=True)
    cells = suite.verify(names, setup, partial(_tell, console))
    seconds = time.monotonic() - started
    first = cells[0]
    if not every and not first.applies:
        raise UserError(first.refusals[0])
    matrix = Matrix(cells)
    if every:
        show_matrix(console, matrix, title)
        show_verdict(console, cells, seconds)
    else:
        show(console, cells, title, seconds)
    _write(outputs, matrix, title, seconds)
    return all(cell.passed for cell in cells)


def _as_the_recipe(
    config: RunConfig, where: str, backend: str | None, ranks: int | None, setup: Setup
) -> tuple[NamedSection, Setup]:
    """The recipe's backend with its options, and its model, dtype, optimizer and how it computes; hyper-parameters stay the suite's.

    A backend by name takes the recipe's section of that name.
    """
    plugins.check(config, where)
    section = NamedSection(name=backend, **config.backend.sections) if backend else config.backend
    plugins.options("backends", section, where)
    count = ranks or config.runtime.ranks
    device = config.runtime.device if setup.device == "auto" else setup.device
    kind = torch.device(resolve_device(device, count))
    asked = optim_spec(config)
    as_asked = Variant(name="as the recipe says", scenarios=EVERYTHING, splits=SPLITS)
    return section, replace(
        setup,
        ranks=count,
        models=setup.models or (config.model.path,),
        model=model_spec(config, Path(), kind),
        optim=replace(setup.optim, name=asked.name, momentum=asked.momentum, offload=asked.offload),
        options={section.name: section.options},
        variants=(as_asked,),
        device=device,
    )


def _dtype(setup: Setup) -> str:
    return str(setup.model.compute_dtype).removeprefix("torch.")


def _tell(console: Console, cell: Cell) -> None:
    """A variant is done. Rich flushes what it prints, so this is seen at once through a pipe too."""
    text = f"{escape(cell.backend)}, {escape(cell.variant)}: {mark(cell)} ({cell.seconds:.0f} s)"
    console.print(f"[dim]{text}[/]", highlight=False, soft_wrap=True)


def _write(outputs: Outputs, matrix: Matrix, title: str, seconds: float) -> None:
    if outputs.json is not None:
        write_rows(outputs.json, [row for cell in matrix.cells for row in cell.rows])
    if outputs.html is not None:
        page.write(outputs.html, matrix, title, seconds)
    if outputs.markdown is not None:
        markdown.write(outputs.markdown, matrix, title, seconds)
