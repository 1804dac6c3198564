"""What every benchmark prints and writes: the machine, whether it was quiet, rows with medians and ratios, and `--json FILE`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sides import Summary

from drumroll.observe.checks import CheckRow, Options, at_least, measured, table, write_rows

_BUSY_SHARE = 0.05  # of all cores: above it a machine is not quiet
_MIB = 1 << 20


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all benchmarks share. They are run as `python benchmarks/NAME.py` from an installed drumroll."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON rows to this file")
    return made


def machine() -> str:
    """Processor, cores and versions, in one line."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{_processor()}, {os.cpu_count()} cores, one thread a process; Python {platform.python_version()}, {libraries}"


def announce() -> None:
    """Print the machine, and say so when it is busy with something else."""
    console = Console(stderr=True)
    console.print(escape(machine()), highlight=False)
    load, busy = os.getloadavg()[0], busy_share()
    console.print(f"load average {load:.2f}; cores busy before we start: {busy:.0%}", highlight=False)
    if busy > _BUSY_SHARE:
        console.print(
            "[bold yellow]this machine is not quiet[/]: ratios of alternating steps are roughly right, "
            "seconds and rates are not to be quoted"
        )


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores that others use while this process sleeps, time stolen by a hypervisor included; 0 where it cannot be read."""
    before = _jiffies()
    time.sleep(seconds)
    after = _jiffies()
    if before is None or after is None:
        return 0.0
    busy, total = (now - then for now, then in zip(after, before, strict=True))
    return busy / total if total else 0.0


def _jiffies() -> tuple[int, int] | None:
    """(busy, all) since boot, over all cores; see proc(5)."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    fields = [int(value) for value in stat.read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def matmul_rate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, size: int = 1024, tries: int = 15) -> float:
    """Best rate of a `size`^3 matrix product in FLOP/s: the peak that shares of a peak are shares of.

    On a CPU on one thread, and by processor time, as a busy machine would make it too low and every share too high.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = min(_timed(a, b, out) for _ in range(tries))
    torch.set_num_threads(threads)
    return 2 * size**3 / best


def _timed(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    if not a.is_cuda:
        start = time.process_time()
        torch.mm(a, b, out=out)
        return time.process_time() - start
    repeats = 10
    torch.cuda.synchronize(a.device)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize(a.device)
    return (time.perf_counter() - start) / repeats


def side_rows(check: str, summary: Summary, backend: str, options: Options) -> list[CheckRow]:
    """What was measured of one side: seconds a step, tokens a second, memory, and the phases where the side knows them."""
    rows = [
        measured(f"{check}: seconds a step", summary.seconds, backend=backend, options=options),
        measured(f"{check}: processor seconds a step", summary.cpu_seconds, backend=backend, options=options),
        measured(f"{check}: tokens a second", summary.tokens_per_second, backend=backend, options=options),
        measured(f"{check}: peak memory, MiB", summary.peak_bytes / _MIB, backend=backend, options=options),
        measured(f"{check}: of it before the model, MiB", summary.idle_bytes / _MIB, backend=backend, options=options),
    ]
    phases = [measured(f"{check}: seconds in {name}", value, backend=backend, options=options) for name, value in summary.phases.items()]
    return rows + phases


def ratio_rows(check: str, other: Summary, ours: Summary, target: float | None, options: Options) -> list[CheckRow]:
    """How many times faster we are, by the clock (which a target binds), and by processor time (which a busy machine disturbs less)."""
    ratio = other.seconds / ours.seconds
    return [
        measured(check, ratio, backend="single", options=options)
        if target is None
        else at_least(check, ratio, target, backend="single", options=options),
        measured(f"{check}, by processor time", other.cpu_seconds / ours.cpu_seconds, backend="single", options=options),
    ]


_Key = tuple[str, str, int]


def _split(rows: Sequence[CheckRow]) -> tuple[dict[_Key, dict[str, float]], list[CheckRow]]:
    """What was only measured, three numbers or more about one thing: (backend, options, ranks) -> check -> value; and the rest."""
    things: dict[_Key, dict[str, float]] = {}
    of = {id(row): (row.backend, " ".join(f"{key}={value}" for key, value in row.options.items()), row.ranks) for row in rows}
    for row in rows:
        if row.tolerance is None and row.passed:
            things.setdefault(of[id(row)], {})[row.check] = row.value
    things = {key: values for key, values in things.items() if len(values) > 2}
    return things, [row for row in rows if row.tolerance is not None or not row.passed or of[id(row)] not in things]


def _side_table(things: Mapping[_Key, Mapping[str, float]], title: str) -> Table:
    """A line a thing, a column a number."""
    names = list(dict.fromkeys(name for values in things.values() for name in values))
    grid = Table(title=title, title_justify="left", header_style="bold")
    for head in ("backend", "options"):
        grid.add_column(head, overflow="fold")
    for name in ("ranks", *names):
        grid.add_column(name.rpartition(": ")[2], justify="right", overflow="fold")
    for (backend, options, ranks), values in things.items():
        grid.add_row(backend, options, str(ranks), *(f"{values[name]:.4g}" if name in values else "" for name in names))
    return grid


def report(rows: Sequence[CheckRow], title: str, json: Path | None, unshown: Sequence[CheckRow] = ()) -> None:
    """Print the table, write it (and the rows that would only lengthen it) where asked for, and exit with 1 when a target was missed."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    sides, rest = _split(rows)
    if sides:
        console.print(_side_table(sides, title))
    console.print(table(rest, "" if sides else title))
    if json is not None:
        write_rows(json, [*unshown, *rows])
    if not all(row.passed for row in rows):
        sys.exit(1)
