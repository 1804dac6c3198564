"""The reward of `grpo_step.py`, for both sides: cheap, and different for almost every response."""

from __future__ import annotations

from typing import Any


def even_digits(text: str) -> float:
    """Share of the characters that are even digits."""
    return sum(text.count(digit) for digit in "02468") / max(1, len(text))


def judge(rollout: Any, prompt: Any) -> float:
    """The same, as drumroll calls it."""
    return even_digits(rollout.text)
