"""The sections of a run and the run itself: what keys there are, what they may be, what they mean, and which a run does not read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator, model_validator

from drumroll.config.data import DataConfig, SourceConfig
from drumroll.config.section import NamedSection, Positive, Section


def _targets_form(value: Any) -> str:
    return "all-linear" if isinstance(value, str) else "names"


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021) in the linear layers of the transformer blocks; they alone train, and lie in float32 whatever the base."""

    rank: Positive = Field(16, description="of the matrices that are added")
    alpha: float = Field(32.0, gt=0, description="adapters are scaled by alpha / rank")
    targets: Annotated[Annotated[Literal["all-linear"], Tag("all-linear")] | Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1), Tag("names")], Discriminator(_targets_form)] = Field("all-linear", description="a list of names of linear layers or ends of them, e.g. [q_proj, mlp.up_proj]; all-linear: all of the transformer blocks")
    dropout: float = Field(0.0, ge=0, lt=1, description="0 only: with dropout, old, new and reference log-probs would be of other distributions than the sampler's")
    base_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype in which the frozen base is stored; bfloat16 needs that compute dtype")
    start: str | None = Field(None, description="folder of a PEFT adapter to go on from, which is then the reference too; none: a fresh one from the run's seed, which changes nothing yet")

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value:
            raise ValueError(f"{value}: expected 0: models are scored in eval mode, so that old, new and reference log-probs are of one distribution")
        return value

    @field_validator("base_dtype", mode="before")
    @classmethod
    def _no_quantised_base(cls, value: Any) -> Any:
        if value in ("4bit", "int4", "nf4", "8bit", "int8"):
            raise ValueError(f"{value!r}: expected float32 or bfloat16: a quantised base (QLoRA) is not supported, because a weight push sends whole tensors that a digest can check")
        return value


def _regular_expressions(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return patterns


class ModelConfig(Section):
    """The model, what of it trains, and how it computes."""

    path: str = Field(description="HF model folder, hub id, or builtin:NAME (made in code; `drumroll model list`)")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="compute dtype; auto: bfloat16 on a GPU, float32 on a CPU. Stored parameters that train are always float32")
    trainable: tuple[str, ...] = Field((), description="regular expressions over HF parameter names; empty: all parameters train")
    lora: LoraConfig | None = Field(None, description="train low-rank adapters, and nothing of the model itself")
    layout: Literal["auto", "rows", "packed"] = Field("auto", description="how a micro-batch is laid out: right-padded rows of similar length, or one packed row")
    attention: str = Field("sdpa", description="transformers' attn_implementation")
    checkpointing: Literal["none", "full", "offload", "selective"] = Field("none", description="activations kept for backward: all; each block's input; the same in host memory; the results of matmuls and attention")
    compile: bool = Field(False, description="torch.compile of every transformer block")
    share_prompts: bool = Field(True, description="a prompt that samples of a micro-batch have in common is computed once; it needs rows, attention: sdpa and a model whose every layer is full attention, and is without effect elsewhere")
    tile_mlp: int = Field(0, ge=0, description="tokens that a block's MLP works on at a time, for long sequences; 0: all")
    trust_remote_code: bool = Field(False, description="run code that a model folder brings along")

    _patterns_compile = field_validator("trainable")(_regular_expressions)

    @model_validator(mode="after")
    def _adapters_or_a_part_of_the_model(self) -> ModelConfig:
        if self.lora is not None and self.trainable:
            raise ValueError("lora trains its adapters and nothing of the model itself: leave out `trainable`, or `lora`")
        return self


class RolloutConfig(Section):
    """How responses are sampled; log-probs are taken under the distribution that these make."""

    prompts_per_step: Positive = Field(32, description="prompts of a step; each has algorithm.group_size samples")
    max_tokens: Positive = Field(256, description="longest response; SFT: with data.max_prompt_tokens, where a sample is cut")
    temperature: float = Field(1.0, gt=0, description="logits are divided by it, in training too")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the likeliest tokens that have this probability together; 1: all")
    top_k: int = Field(0, ge=0, description="sample from so many of the likeliest tokens; 0: all")
    min_p: float = Field(0.0, ge=0, lt=1, description="sample from tokens at least this share as likely as the likeliest; 0: all")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="a response ends where one of these texts appears")


