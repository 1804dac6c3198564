"""Where training state lies: bytes a parameter on a rank at rest, measured from storages, beside the formulas of the ZeRO paper.

    python benchmarks/memory.py --picture docs/img/memory.png

At rest: after the last reduction of a step, before the optimizer takes it; no engine and no reference. AdamW in float32: 4 bytes for the
parameter, 4 for its gradient, 8 for its moments (Rajbhandari et al. 2020, arXiv 1910.02054, figure 1, with 4 + 4 + 8 for its 2 + 2 + 12).
Then what is whole for a while: gathered parameters at the borders of every block, in forward and in backward, and the most bytes that
the allocator held in each phase, beside what `drumroll plan` foresees. Every rank is a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import FSDPModule

from drumroll import plugins
from drumroll.backends.base import ModelSpec, OptimSpec, RankContext
from drumroll.engines.base import Holding
from drumroll.models.locate import locate
from drumroll.observe.checks import CheckRow, at_most, measured
from drumroll.planner import phases
from drumroll.planner.forecast import training_scene
from drumroll.planner.measure import Measured, measure, train
from drumroll.planner.state import OUTSIDE
from drumroll.planner.trace import Batch
from drumroll.runtime.local import launch

BATCH, MICROS = Batch(rows=4, length=128, targets=96), 2
CPU = torch.device("cpu")
KINDS = {"parameter": "#2563eb", "gradient": "#f59e0b", "optimizer": "#10b981"}
WHOLE = "#cbd5e1"
NEAR, PEAKS = 0.02, 0.15


@dataclass(slots=True, frozen=True)
class Subject:
    """A backend with its options, and what it should hold: bytes a parameter, of `ranks`."""

    name: str
    formula: Callable[[int], float]
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    most_ranks: int = 4
    between: Callable[[int], float] = lambda ranks: 0.0  # bytes a parameter that are whole from forward to backward, the root's apart

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


SUBJECTS = (
    Subject(plugins.SPECIFICATION_BACKEND, lambda n: 16.0, "16", most_ranks=1),
    Subject("ddp", lambda n: 16.0, "16"),
    Subject("zero1", lambda n: 8 + 8 / n, "8 + 8/N"),
    Subject("zero2", lambda n: 4 + 12 / n, "4 + 12/N"),
    Subject("fsdp1", lambda n: 16 / n, "16/N"),
    Subject("fsdp2", lambda n: 16 / n, "16/N"),
    Subject("fsdp2", lambda n: 16 / n, "16/N", {"reshard_after_forward": False}, between=lambda n: 4.0),
)


@dataclass(slots=True, frozen=True)
class Found:
    """What the fullest rank held."""

    measured: Measured
    gathered: dict[str, int]  # most bytes of gathered parameters in forward, between forward and backward, in backward


class OnRank:
    """One rank of a backend."""

    def __init__(self, ctx: RankContext, name: str, options: dict[str, Any], folder: Path) -> None:
        plugin = plugins.load("backends", name)
        self._backend: Any = plugin(plugin.Config(**options))
        self._backend.setup(ctx, ModelSpec(path=str(folder)), OptimSpec())

    def look(self) -> Found:
        """Measure, then train once more with the borders of all blocks watched."""
        found = measure(self._backend, BATCH, MICROS, torch.float32, CPU)
        with sampled(self._backend._scorer, self._backend) as gathered:
            train(self._backend, BATCH, 1, CPU)
        return Found(found, gathered)

    def close(self) -> None:
        self._backend.close()


@contextmanager
def sampled(scorer: Any, backend: Any) -> Iterator[dict[str, int]]:
    """Most gathered bytes at the borders of every block."""
    most = {"forward": 0, "between": 0, "backward": 0}
    last = scorer.blocks[-1]

    def sample(when: str) -> None:
        most[when] = max(most[when], gathered_bytes(scorer, backend))

    def sample_between(*_: Any) -> None:
        most["between"] = int(backend.memory()["unsharded"])

    handles = []
    for block in scorer.blocks:
        handles.append(block.register_forward_pre_hook(lambda *_: sample("forward")))
        handles.append(block.register_forward_hook(lambda *_: sample("forward")))
        handles.append(block.register_full_backward_pre_hook(lambda *_: sample("backward")))
        handles.append(block.register_full_backward_hook(lambda *_: sample("backward")))
    handles.append(last.register_forward_hook(sample_between))
    yield most
    for handle in handles:
        handle.remove()


def gathered_bytes(scorer: nn.Module, backend: Any) -> int:
    """Of parameters, those on their way included, where units can be asked; else all that is unsharded, whole gradients too."""
    units = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
    if not units:
        return int(backend.memory()["unsharded"])
    groups = [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]
    held = [t for group in groups for p in group.fsdp_params for t in p.all_gather_outputs]
    arrived = [group._all_gather_result for group in groups if group._all_gather_result is not None]
    lingering = [state.all_gather_result for group in groups if (state := group.comm_ctx.all_gather_state) is not None]
    held += [result.all_gather_output for result in (*arrived, *lingering)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def run(subject: Subject, ranks: int, folder: Path) -> Found:
    """The fullest rank's."""
    with launch(partial(OnRank, name=subject.name, options=subject.options, folder=folder), ranks, device="cpu", in_process=False) as group:
        return max(group.call(OnRank.look), key=lambda found: sum(found.measured.rest.values()))


