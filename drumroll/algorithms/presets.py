"""Algorithms by name: each preset is a bundle of explicit values, and `resolve` puts the user's overrides on top.

A preset holds what its paper says about the estimator and the loss. Sizes (group size, mini-batches) are the paper's where they belong to
the method, else small defaults. The KL coefficient is the paper's where it gives one for the method (GRPO); elsewhere it is 0, and only
the place and the estimator are the paper's: set `algorithm.kl.coef` to switch it on. Advantages of the kind `gae` take a critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from drumroll.algorithms.advantage import GROUP_KINDS, AdvantageKind
from drumroll.config import AlgorithmConfig, CriticConfig, KLConfig
from drumroll.errors import UserError
from drumroll.types import LossFn

if TYPE_CHECKING:  # a recipe is checked before torch is imported, and losses need it
    from drumroll.algorithms.kl import Estimator
    from drumroll.algorithms.loss import Aggregate, PolicyLoss


@dataclass(slots=True, frozen=True)
class KL:
    """KL to the frozen reference; `coef` 0: off."""

    coef: float = 0.0
    estimator: Estimator = "k3"
    where: Literal["loss", "reward"] = "loss"


@dataclass(slots=True, frozen=True)
class CriticSettings:
    """Of the value model; see `drumroll.config.CriticConfig`."""

    path: str | None = None
    trainable: tuple[str, ...] = ()
    lr: float = 1e-5
    warmup_steps: int = 0
    value_clip: float = 0.2  # Ziegler et al. 2019, public code: cliprange_value

    def loss(self) -> LossFn:
        """The loss with its clip bound; picklable."""
        from drumroll.algorithms.value import value_loss

        return partial(value_loss, clip=self.value_clip or None)


@dataclass(slots=True, frozen=True)
class Algorithm:
    """A resolved algorithm: every value explicit, see `drumroll.config.AlgorithmConfig` for what each one means."""

    name: str
    advantage: AdvantageKind
    policy_loss: PolicyLoss
    aggregate: Aggregate
    group_size: int = 8
    clip_low: float = 0.2  # Schulman et al. 2017, section 6.1
    clip_high: float = 0.2
    dual_clip: float | None = None
    importance_cap: float | None = None
    constant_length: int = 0  # 0 in a preset only: resolved to the longest response
    entropy_coef: float = 0.0
    gamma: float = 1.0
    lam: float = 0.95
    kl: KL = KL()
    critic: CriticSettings = CriticSettings()
    minibatches: int = 1
    epochs: int = 1
    old_logprobs: Literal["auto", "engine", "recompute"] = "auto"
    dynamic_sampling: bool = False
    max_draws: int = 4
    overlong: Literal["keep", "mask", "shape"] = "keep"
    overlong_buffer: int = 0  # 0 in a preset only: resolved to a fifth of the longest response

    @property
    def needs_group(self) -> bool:
        """Whether advantages compare the samples of one prompt."""
        return self.advantage in GROUP_KINDS

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the frozen reference are read."""
        return self.kl.coef > 0

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.advantage == "gae"

    def trains_policy(self, step: int) -> bool:
        """Whether a step, counted from 1, trains the policy: the first ones may be the critic's alone."""
        return not self.needs_critic or step > self.critic.warmup_steps

    @property
    def kl_in_reward(self) -> bool:
        return self.needs_reference and self.kl.where == "reward"

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the trainer scores every sample before the first optimizer step of a rollout batch.

        `auto` does where there are several optimizer steps a batch: with one, the current values are the old ones. KL in the reward
        needs them in any case.
        """
        several = self.minibatches * self.epochs > 1
        return self.old_logprobs == "recompute" or (self.old_logprobs == "auto" and several) or self.kl_in_reward

    def loss(self) -> LossFn:
        """The loss with every value bound; picklable."""
        from drumroll.algorithms.loss import policy_objective, rl_loss, token_weights

        return partial(
            rl_loss,
            policy=policy_objective(self.policy_loss, self.clip_low, self.clip_high, self.dual_clip),
            weights=token_weights(self.aggregate, self.constant_length),
            kl_coef=self.kl.coef if self.kl.where == "loss" else 0.0,
            kl_estimator=self.kl.estimator,
            entropy_coef=self.entropy_coef,
            importance_cap=self.importance_cap,
            old_from_engine=self.old_logprobs == "engine",
        )


# GRPO (Shao et al. 2024, DeepSeekMath): group-normalised rewards, mean over each sequence, k3 KL in the loss with 0.04 (section 4.2).
GRPO = Algorithm("grpo", "group", "ppo", "sequence_mean_token_mean", kl=KL(0.04, "k3", "loss"))

# Dr.GRPO (Liu et al. 2025, Understanding R1-Zero-Like Training, section 3.2): no division by the std or by the sequence's length, no KL.
DR_GRPO = Algorithm("dr_grpo", "group_mean", "ppo", "constant")

# DAPO (Yu et al. 2025, section 3 and 4.1): clip higher, token-level loss, dynamic sampling, soft overlong penalty over the last fifth
# (4096 of 20480 tokens), 16 updates a rollout step, no KL.
DAPO = Algorithm(
    "dapo", "group", "ppo", "token_mean", clip_high=0.28, minibatches=16, group_size=16, dynamic_sampling=True, overlong="shape"
)

# RLOO (Ahmadian et al. 2024, Back to Basics): REINFORCE on whole sequences, leave-one-out baseline, k = 4, KL in the reward.
RLOO = Algorithm("rloo", "leave_one_out", "reinforce", "sequence_mean_token_sum", group_size=4, kl=KL(0.0, "k1", "reward"))

# REINFORCE (Williams 1992): the reward times the gradient of the sequence's log-probability, no baseline.
REINFORCE = Algorithm("reinforce", "raw", "reinforce", "sequence_mean_token_sum", group_size=1, kl=KL(0.0, "k1", "reward"))

# REINFORCE++ (Hu et al. 2025): one sample a prompt, PPO's clip, advantages whitened over the batch, k1 KL in the reward. The paper
# subtracts the KL of the tokens still to come, token by token; here it is the whole sequence's, from its reward.
REINFORCE_PP = Algorithm("reinforce_pp", "batch", "ppo", "token_mean", group_size=1, kl=KL(0.0, "k1", "reward"))

# REINFORCE++ with baseline (ibid.): the group's mean as baseline, the batch's std as scale, k2 KL in the loss.
REINFORCE_PP_BASELINE = Algorithm("reinforce_pp_baseline", "group_mean_batch_std", "ppo", "token_mean", kl=KL(0.0, "k2", "loss"))

# GSPO (Zheng et al. 2025, section 5.1): sequence ratio, clip 3e-4 and 4e-4, four mini-batches a rollout batch.
GSPO = Algorithm("gspo", "group", "gspo", "sequence_mean_token_mean", clip_low=3e-4, clip_high=4e-4, minibatches=4)

# CISPO (MiniMax 2025, MiniMax-M1, section 3.1): no lower bound of the weight, token-level loss, no KL. The paper does not print its upper
# bound: 5 is what ScaleRL (Khatri et al. 2025) reports as robust.
CISPO = Algorithm("cispo", "group", "cispo", "token_mean", clip_low=1.0, clip_high=4.0)

# PPO (Schulman et al. 2017) as language models are trained with it (Ziegler et al. 2019; Ouyang et al. 2022): a critic beside the policy,
# GAE over tokens, advantages whitened over the batch, the reward on the last token, k1 KL subtracted token by token. gamma 1, lambda 0.95
# and clips of 0.2 on ratio and value are those of Ziegler's public code (lm-human-preferences).
PPO = Algorithm("ppo", "gae", "ppo", "token_mean", group_size=1, minibatches=4, kl=KL(0.0, "k1", "reward"))

PRESETS: dict[str, Algorithm] = {
    a.name: a for a in (GRPO, DR_GRPO, DAPO, RLOO, REINFORCE, REINFORCE_PP, REINFORCE_PP_BASELINE, GSPO, CISPO, PPO)
}


def resolve(config: AlgorithmConfig, max_tokens: int) -> Algorithm:
    """The preset `config.name` with the user's values on top. `max_tokens`: longest response.

    Raises UserError for an unknown preset, for values that contradict each other, and for a key that the resolved algorithm never reads.
    """
    if config.name not in PRESETS:
        near = get_close_matches(config.name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"algorithm.name: unknown preset {config.name!r}: expected one of {', '.join(PRESETS)}{hint}")
    preset = PRESETS[config.name]
    given = config.model_dump(exclude_none=True, exclude={"name", "kl", "critic"})
    algorithm = replace(preset, **given, kl=_resolve_kl(preset.kl, config.kl), critic=_resolve_critic(preset.critic, config.critic))
    algorithm = replace(
        algorithm,
        constant_length=algorithm.constant_length or max_tokens,
        overlong_buffer=algorithm.overlong_buffer or max(1, max_tokens // 5),
    )
    faults = [*_unread(algorithm, given, config), *_contradictions(algorithm, max_tokens)]
    if faults:
        raise UserError("\n".join(f"algorithm.{fault}" for fault in faults))
    return algorithm


def _resolve_kl(preset: KL, config: KLConfig | None) -> KL:
    return preset if config is None else replace(preset, **config.model_dump(exclude_none=True))


def _resolve_critic(preset: CriticSettings, config: CriticConfig | None) -> CriticSettings:
    return preset if config is None else replace(preset, **config.model_dump(exclude_none=True))


def _unread(algorithm: Algorithm, given: dict[str, Any], config: AlgorithmConfig) -> Sequence[str]:
    """Keys that the user set and the resolved algorithm ignores, with what would make it read them."""
    clips = algorithm.policy_loss != "reinforce"
    readers = {
        "clip_low": (clips, "policy_loss: reinforce does not clip"),
        "clip_high": (clips, "policy_loss: reinforce does not clip"),
        "dual_clip": (algorithm.policy_loss == "ppo", "only policy_loss: ppo reads it"),
        "gamma": (algorithm.needs_critic, "only advantage: gae reads it"),
        "lam": (algorithm.needs_critic, "only advantage: gae reads it"),
        "constant_length": (algorithm.aggregate == "constant", "only aggregate: constant reads it"),
        "max_draws": (algorithm.dynamic_sampling, "only dynamic_sampling: true reads it"),
        "overlong_buffer": (algorithm.overlong == "shape", "only overlong: shape reads it"),
    }
    faults = [f"{key}: {given[key]!r} is not read: {why}" for key, (read, why) in readers.items() if key in given and not read]
    if config.critic is not None and config.critic.model_fields_set and not algorithm.needs_critic:
        said = ", ".join(sorted(config.critic.model_fields_set))
        faults.append(f"critic: {said} not read: advantage: {algorithm.advantage} has no critic; choose preset ppo, or advantage: gae")
    if config.kl is not None and config.kl.coef is None and not algorithm.needs_reference:
        faults.append(f"kl: estimator and where are not read: kl.coef of preset {algorithm.name!r} is 0; set algorithm.kl.coef")
    return faults


def _contradictions(algorithm: Algorithm, max_tokens: int) -> Sequence[str]:
    faults = []
    if algorithm.needs_group and algorithm.group_size < 2:
        faults.append(f"group_size: advantage: {algorithm.advantage} compares samples of a prompt and needs at least 2, got 1")
    if algorithm.dynamic_sampling and algorithm.group_size < 2:
        faults.append("dynamic_sampling: true needs group_size of at least 2, got 1: a single sample has no variance")
    if algorithm.needs_reference and algorithm.kl.where == "loss" and algorithm.kl.estimator == "k1":
        faults.append("kl.estimator: k1 as a loss has an expected gradient of 0; use k2 or k3, or kl.where: reward")
    if algorithm.importance_cap is not None and algorithm.old_logprobs == "engine":
        faults.append("importance_cap: corrects from engine to trainer log-probs, but old_logprobs: engine leaves nothing to correct")
    if algorithm.overlong == "shape" and algorithm.overlong_buffer > max_tokens:
        faults.append(f"overlong_buffer: expected at most rollout.max_tokens = {max_tokens}, got {algorithm.overlong_buffer}")
    return faults
