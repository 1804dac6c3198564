"""The run configuration: one frozen pydantic tree from `recipe.yaml` and `a.b=c` overrides.

Unknown keys are refused at any level, with the nearest valid key. Options of a backend or an engine live under
`backend.<name>.*` and `engine.<name>.*`; their schema is in the plug-in's own file and `drumroll.plugins.check` applies it: the sections of
names that are not selected are checked and otherwise inert. Nothing here needs torch, and nothing rewrites what the user said:
derived values are properties.
"""

from drumroll.config.data import DataConfig, FileSource, HubSource, Message, SourceConfig, TaskSource
from drumroll.config.recipe import dump, load, parse, validate
from drumroll.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    KLConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RecordConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    RuntimeConfig,
    TrainConfig,
    WarmupConfig,
)
from drumroll.config.section import NamedSection, Positive, Section

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "EvalConfig",
    "FileSource",
    "HubSource",
    "KLConfig",
    "LoraConfig",
    "Message",
    "ModelConfig",
    "NamedSection",
    "OptimConfig",
    "Positive",
    "RecordConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "Section",
    "SourceConfig",
    "TaskSource",
    "TrainConfig",
    "WarmupConfig",
    "dump",
    "load",
    "parse",
    "validate",
]
