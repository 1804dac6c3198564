"""The run configuration: one frozen pydantic tree from `recipe.yaml` and `a.b=c` overrides.

Unknown keys are refused at any level, with the nearest valid key. Options of a backend or an engine live under
`backend.<name>.*` and `engine.<name>.*`; their schema is in the plug-in's own file and `drumroll.plugins.check` applies it: the sections of
names that are not selected are checked and otherwise inert. Nothing here needs torch, and nothing rewrites what the user said:
derived values are properties.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, ValidationInfo, field_validator, model_validator

from drumroll.errors import UserError
from drumroll.explain import explain

T = TypeVar("T", bound=BaseModel)
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base of every section, plug-ins' included: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False, ser_json_inf_nan="constants")

    @field_validator("*", mode="before")
    @classmethod
    def _a_boolean_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take `true` for 1."""
        kinds = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
        if kinds & {int, float} and bool not in kinds:
            for item in value if isinstance(value, Sequence) else (value,):
                if isinstance(item, bool):
                    raise ValueError(f"expected a number, got the boolean {str(item).lower()}")
        return value


def _kinds(annotation: Any) -> Iterator[type]:
    """The classes that an annotation is made of; a literal counts as its class."""
    inner = get_args(annotation)
    if not inner:
        yield annotation if isinstance(annotation, type) else type(annotation)
    for part in inner:
        yield from _kinds(part)