class RewardConfig(Section):
    """A function that judges responses; the reward is the weighted sum of all of them."""

    fn: str = Field(description="exact, digits, format, math or reasoning_gym, module:name, file.py:name, trl:module:name or verl:module:name")
    weight: float = Field(1.0, description="in the sum; 0: only recorded")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments bound to the function")
    timeout_s: float = Field(10.0, gt=0, description="wall-clock limit for one sample; a sample over it has no verdict")
    isolate: bool = Field(True, description="run a user's sync function in killable processes; false: in this process, where no limit can be held")


class KLConfig(Section):
    """KL to the frozen reference; a field left out takes the preset's value."""

    coef: float | None = Field(None, ge=0, description="0: no reference model is held")
    estimator: Literal["k1", "k2", "k3"] | None = Field(None, description="Schulman 2020; k1 only in the reward: as a loss its expected gradient is 0")
    where: Literal["loss", "reward"] | None = Field(None, description="a term of the loss, or subtracted from the rewards before advantages: from each sample's (gae: from each token's)")


class CriticConfig(Section):
    """The value model of an actor-critic; a field left out takes the preset's value. What is not here (schedule, betas, ...) is that of `optim`."""

    path: str | None = Field(None, description="HF model folder, hub id or builtin:NAME of the body, a reward model's head with it; none: the model that the policy starts from, under a fresh head")
    trainable: tuple[str, ...] = Field((), description="regular expressions over HF parameter names of the critic; its head always trains; empty: all parameters train")
    lr: float | None = Field(None, gt=0, description="highest learning rate; by the schedule of `optim`")
    warmup_steps: int | None = Field(None, ge=0, description="steps in the beginning that train the critic alone, while the policy stays as it is")
    value_clip: float | None = Field(None, ge=0, description="how far a value may move from what it was before the step and still have a gradient; 0: any distance")

    _patterns_compile = field_validator("trainable")(_regular_expressions)


class AlgorithmConfig(Section):
    """A preset by name; every other field left out takes the preset's value (`drumroll/algorithms/presets.py`)."""

    name: str = Field(description="grpo, dr_grpo, dapo, rloo, reinforce, reinforce_pp, reinforce_pp_baseline, gspo, cispo or ppo")
    group_size: Positive | None = Field(None, description="samples a prompt")
    advantage: Literal["group", "group_mean", "leave_one_out", "batch", "group_mean_batch_std", "raw", "gae"] | None = Field(None, description="from rewards alone, one a sample; gae: from a critic's values, one a token, whitened over the batch")
    gamma: float | None = Field(None, gt=0, le=1, description="gae: discount a token")
    lam: float | None = Field(None, ge=0, le=1, description="gae: weight of what comes against what the critic expects of it; 1: the rewards to come, and no later value")
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] | None = Field(None, description="what the advantages weigh: a clipped ratio by token (ppo), by sequence (gspo), as a constant weight (cispo), or the log-prob alone")
    clip_low: float | None = Field(None, ge=0, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float | None = Field(None, ge=0, description="see clip_low")
    dual_clip: float | None = Field(None, gt=1, description="ppo: bound of the ratio where the advantage is negative")
    importance_cap: float | None = Field(None, gt=0, description="weigh each token by min(trainer / engine probability, cap): truncated importance sampling; none: off")
    aggregate: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] | None = Field(None, description="how tokens weigh in the loss: all alike, by sequence as mean or sum of its tokens, or over a constant length")
    constant_length: Positive | None = Field(None, description="tokens; the divisor of aggregate: constant; none: rollout.max_tokens")
    entropy_coef: float | None = Field(None, description="weight of the entropy that is subtracted from the loss, so that it stays high")
    kl: KLConfig | None = Field(None, description="KL to the frozen reference")
    critic: CriticConfig | None = Field(None, description="the value model that advantage: gae trains beside the policy")
    minibatches: Positive | None = Field(None, description="optimizer steps a rollout batch and epoch")
    epochs: Positive | None = Field(None, description="passes over a rollout batch")
    old_logprobs: Literal["auto", "engine", "recompute"] | None = Field(None, description="log-probs that ratios start from: the trainer's, computed before the first of several optimizer steps (auto) or always, or the engine's")
    dynamic_sampling: bool | None = Field(None, description="draw again until the batch has enough groups whose rewards differ (DAPO)")
    max_draws: Positive | None = Field(None, description="dynamic sampling: at most this many times the prompts of a step")
    overlong: Literal["keep", "mask", "shape"] | None = Field(None, description="responses cut by max_tokens: train on them, leave them out of the loss, or DAPO's soft length penalty in the reward")
    overlong_buffer: Positive | None = Field(None, description="tokens before max_tokens where the soft penalty starts")


