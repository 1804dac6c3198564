"""What the critic of a run begins as: found, and held against the policy, before anything is launched."""

from __future__ import annotations

from pathlib import Path

from drumroll.algorithms.presets import Algorithm
from drumroll.config import RunConfig
from drumroll.data.chat import load_tokenizer
from drumroll.errors import UserError
from drumroll.models.locate import locate
from drumroll.pipelines.length import check_length, check_vocabulary
from drumroll.runtime.worker import CriticStart


def critic_start(config: RunConfig, algorithm: Algorithm, policy: Path) -> CriticStart | None:
    """None for an algorithm without a critic. `policy`: folder of the model that the policy starts from; its tokenizer is the run's.

    Raises UserError for a model that is not there or cannot read the policy's tokens, and for a policy that would never train.
    """
    if not algorithm.needs_critic:
        return None
    critic = algorithm.critic
    if critic.warmup_steps >= config.max_steps:
        raise UserError(
            f"algorithm.critic.warmup_steps={critic.warmup_steps}: expected fewer than max_steps={config.max_steps}; "
            "the policy would never train"
        )
    folder = policy if critic.path is None else locate(critic.path)
    if critic.path is not None:
        check_length(config, folder)
        check_vocabulary(config, folder, load_tokenizer(policy, config.model.trust_remote_code))
    return CriticStart(folder, critic.trainable)
