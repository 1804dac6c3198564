"""What is left out of a batch, or pays for its length: pure functions over rewards and lengths."""

from __future__ import annotations

from collections.abc import Sequence

from drumroll.types import Rollout


def has_variance(rewards: Sequence[float | None]) -> bool:
    """Whether the verdicts of one group differ: otherwise every group-relative advantage is 0 and the group teaches nothing.

    Dynamic sampling (DAPO, Yu et al. 2025, section 3.2) draws again until enough groups pass. Fewer than two verdicts: false.
    """
    verdicts = [r for r in rewards if r is not None]
    return len(verdicts) > 1 and max(verdicts) != min(verdicts)


def is_overlong(rollout: Rollout) -> bool:
    """Whether the response was cut by the token limit: by finish reason, never by looking for an end token."""
    return rollout.finish_reason == "length"


def soft_overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's length penalty, added to the reward (Yu et al. 2025, eq. 13): 0 up to max_tokens - buffer, then linear to -1 at max_tokens.

    `length`: response tokens, the end token included. Beyond max_tokens: -1.
    """
    return -min(1.0, max(0, length - (max_tokens - buffer)) / buffer)


def shape_overlong(rewards: Sequence[float | None], lengths: Sequence[int], max_tokens: int, buffer: int) -> list[float | None]:
    """Rewards of one group with the soft length penalty added; a sample without a verdict stays without one."""
    return [
        None if reward is None else reward + soft_overlong_penalty(length, max_tokens, buffer)
        for reward, length in zip(rewards, lengths, strict=True)
    ]
