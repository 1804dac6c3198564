"""What would make a run fit: changes of the recipe, each of which the planner has tried and found to help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumroll import plugins
from drumroll.config import RunConfig
from drumroll.errors import UserError
from drumroll.planner.forecast import Forecast, forecast

USABLE = 0.92  # share of a GPU's memory: contexts of CUDA and NCCL, and what the allocator cannot hand out, take the rest
_HELPS = 0.99  # of what was needed before
_TILE = 2048  # tokens
_MOST_RANKS = 1024

Load = Callable[[Sequence[str]], RunConfig]  # the recipe with further overrides


@dataclass(slots=True, frozen=True)
class Advice:
    """One more change, on top of those before it."""

    override: str  # as on the command line
    total: int  # bytes at the peak, then
    phase: str  # whose peak that is
    fits: bool


def fits(plan: Forecast, memory: int) -> bool:
    """Whether the fullest rank's peak leaves a device of `memory` bytes its reserve; host memory needs none."""
    return plan.peak.total <= (memory * USABLE if plan.device == "cuda" else memory)


def advise(load: Load, folder: Path, plan: Forecast, memory: int) -> list[Advice]:
    """Changes in the order in which they cost least, until the run fits or nothing is left to change."""
    taken: list[Advice] = []
    for change in (_checkpointing, _smaller_micro_batches, _tiled_mlp, _another_backend, _take_turns, _off_loaded_optimizer, _more_ranks):
        for override in change(load([one.override for one in taken]), plan):
            if fits(plan, memory):
                return taken
            kept = [one for one in taken if _key(one.override) != _key(override)]
            try:
                tried = forecast(load([*(one.override for one in kept), override]), folder)
            except UserError:
                continue  # this model, or this backend, has no such option
            if tried.peak.total <= _HELPS * plan.peak.total:
                plan = tried
                taken = [*kept, Advice(override, plan.peak.total, plan.peak.name, fits(plan, memory))]
    return taken


def _key(override: str) -> str:
    return override.partition("=")[0]


def _checkpointing(config: RunConfig, plan: Forecast) -> Iterator[str]:
    if config.model.checkpointing in ("none", "selective"):
        yield "model.checkpointing=full"


def _smaller_micro_batches(config: RunConfig, plan: Forecast) -> Iterator[str]:
    rows = plan.work.batch.rows
    while rows > 1:
        rows //= 2
        yield f"train.micro_batch_tokens={rows * config.max_length}"


def _tiled_mlp(config: RunConfig, plan: Forecast) -> Iterator[str]:
    if config.model.tile_mlp == 0 and plan.work.batch.tokens > _TILE:
        yield f"model.tile_mlp={_TILE}"


def _another_backend(config: RunConfig, plan: Forecast) -> Iterator[str]:
    """Those with the least state at rest, the first of equals."""
    if plan.ranks > 1:
        yield from (f"backend.name={name}" for name in plugins.names("backends") if name != config.backend.name)


def _take_turns(config: RunConfig, plan: Forecast) -> Iterator[str]:
    if config.engine is not None and not config.runtime.take_turns:
        yield "runtime.take_turns=true"


def _off_loaded_optimizer(config: RunConfig, plan: Forecast) -> Iterator[str]:
    if not config.optim.offload and plan.device == "cuda":
        yield "optim.offload=true"


def _more_ranks(config: RunConfig, plan: Forecast) -> Iterator[str]:
    ranks = plan.ranks
    while ranks < _MOST_RANKS:
        ranks *= 2
        yield f"runtime.ranks={ranks}"
