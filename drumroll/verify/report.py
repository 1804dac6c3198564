"""One run of a scenario, and what a rank noted in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drumroll import plugins
from drumroll.backends.base import ModelSpec, OptimSpec, StepResult
from drumroll.types import Stat
from drumroll.verify.batches import Split
from drumroll.verify.reference import Observer
from drumroll.verify.subjects import Subject

FLOORS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # see Observer
SAVED, SAVED_AGAIN = "saved", "saved-again"  # folders of checkpoints
BESIDE = "forward-only: unmoved by training"
TRAINING = "forward-only: what trains beside it"
SENT_AGAIN = "weights that a push sends again"
ADAPTERS_SENT = "adapters that a push sends again"
FOREIGN_WEIGHTS = f"weights from {plugins.SPECIFICATION_BACKEND}'s save"
FOREIGN_STEP = f"step after {plugins.SPECIFICATION_BACKEND}'s save"


@dataclass(slots=True, frozen=True)
class Case:
    """One run of a scenario."""

    subject: Subject
    options: Mapping[str, Any]  # of the backend
    model: ModelSpec
    optim: OptimSpec
    split: Split
    reference: Path  # where the specification's groups of this subject and this mathematics lie
    scratch: Path  # for checkpoints of this run
    writes: bool = False  # this is the specification

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.model.compute_dtype


@dataclass(slots=True)
class SeenStep:
    """One optimizer step on one rank."""

    stats: dict[str, Stat]  # merged over micro-batches; `loss` has this rank's share as its sum
    result: StepResult


@dataclass(slots=True)
class Report:
    """What one rank noted in one scenario."""

    observer: Observer
    steps: list[SeenStep] = field(default_factory=list)
    exported: dict[str, int] = field(default_factory=dict)  # name -> digest of the weights at the end
    memory: dict[str, int] = field(default_factory=dict)  # bytes by kind, as the backend says
    live_bytes: int = 0  # bytes of all tensors that the backend brought into the process