@dataclass(slots=True, frozen=True)
class Bar:
    """One line of the table and one bar of the picture."""

    subject: Subject
    ranks: int
    bytes: dict[str, float]  # a parameter, by kind
    between: float
    padding: float  # share of the total that rows beyond a tensor's end make up

    @property
    def total(self) -> float:
        return sum(self.bytes.values())

    @property
    def off(self) -> float:
        return abs(self.total / self.subject.formula(self.ranks) - 1)


def rows(subject: Subject, ranks: int, found: Found, folder: Path) -> tuple[list[CheckRow], Bar]:
    """Rest, what is gathered, and peaks beside the plan's."""
    plugin = plugins.load("backends", subject.name)
    footprint = plugin.footprint(plugin.Config(**subject.options), ranks)
    scene = replace(training_scene(ModelSpec(path=str(folder)), OptimSpec(), footprint, BATCH, MICROS, CPU), engine=Holding(0, 0, 0))
    count = sum(tensor.numel for tensor in scene.tensors)
    by_kind = {kind: found.measured.rest[kind] / count for kind in KINDS}
    padding = max(0.0, scene.state.total / count / subject.formula(ranks) - 1)
    bar = Bar(subject, ranks, by_kind, found.gathered["between"] / count, padding)
    limit = partial(at_most, backend=subject.name, options=subject.options, ranks=ranks)
    note = partial(measured, backend=subject.name, options=subject.options, ranks=ranks)
    made = [
        note("at rest: bytes a parameter", bar.total),
        note("at rest: padding, share", padding),
        limit(f"at rest: off {subject.text}, share (2 % and padding)", bar.off, NEAR + padding),
        limit("at rest: planned off measured, share", abs(scene.state.total / count / bar.total - 1), 0.05),
    ]
    if footprint.gathering is not None and ranks > 1:
        root = scene.unit(OUTSIDE)
        block = max(scene.unit(unit) for unit in scene.unit_elements if unit != OUTSIDE)
        made += gathered_rows(subject, ranks, found, bar, root + 2 * block, limit)
    for phase in phases.phases(scene):
        if phase.name in found.measured.peaks:
            peak = found.measured.peaks[phase.name]
            made.append(note(f"{phase.name}: peak, MiB", peak / (1 << 20)))
            made.append(limit(f"{phase.name}: planned off measured peak, share", abs(phase.total / peak - 1), PEAKS))
    return made, bar