def _targets_form(value: Any) -> str:
    return "all-linear" if isinstance(value, str) else "names"


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021) in the linear layers of the transformer blocks; they alone train, and lie in float32 whatever the base."""

    rank: Positive = 16
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
    trust_remote_code: bool = False

    _patterns_compile = field_validator("trainable")(_regular_expressions)

    @model_validator(mode="after")
    def _adapters_or_a_part_of_the_model(self) -> ModelConfig:
        if self.lora is not None and self.trainable:
            raise ValueError("lora trains its adapters and nothing of the model itself: leave out `trainable`, or `lora`")
        return self


class TaskSource(Section):
    """A procedural task made in code: rows are a pure function of (task, options, seed, index)."""

    task: str = Field(description="sort, larger, reverse, or reasoning_gym:NAME (an extra)")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the task, e.g. {digits: 6}")
    rows: Positive | None = Field(None, description="number of rows; none: endless (reasoning_gym: a million)")
    seed: int = 0


class FileSource(Section):
    """Rows from a jsonl or parquet file, or a folder saved by `datasets`."""

    path: str = Field(description="relative paths start at the working directory")
    split: str | None = Field(None, description="which split of a folder that has several")
    rows: Positive | None = Field(None, description="use only the first rows")
    skip: int = Field(0, ge=0, description="leave out the first rows")


class HubSource(Section):
    """Rows from a data set on the hub."""

    hub: str
    name: str | None = None
    split: str = "train"
    rows: Positive | None = None
    skip: int = Field(0, ge=0)


SOURCE_KEYS: dict[str, type[Section]] = {"task": TaskSource, "path": FileSource, "hub": HubSource}  # the key that says which kind of source a section is


def _source_kind(value: Any) -> str | None:
    """Name of the schema that a `data.train` section means: a mistyped key is judged by one schema, not by three."""
    if isinstance(value, Section):
        return type(value).__name__
    if not isinstance(value, Mapping):
        return None
    for key in (str(k) for k in value):
        near = get_close_matches(key, SOURCE_KEYS, n=1, cutoff=0.7)
        if near:
            return SOURCE_KEYS[near[0]].__name__
    return None


SourceConfig = Annotated[
    Annotated[TaskSource, Tag("TaskSource")] | Annotated[FileSource, Tag("FileSource")] | Annotated[HubSource, Tag("HubSource")],
    Discriminator(
        _source_kind,
        custom_error_type="source_kind",
        custom_error_message="expected a section with one of the keys task (made in code), path (file or folder) or hub",
    ),
]


class Message(Section):
    """One turn of a chat."""

    role: str
    content: str


class DataConfig(Section):
    train: SourceConfig
    eval: SourceConfig | None = None
    prompt: str = Field("prompt", description="column with the prompt: a string, or a list of chat messages")
    completion: str | None = Field(None, description="SFT: column with the completion; none: that of a procedural task, else the prompt column holds whole chats")
    template: str | None = Field(None, description="text with {column} fields that makes the user prompt; replaces `prompt`")
    system: str | None = Field(None, description="system message put before every chat")
    examples: tuple[Message, ...] = Field((), description="chat messages {role, content} put between the system message and the prompt (few-shot)")
    chat: bool | None = Field(None, description="apply the tokenizer's chat template; none: when there is one")
    chat_options: dict[str, Any] = Field(default_factory=dict, description="variables of the chat template, e.g. {enable_thinking: false}")
    max_prompt_tokens: Positive = Field(1024, description="a longer prompt is left out and counted")
    shuffle: bool = Field(True, description="a new order every epoch, a function of the run's seed and the epoch; an endless task has no order to change")

    @model_validator(mode="after")
    def _chat_fields_need_a_chat(self) -> DataConfig:
        given = [name for name, value in (("system", self.system), ("examples", self.examples), ("chat_options", self.chat_options)) if value]
        if self.chat is False and given:
            raise ValueError(f"chat: false leaves no place for {', '.join(given)}; put the text into `template`")
        return self

    @property
    def completion_column(self) -> str | None:
        """Column with the text to learn in SFT; none: the prompt column holds whole chats."""
        return self.completion or ("completion" if isinstance(self.train, TaskSource) else None)


class RolloutConfig(Section):
    prompts_per_step: Positive = 32
    max_tokens: Positive = 256
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, lt=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="a response ends where one of these texts appears")


class RewardConfig(Section):
    fn: str = Field(description="exact, digits, format, math or reasoning_gym, module:name, file.py:name, trl:module:name or verl:module:name")
    weight: float = 1.0
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

    name: str
    group_size: Positive | None = Field(None, description="samples a prompt")
    advantage: Literal["group", "group_mean", "leave_one_out", "batch", "group_mean_batch_std", "raw", "gae"] | None = Field(None, description="from rewards alone, one a sample; gae: from a critic's values, one a token, whitened over the batch")
    gamma: float | None = Field(None, gt=0, le=1, description="gae: discount a token")
    lam: float | None = Field(None, ge=0, le=1, description="gae: weight of what comes against what the critic expects of it; 1: the rewards to come, and no later value")
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] | None = None
    clip_low: float | None = Field(None, ge=0, description="the ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: float | None = Field(None, ge=0)
    dual_clip: float | None = Field(None, gt=1, description="ppo: bound of the ratio where the advantage is negative")
    importance_cap: float | None = Field(None, gt=0, description="weigh each token by min(trainer / engine probability, cap): truncated importance sampling; none: off")
    aggregate: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] | None = None
    constant_length: Positive | None = Field(None, description="tokens; the divisor of aggregate: constant; none: rollout.max_tokens")
    entropy_coef: float | None = None
    kl: KLConfig | None = None
    critic: CriticConfig | None = Field(None, description="the value model that advantage: gae trains beside the policy")
    minibatches: Positive | None = Field(None, description="optimizer steps a rollout batch and epoch")
    epochs: Positive | None = Field(None, description="passes over a rollout batch")
    old_logprobs: Literal["auto", "engine", "recompute"] | None = None
    dynamic_sampling: bool | None = Field(None, description="draw again until the batch has enough groups whose rewards differ (DAPO)")
    max_draws: Positive | None = Field(None, description="dynamic sampling: at most this many times the prompts of a step")
    overlong: Literal["keep", "mask", "shape"] | None = Field(None, description="responses cut by max_tokens: train on them, leave them out of the loss, or DAPO's soft length penalty in the reward")
    overlong_buffer: Positive | None = Field(None, description="tokens before max_tokens where the soft penalty starts")


class OptimConfig(Section):
    """The learning rate is a pure function of the number of applied steps."""

    name: Literal["adamw", "muon", "adafactor"] = Field("adamw", description="muon: for the matrices of hidden layers, adamw for the rest; adafactor: next to no state")
    lr: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="last learning rate over `lr`")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0, description="decoupled")
    momentum: float = Field(0.95, ge=0, lt=1, description="muon")
    offload: bool = Field(False, description="adamw, muon: Adam's moments in host memory, brought to the device bucket by bucket")
    max_grad_norm: float = Field(1.0, ge=0, description="0: no clipping")
    max_skips: Positive = Field(5, description="abort after this many non-finite steps in a row")


class TrainConfig(Section):
    micro_batch_tokens: Positive = Field(4096, description="most tokens of one micro-batch on a rank, as the kernels see them (padding of the layout included)")
    batch_size: Positive = Field(64, description="SFT: samples an optimizer step")
    router_aux_coef: float = Field(0.0, ge=0, description="mixture of experts: weight in the loss of how unevenly the tokens of each sequence are routed, whatever config.json says; 0: routers are left to the loss itself, usual in RL")


class WarmupConfig(Section):
    """A short SFT run before RL, always on the specification backend with a fixed seed; cached by digest."""

    steps: Positive
    batch_size: Positive = 64
    lr: float = Field(1e-3, gt=0)
    data: SourceConfig | None = Field(None, description="solved examples to learn from; none: data.train")
    seed: int = 0


def _warmup_form(value: Any) -> str:
    return "path" if isinstance(value, str) else WarmupConfig.__name__


class NamedSection(BaseModel):
    """`name` selects a plug-in; every other key is the section of a plug-in of that name."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="constants")
    name: str

    @model_validator(mode="after")
    def _sections_are_mappings(self) -> NamedSection:
        for key, value in self.sections.items():
            if not isinstance(value, Mapping):
                raise ValueError(f"{key!r} is neither `name` nor the section of a plug-in; options go below the plug-in's name, e.g. {self.name}.{key}")
        return self

    @property
    def sections(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def options(self) -> dict[str, Any]:
        """Raw options of the selected plug-in."""
        return dict(self.sections.get(self.name, {}))


class RuntimeConfig(Section):
    name: Literal["local"] = "local"
    ranks: Positive = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = Field(600.0, gt=0, description="one call to the ranks (sampling, an optimizer step, a push) that takes longer ends the run; for ranks that are processes of their own")
    max_restarts: int = Field(0, ge=0, description="when a rank fails, start the ranks again from the last valid checkpoint, at most this many times in a run of the command; needs checkpoint.every")
    take_turns: bool = Field(False, description="engine and policy share a device by turns: the policy's memory is in host memory while the engine samples, and the engine's cache is released while the policy trains")


class EvalConfig(Section):
    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before the first and after the last step")
    rows: Positive = Field(256, description="at most this many rows")
    temperature: float = Field(0.0, ge=0, description="0: greedy")


class CheckpointConfig(Section):
    every: int = Field(0, ge=0, description="steps between checkpoints, the last step has one too; 0: none. Ctrl-C and SIGTERM save one before they end the run")
    async_save: bool = Field(True, description="training goes on while files are written; holds a copy of parameters and optimizer state in host memory")
    on_error: Literal["stop", "continue"] = Field("stop", description="a checkpoint that cannot be written, as on a full disk: end the run, or go on with an alarm and try again at the next one")
    keep: Positive = Field(2, description="the last so many stay")
    keep_every: int = Field(0, ge=0, description="so does each whose step is a multiple of this; 0: none")
    keep_best: str | None = Field(None, description="so does the best by this metric, named as in TensorBoard: eval/score, rl/reward_mean, ...; the latest of equals")
    keep_best_is: Literal["max", "min"] = "max"


class RecordConfig(Section):
    rollouts: bool = Field(True, description="write every rollout to rollouts.jsonl")
    batches: bool = Field(True, description="write every training batch, so that `drumroll replay` can train it again")
    tensorboard: bool = True
    digests: int = Field(0, ge=0, description="steps between records of every weight's digest, for `drumroll diff`; 0: none")


class RunConfig(Section):
    pipeline: Literal["rl", "sft"] = "rl"
    max_steps: Positive
    run_dir: str
    seed: int = 0
    max_lag: Literal[0] = Field(0, description="weight versions a sample may be behind; 0: rollout and training alternate")
    model: ModelConfig
    warmup: Annotated[Annotated[str, Tag("path")] | Annotated[WarmupConfig, Tag("WarmupConfig")], Discriminator(_warmup_form)] | None = Field(None, description="a short SFT run before RL, or the folder of a model that has had one")
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    rewards: tuple[RewardConfig, ...] = ()
    algorithm: AlgorithmConfig | None = None
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    backend: NamedSection
    engine: NamedSection | None = None
    runtime: RuntimeConfig = RuntimeConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()

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


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and apply `a.b=c` overrides (values are YAML). Raises UserError naming file and key."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file}: no such recipe")
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{file}: expected a mapping of keys at the top level, got {type(tree).__name__}")
    for text in overrides:
        _override(tree, text)
    return parse(tree, str(file))


