"""TrainSamples of one optimizer step -> micro-batches per rank, and the step's global denominators. Pure.

Which samples go into which optimizer step is decided before packing; packing may only reorder inside one step, as a function of
(lengths, ranks, cap) and never of measured time. All ranks get the same number of micro-batches, so that collectives match: fill-ins are
empty lists and carry zero weight.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch

from drumroll.types import Denominators, MicroBatch, TrainSample


def pack(lengths: Sequence[int], ranks: int, cap: int) -> list[list[list[int]]]:
    """`plan[rank][micro]` = sample indices, longest first.

    lengths: tokens of each sample; cap: most tokens of a micro-batch as rows see it, rows x longest. A single sample longer than `cap`
    makes a micro-batch of its own. Samples go longest first to the rank with the fewest tokens so far (LPT, Graham 1969); a rank cuts its
    sorted share greedily.
    """
    if ranks < 1 or cap < 1:
        raise ValueError(f"expected ranks >= 1 and cap >= 1, got ranks={ranks}, cap={cap}")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    plan = [_cut(share, lengths, cap) for share in _deal(order, lengths, ranks)]
    passes = max(len(micros) for micros in plan)
    return [micros + [[] for _ in range(passes - len(micros))] for micros in plan]


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
        advantages=_per_target([sample.advantages for sample in samples], positions, "advantages", device),
        engine_logprobs=_per_target([sample.engine_logprobs for sample in samples], positions, "engine_logprobs", device),
        old_logprobs=_per_target([sample.old_logprobs for sample in samples], positions, "old_logprobs", device),
        ref_logprobs=_per_target([sample.ref_logprobs for sample in samples], positions, "ref_logprobs", device),
    )


def _deal(order: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]  # (tokens, samples, rank): ties go to the lowest rank
    for index in order:
        tokens, count, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (tokens + lengths[index], count + 1, rank))
    return shares


def _cut(share: Sequence[int], lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Runs of a share sorted longest first, each with rows x longest <= cap."""
    micros: list[list[int]] = []
    for index in share:
        if micros and (len(micros[-1]) + 1) * lengths[micros[-1][0]] <= cap:
            micros[-1].append(index)
        else:
            micros.append([index])
    return micros


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
