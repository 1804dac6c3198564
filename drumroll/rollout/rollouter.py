"""Prompts -> scored groups: ask the engines for samples, then the reward functions for verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drumroll.engines.base import Completion, GenerateRequest, SamplingParams
from drumroll.errors import RunError
from drumroll.observe.timer import PhaseTimer
from drumroll.rewards.base import RewardSet
from drumroll.types import Group, Prompt, Rollout

Generate = Callable[[Sequence[GenerateRequest]], list[Completion]]


@dataclass(slots=True)
class Rollouter:
    generate: Generate
    rewards: RewardSet
    timer: PhaseTimer

    def rollout(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams) -> list[Group]:
        """`n` scored rollouts of each prompt, groups in the order of the prompts. Raises RunError when an engine loses a sample."""
        requests = [GenerateRequest(prompt.group_id, prompt.token_ids, n, sampling, prompt.stream) for prompt in prompts]
        with self.timer.phase("generate"):
            completions = self.generate(requests)
        groups = assemble(prompts, completions, n)
        with self.timer.phase("reward"):
            self.rewards.score(groups)
        return groups


def assemble(prompts: Sequence[Prompt], completions: Sequence[Completion], n: int) -> list[Group]:
    """Sort completions, in whatever order they finished, into groups by identity."""
    by_identity = {(c.group_id, c.index): c for c in completions}
    wanted = [(prompt.group_id, index) for prompt in prompts for index in range(n)]
    if len(completions) != len(wanted) or by_identity.keys() != set(wanted):
        lost = sorted(set(wanted) - by_identity.keys())[:5]
        raise RunError(f"the engines returned {len(completions)} completions for {len(wanted)} samples; first lost (group, sample): {lost}")
    return [Group(prompt, [_rollout(by_identity[prompt.group_id, index]) for index in range(n)]) for prompt in prompts]


def _rollout(c: Completion) -> Rollout:
    return Rollout(c.index, c.token_ids, c.logprobs, c.version, c.finish_reason, c.text)
