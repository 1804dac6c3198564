"""TrainSamples of one optimizer step -> micro-batches per rank, and the step's global denominators. Pure.

Which samples go into which optimizer step is decided before packing; packing may only reorder inside one step, as a function of
(lengths, ranks, cap) and never of measured time. All ranks get the same number of micro-batches, so that collectives match: fill-ins are
empty lists and carry zero weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from drumroll.types import Denominators, MicroBatch, TrainSample

# A pass through the model costs, beside its tokens, about this part of a full one: what keeps rounds from becoming too short.
_PASS = 32


@runtime_checkable
class SharesMicroBatches(Protocol):
    """What a backend's options may say: so many consecutive ranks compute their micro-batches together, each a part of the tokens."""

    @property
    def sequence_ranks(self) -> int:
        """1 where every rank works alone."""


def pack(lengths: Sequence[int], ranks: int, cap: int, sharing: int = 1) -> list[list[list[int]]]:
    """`plan[rank][micro]` = sample indices, longest first.

    lengths: tokens of each sample; cap: most tokens of a micro-batch as rows see it, rows x longest. A single sample longer than `cap`
    makes a micro-batch of its own. Samples sorted by length are cut into rounds, one micro-batch a rank, where padding and passes cost
    least; a round is dealt out like cards, so that its micro-batches have the same rows (or one fewer) of nearly the same lengths: ranks
    that wait for one another in every pass wait little.

    sharing: so many consecutive ranks compute a micro-batch together. Together they get one of at most `sharing` times the cap, its samples
    dealt out to them; a rank of them may get none.
    """
    if ranks < 1 or cap < 1:
        raise ValueError(f"expected ranks >= 1 and cap >= 1, got ranks={ranks}, cap={cap}")
    if sharing > 1:
        if ranks % sharing:
            raise ValueError(f"expected a divisor of ranks={ranks}, got sharing={sharing}")
        together = pack(lengths, ranks // sharing, sharing * cap)
        return [[micro[rank % sharing :: sharing] for micro in together[rank // sharing]] for rank in range(ranks)]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for number, (start, end) in enumerate(_cut(np.array([lengths[index] for index in order], dtype=np.int64), ranks, cap)):
        for rank in range(ranks):
            seat = rank if number % 2 == 0 else ranks - 1 - rank  # the first seat has the longest sample: take turns
            plan[rank].append(order[start + seat : end : ranks])
    return plan


def padded_cost(micro: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of a micro-batch as right-padded rows: rows x longest."""
    return len(micro) * max((lengths[index] for index in micro), default=0)


def denominators(samples: Sequence[TrainSample]) -> Denominators:
    """Counts over all samples of one optimizer step; a sample without a target counts in none.

    A sample that belongs to no group (`group_id` -1) counts as a group of its own.
    """
    counted = [sample for sample in samples if sample.n_targets > 0]
    grouped = {sample.group_id for sample in counted if sample.group_id != -1}
    alone = sum(sample.group_id == -1 for sample in counted)
    return Denominators(sum(sample.n_targets for sample in counted), len(counted), len(grouped) + alone)


def collate(samples: Sequence[TrainSample], device: torch.device | str = "cpu") -> MicroBatch:
    """One flat, ragged micro-batch. No sample makes a fill-in, whose per-target arrays are all present and empty.

    Raises ValueError when a sample predicts its first token, when a per-target array has another length than its targets, or when only
    some samples have it.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
    for index, sample in enumerate(samples):
        if len(sample.target_mask) != len(sample.token_ids) or (len(sample.target_mask) and sample.target_mask[0]):
            tokens = len(sample.token_ids)
            raise ValueError(f"sample {index}: target_mask must have {tokens} entries and start with False; got {sample.target_mask}")
    positions = [start + np.flatnonzero(sample.target_mask) for start, sample in zip(starts, samples, strict=True)]
    return MicroBatch(
        token_ids=_tensor([sample.token_ids for sample in samples], np.int64, device),
        lengths=lengths,
        target_positions=_tensor(positions, np.int64, device),
        target_lengths=torch.tensor([len(p) for p in positions], dtype=torch.int64, device=device),
        prompts=_prompts(samples),
        advantages=_per_target([sample.advantages for sample in samples], positions, "advantages", device),
        engine_logprobs=_per_target([sample.engine_logprobs for sample in samples], positions, "engine_logprobs", device),
        old_logprobs=_per_target([sample.old_logprobs for sample in samples], positions, "old_logprobs", device),
        ref_logprobs=_per_target([sample.ref_logprobs for sample in samples], positions, "ref_logprobs", device),
        values=_per_target([sample.values for sample in samples], positions, "values", device),
        returns=_per_target([sample.returns for sample in samples], positions, "returns", device),
    )


def _prompts(samples: Sequence[TrainSample]) -> list[tuple[int, int]]:
    """See `MicroBatch.prompts`; a sample without a target has no prompt."""
    owners: dict[bytes, int] = {}
    found = []
    for index, sample in enumerate(samples):
        length = int(sample.target_mask.argmax()) if sample.n_targets else 0
        found.append((length, owners.setdefault(sample.token_ids[:length].tobytes(), index)))
    return found


def _cut(tokens: np.ndarray, ranks: int, cap: int) -> list[tuple[int, int]]:
    """Rounds [start, end) of lengths sorted longest first that cost least: padded tokens of a rank, and cap / _PASS a round.

    Exact, by dynamic programming over where the last round starts; the first of equal choices.
    """
    best = np.zeros(len(tokens) + 1, dtype=np.int64)  # best[end]: least cost of the first `end` samples
    start_of = np.zeros(len(tokens) + 1, dtype=np.int64)
    for end in range(1, len(tokens) + 1):
        # Lengths grow to the left, so no round within the cap that ends here has more rows than its shortest sample allows.
        starts = np.arange(max(0, end - ranks * max(1, cap // int(tokens[end - 1]))), end)
        rows = -((starts - end) // ranks)
        padded = rows * tokens[starts]
        costs = np.where((padded <= cap) | (rows == 1), best[starts] + padded, np.iinfo(np.int64).max // 2)
        choice = int(costs.argmin())
        best[end], start_of[end] = costs[choice] + cap // _PASS, starts[choice]
    cuts = [len(tokens)]
    while cuts[-1] > 0:
        cuts.append(int(start_of[cuts[-1]]))
    return [(start, end) for end, start in pairwise(cuts)][::-1]


def _tensor(parts: Sequence[np.ndarray], dtype: type[np.generic], device: torch.device | str) -> torch.Tensor:
    flat = np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
    return torch.from_numpy(flat).to(device)


def _per_target(
    parts: Sequence[np.ndarray | None], positions: Sequence[np.ndarray], name: str, device: torch.device | str
) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    if parts and not present:
        return None
    for index, (part, where) in enumerate(zip(parts, positions, strict=True)):
        if part is None or len(part) != len(where):
            raise ValueError(f"sample {index}: expected {name} for {len(where)} targets, as other samples of the batch have; got {part}")
    return _tensor(present, np.float32, device)
