"""The log-prob head against the version that makes all logits: peak memory and speed, forward and backward, and forward alone.

    python benchmarks/head.py

Log-probs and entropies of 4,096 tokens over a vocabulary of 50,257. The other side is what one would write: a matmul, `log_softmax`, the
entropy from it. Memory is what the allocator held above the inputs, the gradient of the weight not counted, as both need it. Both sides
take turns in one process on one thread; seconds are medians. `entropy reported` is the usual case in training: a loss that uses the
log-probs alone, with the entropy of every token beside it. Processor time says more than the clock on a machine that is not quiet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import common
import torch

from drumroll.models.head import target_logprobs
from drumroll.observe.checks import CheckRow, at_least, at_most, measured
from drumroll.planner.measure import peak_bytes

TOKENS, VOCABULARY = 4096, 50257
_MIB = 1 << 20


@dataclass(slots=True, frozen=True)
class Inputs:
    """Hidden states [N, H], weight [V, H] and targets [N]."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    targets_N: torch.Tensor


Head = Callable[[Inputs], tuple[torch.Tensor, torch.Tensor]]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make(hidden: int, dtype: torch.dtype) -> Inputs:
    random = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(TOKENS, hidden, generator=random).to(dtype).requires_grad_()
    weight_VH = (torch.randn(VOCABULARY, hidden, generator=random) * hidden**-0.5).to(dtype).requires_grad_()
    return Inputs(hidden_NH, weight_VH, torch.randint(0, VOCABULARY, (TOKENS,), generator=random))


def ours(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropy = target_logprobs(inputs.hidden_NH, inputs.weight_VH, None, inputs.targets_N, entropy=True)
    assert entropy is not None
    return logprobs, entropy


def full(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    log_p_NV = (inputs.hidden_NH @ inputs.weight_VH.T).float().log_softmax(-1)
    return log_p_NV.gather(1, inputs.targets_N[:, None]).squeeze(1), -(log_p_NV.exp() * log_p_NV).sum(-1)


def with_entropy(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return -(logprobs.sum() + 0.01 * entropy.sum())


def reported(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return -logprobs.sum()


def train(head: Head, loss: Loss, inputs: Inputs) -> None:
    """Forward and backward."""
    logprobs, entropy = head(inputs)
    total = loss(logprobs, entropy)
    del logprobs, entropy
    total.backward()
    inputs.hidden_NH.grad = inputs.weight_VH.grad = None


def score(head: Head, inputs: Inputs) -> None:
    """Forward alone."""
    with torch.no_grad():
        head(inputs)


def peak(act: Callable[[], None], device: torch.device) -> int:
    with peak_bytes(device) as found:
        act()
    return found.most


def seconds(act: Callable[[], None]) -> tuple[float, float]:
    """By the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - clock, time.process_time() - processor


def rows(hidden: int, dtype: torch.dtype, rounds: int) -> list[CheckRow]:
    """Three pairs, each in turn."""
    inputs = make(hidden, dtype)
    options = {"tokens": TOKENS, "vocabulary": VOCABULARY, "hidden": hidden, "dtype": str(dtype).removeprefix("torch.")}
    weight = inputs.weight_VH.nbytes  # its gradient
    pairs: list[tuple[str, Callable[[Head], None], int, float]] = [
        ("forward and backward", lambda head: train(head, with_entropy, inputs), weight, 0.9),
        ("forward and backward, entropy reported", lambda head: train(head, reported, inputs), weight, 0.9),
        ("forward alone", lambda head: score(head, inputs), 0, 0.85),
    ]
    found: list[CheckRow] = []
    for name, act, uncounted, speed in pairs:
        sides = [partial(act, head) for head in (ours, full)]
        for side in sides:
            side()  # warm
        ours_bytes, full_bytes = (peak(side, inputs.hidden_NH.device) - uncounted for side in sides)
        turns = [[seconds(side) for side in sides] for _ in range(rounds)]
        ours_s, full_s = (median(turn[side][0] for turn in turns) for side in (0, 1))
        row = partial(measured, backend="head", options=options)
        found += [
            row(f"{name}: seconds", ours_s),
            row(f"{name}: seconds, full logits", full_s),
            row(f"{name}: peak, MiB", ours_bytes / _MIB),
            row(f"{name}: peak, full logits, MiB", full_bytes / _MIB),
            at_most(f"{name}: memory, of full logits", ours_bytes / full_bytes, 0.1, backend="head", options=options),
            at_least(f"{name}: speed, of full logits", median(f[0] / o[0] for o, f in turns), speed, backend="head", options=options),
            row(f"{name}: speed, by processor time", median(f[1] / o[1] for o, f in turns)),
        ]
    return found


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns that count")
    parser.add_argument("--hidden", type=int, action="append", help="width of the hidden states; may be given several times")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of hidden states and weight")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, by which the allocator is watched, else talks to stderr
    torch.set_num_threads(1)
    common.announce()
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    found = [row for hidden in options.hidden or (256,) for row in rows(hidden, dtype, options.rounds)]
    common.report(found, f"Head, {options.rounds} turns, medians", options.json)


if __name__ == "__main__":
    main()