class OptimConfig(Section):
    """The learning rate is a pure function of the number of applied steps."""

    name: Literal["adamw", "muon", "adafactor"] = Field("adamw", description="muon: for the matrices of hidden layers, adamw for the rest; adafactor: next to no state")
    lr: float = Field(1e-6, gt=0, description="highest learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="how the learning rate goes down to min_lr_ratio by the last step")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps in which the learning rate rises from 0")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="last learning rate over `lr`")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field((0.9, 0.999), description="decay of Adam's first and second moment")
    eps: float = Field(1e-8, gt=0, description="Adam's, added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="decoupled: taken from the parameters, not from the gradient")
    momentum: float = Field(0.95, ge=0, lt=1, description="muon: of the running mean of gradients")
    offload: bool = Field(False, description="adamw, muon: Adam's moments in host memory, brought to the device bucket by bucket")
    max_grad_norm: float = Field(1.0, ge=0, description="0: no clipping")
    max_skips: Positive = Field(5, description="abort after this many non-finite steps in a row")


class TrainConfig(Section):
    """How a batch is trained on."""

    micro_batch_tokens: Positive = Field(4096, description="most tokens of one micro-batch on a rank, as the kernels see them (padding of the layout included)")
    batch_size: Positive = Field(64, description="SFT: samples an optimizer step")
    router_aux_coef: float = Field(0.0, ge=0, description="mixture of experts: weight in the loss of how unevenly the tokens of each sequence are routed, whatever config.json says; 0: routers are left to the loss itself, usual in RL")


class WarmupConfig(Section):
    """A short SFT run before RL, always on the specification backend with a fixed seed; cached by digest."""

    steps: Positive = Field(description="optimizer steps")
    batch_size: Positive = Field(64, description="samples an optimizer step")
    lr: float = Field(1e-3, gt=0, description="highest learning rate; it falls linearly to a tenth")
    data: SourceConfig | None = Field(None, description="solved examples to learn from; none: data.train")
    seed: int = Field(0, description="of the order of its samples")


def _warmup_form(value: Any) -> str:
    return "path" if isinstance(value, str) else WarmupConfig.__name__


class RuntimeConfig(Section):
    """The processes of the run."""

    name: Literal["local"] = Field("local", description="processes on this machine")
    ranks: Positive = Field(1, description="number of processes, each with a device of its own where there are GPUs")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is a GPU, else cpu")
    timeout_s: float = Field(600.0, gt=0, description="one call to the ranks (sampling, an optimizer step, a push) that takes longer ends the run; for ranks that are processes of their own")
    max_restarts: int = Field(0, ge=0, description="when a rank fails, start the ranks again from the last valid checkpoint, at most this many times in a run of the command; needs checkpoint.every")
    take_turns: bool = Field(False, description="engine and policy share a device by turns: the policy's memory is in host memory while the engine samples, and the engine's cache is released while the policy trains")


class EvalConfig(Section):
    """Evaluations on the rows of data.eval, a response a row."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before the first and after the last step")
    rows: Positive = Field(256, description="at most this many rows")
    temperature: float = Field(0.0, ge=0, description="0: greedy")


class CheckpointConfig(Section):
    """What `--resume` goes on from: when it is written, and how long it stays."""

    every: int = Field(0, ge=0, description="steps between checkpoints, the last step has one too; 0: none. Ctrl-C and SIGTERM save one before they end the run")
    async_save: bool = Field(True, description="training goes on while files are written; holds a copy of parameters and optimizer state in host memory")
    on_error: Literal["stop", "continue"] = Field("stop", description="a checkpoint that cannot be written, as on a full disk: end the run, or go on with an alarm and try again at the next one")
    keep: Positive = Field(2, description="the last so many stay")
    keep_every: int = Field(0, ge=0, description="so does each whose step is a multiple of this; 0: none")
    keep_best: str | None = Field(None, description="so does the best by this metric, named as in TensorBoard: eval/score, rl/reward_mean, ...; the latest of equals")
    keep_best_is: Literal["max", "min"] = Field("max", description="which value of keep_best is the best")


class RecordConfig(Section):
    """What a run writes beside `metrics.jsonl`, `evals.jsonl` and its report."""

    rollouts: bool = Field(True, description="write every rollout to rollouts.jsonl")
    batches: bool = Field(True, description="write every training batch, so that `drumroll replay` can train it again")
    tensorboard: bool = Field(True, description="write every metric for TensorBoard too")
    digests: int = Field(0, ge=0, description="steps between records of every weight's digest, for `drumroll diff`; 0: none")


class RunConfig(Section):
    """A recipe: what stands at its top level."""

    pipeline: Literal["rl", "sft"] = Field("rl", description="reinforcement learning, or supervised fine-tuning")
    max_steps: Positive = Field(description="RL: rollout batches, after a warm-up; SFT: optimizer steps")
    run_dir: str = Field(description="directory for all that the run writes; one that holds a run is moved aside")
    seed: int = Field(0, description="of the order of rows, of sampling and of fresh parameters")
    max_lag: Literal[0] = Field(0, description="weight versions a sample may be behind; 0: rollout and training alternate")
    model: ModelConfig = Field(description="the model, what of it trains, and how it computes")
    warmup: Annotated[Annotated[str, Tag("path")] | Annotated[WarmupConfig, Tag("WarmupConfig")], Discriminator(_warmup_form)] | None = Field(None, description="a short SFT run before RL, or the folder of a model that has had one")
    data: DataConfig = Field(description="where rows come from, and how a row becomes a prompt")
    rollout: RolloutConfig = Field(RolloutConfig(), description="how responses are sampled")
    rewards: tuple[RewardConfig, ...] = Field((), description="RL: functions that judge responses; the reward is their weighted sum")
    algorithm: AlgorithmConfig | None = Field(None, description="RL: a preset, and values instead of its own")
    optim: OptimConfig = Field(OptimConfig(), description="optimizer and learning rate")
    train: TrainConfig = Field(TrainConfig(), description="how a batch is trained on")
    backend: NamedSection = Field(description="what trains: where parameters, gradients and optimizer state lie")
    engine: NamedSection | None = Field(None, description="RL: what samples")
    runtime: RuntimeConfig = Field(RuntimeConfig(), description="the processes of the run")
    eval: EvalConfig = Field(EvalConfig(), description="evaluations on the rows of data.eval")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="what --resume goes on from")
    record: RecordConfig = Field(RecordConfig(), description="what the run writes beside its metrics")

    @model_validator(mode="after")
    def _rl_is_complete(self) -> RunConfig:
        if self.pipeline == "rl":
            missing = [k for k, v in (("algorithm", self.algorithm), ("engine", self.engine), ("rewards", self.rewards)) if not v]
            if missing:
                raise ValueError(f"pipeline: rl needs {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _pipeline_reads_what_is_set(self) -> RunConfig:
        faults = [f"{who} does not read {', '.join(said)}: {advice}" for who, keys, advice in self.unread() if (said := [key for key in keys if _said(self, key)])]
        if faults:
            raise ValueError(". ".join(faults))
        return self

    def unread(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """(who, keys, advice): what this run never looks at. Such keys are refused when a recipe gives them."""
        if self.pipeline == "sft":
            rollout = (f"rollout.{name}" for name in RolloutConfig.model_fields if name != "max_tokens")
            yield "pipeline: sft", ("warmup", "rewards", "algorithm", "engine", "eval", "data.eval", "record.rollouts", "record.batches", *rollout), "leave that out"
        else:
            yield "pipeline: rl", ("train.batch_size",), "set rollout.prompts_per_step, algorithm.group_size and algorithm.minibatches"
            if not isinstance(self.warmup, WarmupConfig):
                yield "pipeline: rl without a warm-up", ("data.completion",), "leave that out"
        if self.optim.name != "muon":
            yield f"optim.name: {self.optim.name}", ("optim.momentum",), "leave that out, or choose muon"
        if self.optim.name == "adafactor":
            yield "optim.name: adafactor", ("optim.betas", "optim.eps", "optim.offload"), "leave that out"
        if self.checkpoint.keep_best is None:
            yield "checkpoint without keep_best", ("checkpoint.keep_best_is",), "leave that out, or name a metric"
        if not self.checkpoint.every:
            yield "checkpoint.every: 0", ("runtime.max_restarts", "checkpoint.on_error"), "leave that out, or set checkpoint.every"
        if self.optim.schedule == "constant":
            yield "optim.schedule: constant", ("optim.min_lr_ratio",), "leave that out, or choose linear or cosine"

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens: prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.max_tokens


def _said(section: BaseModel, key: str) -> bool:
    """Whether a recipe gives `key`, be it its default; null, [] and a section without keys say nothing."""
    name, _, rest = key.partition(".")
    value = vars(section)[name]
    if rest:
        return _said(value, rest)
    if isinstance(value, Section):
        return bool(value.model_fields_set)
    return name in section.model_fields_set and value not in (None, ())
