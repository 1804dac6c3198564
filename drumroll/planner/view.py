"""A forecast as tables on the console, and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from drumroll.errors import UserError
from drumroll.observe.foreseen import size
from drumroll.planner.advice import Advice, fits
from drumroll.planner.forecast import Forecast

_BAR = 12  # characters
_TERMS = 3
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(slots=True, frozen=True)
class Planned:
    """One forecast against the memory that a rank has."""

    forecast: Forecast
    memory: int | None  # bytes; None: unknown
    advice: list[Advice]

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None else fits(self.forecast, self.memory)


def memory_of(text: str) -> int:
    """Bytes of `80GiB`, `80 GB` or a plain number. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise UserError(f"--memory {text}: expected a size such as 80GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def memory_here(device: str, ranks: int) -> int | None:
    """Bytes that a rank has on this machine: its GPU's, or its share of main memory; None for a GPU where there is none."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    return int(info.read_text().split("MemTotal:")[1].split()[0]) * 1024 // ranks


def show(planned: Sequence[Planned], console: Console | None = None) -> None:
    """Print one block of tables a world size."""
    for one in planned:
        (console or Console()).print(Group(_phases(one), _traffic(one), *_verdict(one)), "")


def _phases(planned: Planned) -> Table:
    plan = planned.forecast
    batch = plan.work.batch
    title = (
        f"[bold]{plan.backend}, {plan.ranks} {'rank' if plan.ranks == 1 else 'ranks'}[/] ({plan.device}): {plan.parameters / 1e6:,.1f}M "
        f"parameters; largest micro-batch {batch.rows} × {batch.length} tokens, {plan.work.micros} a step"
    )
    grid = Table(title=title, title_justify="left", title_style="", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("phase", no_wrap=True)
    grid.add_column("a rank", justify="right", no_wrap=True)
    grid.add_column("", no_wrap=True)
    grid.add_column("most of it")
    scale = max(planned.memory or 0, plan.peak.total)
    for phase in plan.phases:
        style = "bold" if phase is plan.peak else ""
        filled = round(_BAR * phase.total / scale)
        color = "red" if planned.memory is not None and phase.total > planned.memory else "cyan"
        terms = ", ".join(f"{name} {size(part)}" for name, part in phase.largest(_TERMS))
        grid.add_row(phase.name, size(phase.total), f"[{color}]{'█' * filled}[/][dim]{'·' * (_BAR - filled)}[/]", terms, style=style)
    return grid


def _traffic(planned: Planned) -> Table | str:
    plan = planned.forecast
    if not plan.traffic:
        return "communication: none"
    total = sum(traffic.bytes * traffic.times for traffic in plan.traffic)
    grid = Table(title=f"a rank sends {size(total)} in a step", title_justify="left", title_style="", box=None, header_style="dim")
    for name in ("what", "at a time", "times", "in a step"):
        grid.add_column(name, justify="left" if name == "what" else "right")
    for traffic in plan.traffic:
        grid.add_row(traffic.what, size(traffic.bytes), str(traffic.times), size(traffic.bytes * traffic.times))
    return grid


def _verdict(planned: Planned) -> list[str]:
    plan = planned.forecast
    lines = [f"in host memory besides: {size(plan.host)}"] if plan.host else []
    lines += [f"[yellow]{escape(note)}[/]" for note in plan.notes]
    peak = f"peak {size(plan.peak.total)} in {plan.peak.name}"
    if planned.memory is None:
        return [*lines, f"{peak}; how much a device has is not known here: say --memory 80GiB"]
    if planned.fits:
        return [*lines, f"[green]fits[/]: {peak}, a rank has {size(planned.memory)}"]
    lines.append(f"[bold red]does not fit[/]: {peak}, a rank has {size(planned.memory)}")
    for number, advice in enumerate(planned.advice, start=1):
        end = "[green]fits[/]" if advice.fits else "not yet"
        lines.append(f"  {number}. {escape(advice.override)}: then {size(advice.total)} in {advice.phase}, {end}")
    if not planned.advice:
        lines.append("  nothing that the planner can change makes it smaller: a smaller model, LoRA, or devices with more memory")
    return lines


def write(path: Path, planned: Sequence[Planned]) -> None:
    """A JSON array, one object a world size; sizes in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([_row(one) for one in planned], indent=1) + "\n", encoding="utf-8")


def _row(planned: Planned) -> dict[str, Any]:
    plan = planned.forecast
    return {
        "backend": plan.backend,
        "ranks": plan.ranks,
        "device": plan.device,
        "parameters": plan.parameters,
        "at_rest": asdict(plan.state),
        "critic_at_rest": asdict(plan.critic) if plan.critic is not None else None,
        "work": asdict(plan.work),
        "phases": [{"phase": phase.name, "bytes": phase.total, "terms": phase.terms} for phase in plan.phases],
        "traffic": [asdict(traffic) for traffic in plan.traffic],
        "notes": plan.notes,
        "memory": planned.memory,
        "fits": planned.fits,
        "advice": [asdict(advice) for advice in planned.advice],
    }
