"""Judging responses: plain functions `(rollout, prompt) -> float | None`, the killable processes they run in, and their weighted sum."""
