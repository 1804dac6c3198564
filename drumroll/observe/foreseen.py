"""What `drumroll plan` foresaw of a run's memory beside what the run measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BEYOND = 0.15  # share by which a measured size may miss the foreseen one without a warning
_RESIDENT_SLACK = 256 << 20  # of resident memory: what libraries and the allocator's gaps may add, whatever the model


@dataclass(slots=True, frozen=True)
class Foreseen:
    """Bytes on the fullest rank."""

    state: int  # parameters, gradients and optimizer state between steps
    peak: int  # of all tensors, with the longest batches that the config allows; and what the process holds besides
    process: int = 0  # what a process held before any model, where resident memory is measured (on a CPU); part of `peak`


def size(count: float) -> str:
    """Bytes in a unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def beside(foreseen: Foreseen, state: Sequence[int], peak: Sequence[int]) -> str:
    """Both pairs in one line, and a warning for what is beyond 15 %: the state either way, the peak where it is higher.

    A lower peak is no fault: batches were shorter than they might have been. On a CPU the peak is resident memory, where libraries and
    the allocator's own gaps count too: it warns of more than these alone. `state`, `peak`: measured, one a rank.
    """
    of_it = f", of it the process {size(foreseen.process)}" if foreseen.process else ""
    states = f"state {size(max(state))}, foreseen {size(foreseen.state)}"
    pairs = f"memory a rank: {states}; peak {size(max(peak))}, foreseen {size(foreseen.peak)}{of_it}"
    return "\n".join([pairs, *_warnings(foreseen, max(state), max(peak))])


def _warnings(foreseen: Foreseen, state: int, peak: int) -> Iterator[str]:
    if abs(state - foreseen.state) > BEYOND * foreseen.state:
        yield f"WARNING: the training state is {state / foreseen.state - 1:+.0%} off what was foreseen: please report this, with the recipe"
    if peak - foreseen.peak > max(BEYOND * foreseen.peak, _RESIDENT_SLACK if foreseen.process else 0):
        yield (
            f"WARNING: the peak is {peak / foreseen.peak - 1:+.0%} above what was foreseen: other work in the same process, or a model "
            "whose activations `drumroll plan` does not see; do not count on its numbers for a larger run"
        )
