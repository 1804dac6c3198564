"""What a key that does not exist was most likely meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

SURE, LIKELY = 0.8, 0.6  # difflib's ratio of what is spelt almost alike, and of what may be
FEW = 3  # more keys than these that share a word with the unknown one tell nothing

# What other frameworks (TRL, verl, OpenRLHF, transformers) call a key -> what it is called here.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "actor_learning_rate": ("optim.lr",),
    "adam_eps": ("optim.eps",),
    "adam_epsilon": ("optim.eps",),
    "adv_estimator": ("algorithm.advantage",),
    "attn_implementation": ("model.attention",),
    "batch_size": ("rollout.prompts_per_step", "train.batch_size"),
    "beta": ("algorithm.kl.coef",),
    "clip_range": ("algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio": ("algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio_high": ("algorithm.clip_high",),
    "clip_ratio_low": ("algorithm.clip_low",),
    "cliprange": ("algorithm.clip_low", "algorithm.clip_high"),
    "cliprange_value": ("algorithm.critic.value_clip",),
    "critic_learning_rate": ("algorithm.critic.lr",),
    "dataset": ("data.train",),
    "dataset_name": ("data.train",),
    "epsilon": ("algorithm.clip_low", "optim.eps"),
    "epsilon_high": ("algorithm.clip_high",),
    "eval_steps": ("eval.every",),
    "function": ("rewards.fn",),
    "gae_lambda": ("algorithm.lam",),
    "gradient_accumulation_steps": ("train.micro_batch_tokens",),
    "gradient_checkpointing": ("model.checkpointing",),
    "init_kl_coef": ("algorithm.kl.coef",),
    "kl_coef": ("algorithm.kl.coef",),
    "kl_loss_coef": ("algorithm.kl.coef",),
    "learning_rate": ("optim.lr",),
    "logging_dir": ("run_dir",),
    "lora_alpha": ("model.lora.alpha",),
    "lora_dropout": ("model.lora.dropout",),
    "lora_r": ("model.lora.rank",),
    "lora_rank": ("model.lora.rank",),
    "loss_agg_mode": ("algorithm.aggregate",),
    "loss_type": ("algorithm.aggregate",),
    "lr_scheduler_type": ("optim.schedule",),
    "max_completion_length": ("rollout.max_tokens",),
    "max_new_tokens": ("rollout.max_tokens",),
    "max_prompt_length": ("data.max_prompt_tokens",),
    "max_response_length": ("rollout.max_tokens",),
    "micro_batch_size": ("train.micro_batch_tokens",),
    "mini_batch_size": ("algorithm.minibatches",),
    "model_name": ("model.path",),
    "model_name_or_path": ("model.path",),
    "n": ("algorithm.group_size",),
    "n_gpus": ("runtime.ranks",),
    "n_gpus_per_node": ("runtime.ranks",),
    "n_samples_per_prompt": ("algorithm.group_size",),
    "num_generations": ("algorithm.group_size",),
    "num_iterations": ("algorithm.epochs",),
    "num_mini_batches": ("algorithm.minibatches",),
    "num_processes": ("runtime.ranks",),
    "num_samples": ("algorithm.group_size",),
    "num_train_epochs": ("max_steps",),
    "output_dir": ("run_dir",),
    "per_device_train_batch_size": ("train.micro_batch_tokens",),
    "ppo_epochs": ("algorithm.epochs",),
    "ppo_mini_batch_size": ("algorithm.minibatches",),
    "r": ("model.lora.rank",),
    "reward_funcs": ("rewards",),
    "rollout_batch_size": ("rollout.prompts_per_step",),
    "samples_per_prompt": ("algorithm.group_size",),
    "save_steps": ("checkpoint.every",),
    "save_total_limit": ("checkpoint.keep",),
    "steps": ("max_steps", "eval.every", "checkpoint.every"),
    "target_modules": ("model.lora.targets",),
    "torch_dtype": ("model.dtype",),
    "total_training_steps": ("max_steps",),
    "train_batch_size": ("rollout.prompts_per_step", "train.batch_size"),
    "value_lr": ("algorithm.critic.lr",),
    "warmup_ratio": ("optim.warmup_steps",),
    "world_size": ("runtime.ranks",),
}


@dataclass(slots=True, frozen=True)
class Suggestion:
    """A hint in words, and the keys in it that stand for the unknown one."""

    words: str
    keys: Sequence[str] = ()


def suggest(unknown: str, beside: Sequence[str], everywhere: Iterable[str]) -> Suggestion:
    """What to say of an unknown dotted key. `beside`: names valid in its section; `everywhere`: every key that there is.

    What the name means in other frameworks comes first, but for a key of its own section that is spelt almost alike; then what it shares
    its words with, in its section before others; what it is only vaguely like comes last.
    """
    parent, _, leaf = unknown.rpartition(".")
    leaf, prefix = leaf.lower(), f"{parent}." if parent else ""
    known = sorted(set(everywhere))
    meant = [key for key in OTHER_NAMES.get(leaf, ()) if key in known]
    found = [prefix + name for name in dict.fromkeys(key.rpartition(".")[2] for key in meant) if name in beside]
    found = found or _spelt(leaf, prefix, beside, SURE) or meant
    found = found or _few(prefix + name for name in beside if _shares_words(leaf, name))
    found = found or _few(key for key in known if key.rpartition(".")[2] == leaf)
    found = found or _few(key for key in known if _shares_words(leaf, key.rpartition(".")[2]))
    found = found or _spelt(leaf, prefix, beside, LIKELY)
    if not found:
        return Suggestion(f"valid keys here: {', '.join(beside) or 'none'}")
    return Suggestion(f"did you mean {' or '.join(map(repr, found))}?", found)


def _spelt(leaf: str, prefix: str, beside: Sequence[str], cutoff: float) -> list[str]:
    return [prefix + name for name in get_close_matches(leaf, beside, n=1, cutoff=cutoff)]


def _few(keys: Iterable[str]) -> list[str]:
    found = list(keys)
    return found if len(found) <= FEW else []


def _shares_words(unknown: str, name: str) -> bool:
    """Whether all words of one are words of the other: `reshard` and `reshard_after_forward`."""
    first, second = set(unknown.split("_")), set(name.split("_"))
    return first <= second or second <= first