def gathered_rows(
    subject: Subject, ranks: int, found: Found, bar: Bar, allowed: int, limit: Callable[..., CheckRow]
) -> list[CheckRow]:
    """`allowed`: bytes of the root and two blocks."""
    if subject.between(ranks):
        whole = subject.between(ranks)
        return [limit("from forward to backward: off 4 bytes a parameter, share", abs(bar.between / whole - 1), NEAR + bar.padding)]
    names = ("forward", "backward")
    return [limit(f"gathered in {when}, of root and 2 blocks", found.gathered[when] / allowed, 1 + NEAR) for when in names]


def table(bars: Sequence[Bar]) -> Table:
    """The table of the documentation."""
    grid = Table(title="bytes a parameter on a rank at rest, float32 and AdamW", title_justify="left", header_style="bold")
    for name in ("backend", "ranks", *KINDS, "total", "ZeRO's formula", "off", "padding", "whole from forward to backward"):
        grid.add_column(name, justify="left" if name == "backend" else "right")
    for bar in bars:
        formula = f"{bar.subject.text} = {bar.subject.formula(bar.ranks):.2f}"
        kinds = [f"{bar.bytes[kind]:.3f}" for kind in KINDS]
        shares = [f"{bar.off:.2%}", f"{bar.padding:.2%}", f"{bar.between:.2f}"]
        grid.add_row(bar.subject.label, str(bar.ranks), *kinds, f"{bar.total:.3f}", formula, *shares)
    return grid


def draw(bars: Sequence[Bar], path: Path) -> None:
    """Stacked bars, grouped by backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = list(dict.fromkeys(bar.subject.label for bar in bars))
    places = [labels.index(bar.subject.label) + 0.27 * {1: -1, 2: 0, 4: 1}[bar.ranks] for bar in bars]
    floor = [0.0] * len(bars)
    for kind, color in KINDS.items():
        heights = [bar.bytes[kind] for bar in bars]
        axes.bar(places, heights, 0.24, bottom=floor, color=color, label=kind, zorder=2)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    between = [bar.between if bar.subject.between(bar.ranks) and bar.ranks > 1 else 0.0 for bar in bars]
    axes.bar(places, between, 0.24, bottom=floor, color=WHOLE, label="gathered, from forward to backward", zorder=2)
    for place, low, extra, bar in zip(places, floor, between, bars, strict=True):
        axes.hlines(bar.subject.formula(bar.ranks), place - 0.13, place + 0.13, color="#0f172a", linewidth=1.4, zorder=3)
        axes.text(place, low + extra + 0.2, f"N={bar.ranks}", ha="center", fontsize=8, color="#475569")
    axes.set_xticks(range(len(labels)), [label.replace(" ", "\n").replace("reshard_after_forward", "reshard") for label in labels])
    axes.set_ylabel("bytes a parameter on a rank")
    axes.set_title("Training state at rest, measured from storages; lines: ZeRO's formulas", loc="left", fontsize=13, fontweight="bold")
    axes.grid(axis="y", color="#e2e8f0", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, 18.5)
    axes.legend(frameon=False, loc="upper right", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="builtin:llama-4.5m", help="folder, hub id or builtin:NAME")
    parser.add_argument("--ranks", type=int, action="append", help="only this many ranks; may be given several times")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the stacked bars to this PNG")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, by which the allocator is watched, else talks to stderr
    common.announce()
    folder = locate(options.model)
    found_rows: list[CheckRow] = []
    bars: list[Bar] = []
    for subject in SUBJECTS:
        for ranks in (count for count in options.ranks or (1, 2, 4) if count <= subject.most_ranks):
            made, bar = rows(subject, ranks, run(subject, ranks, folder), folder)
            found_rows += made
            bars.append(bar)
    Console(width=160).print(table(bars))
    if options.picture is not None:
        draw(bars, options.picture)
    common.report(found_rows, f"Memory, {options.model}", options.json)


if __name__ == "__main__":
    main()
