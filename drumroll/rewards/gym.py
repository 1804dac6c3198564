"""Reasoning-gym's own verdicts: many of its tasks have more than one right answer."""

from __future__ import annotations

from typing import Annotated

from drumroll.types import Prompt, Rollout

Metadata = Annotated[str, "column of the row that holds the task's metadata"]
Mark = Annotated[str | None, "only what follows the last such mark is the answer; none: the whole response"]


def reasoning_gym(rollout: Rollout, prompt: Prompt, *, column: Metadata = "metadata", after: Mark = None) -> float:
    """The task's score of the response, 0 to 1; `after`: only what follows the last such mark is the answer (without it: no answer)."""
    import reasoning_gym as gym

    metadata = prompt.columns[column]
    if after is not None and after not in rollout.text:
        return 0.0
    text = rollout.text if after is None else rollout.text.rpartition(after)[2]
    entry = {"question": prompt.columns["prompt"], "answer": prompt.columns["answer"], "metadata": metadata}
    return float(gym.get_score_answer_fn(metadata["source_dataset"])(answer=text.strip(), entry=entry))