def parse(tree: Mapping[str, Any], where: str = "config") -> RunConfig:
    """Validate a mapping. Raises UserError with one line a fault: key, what was expected, what was got."""
    return validate(RunConfig, tree, where)


def validate(schema: type[T], tree: Mapping[str, Any], where: str, section: str = "") -> T:
    """Validate `tree` against a schema. Raises UserError with one line a fault; `section` is the key that holds the tree, e.g. optim."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: {line}" for line in explain(schema, error, section))) from error


def dump(config: RunConfig, path: Path) -> None:
    """Write the resolved config as YAML, without what the run does not read; `load` gives it back equal."""
    tree = config.model_dump(mode="json")
    for key in (key for _, keys, _ in config.unread() for key in keys):
        *parents, leaf = key.split(".")
        node = tree
        for part in parents:
            node = node.get(part, {})
        node.pop(leaf, None)
    path.write_text(yaml.dump(tree, Dumper=_Dumper, sort_keys=False), encoding="utf-8")


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"{text!r}: expected key=value, e.g. runtime.ranks=2")
    *parents, leaf = key.split(".")
    node = tree
    for depth, part in enumerate(parents):
        child = node.get(part)
        at = ".".join(parents[: depth + 1])
        if isinstance(child, list) or (child is None and [*parents, leaf][depth + 1].isdigit()):
            raise UserError(f"{text!r}: {at} is a list, and a list is given whole: {at}=[...]")
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise UserError(f"{text!r}: {at} is a value ({child!r}), not a section")
        node = child
    try:
        node[leaf] = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{text!r}: the value is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key may stand only once, and `3e-4` (text in YAML 1.1) is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """As in the base class; raises a YAML error with the line of a key that stands twice."""
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):  # others the base class refuses
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))
