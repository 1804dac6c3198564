"""Optimizers over plain local pieces of parameters: whatever a rank owns of each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drumroll.backends.base import OptimSpec
from drumroll.backends.optim.adafactor import Adafactor
from drumroll.backends.optim.adamw import AdamW
from drumroll.backends.optim.base import Optimizer, Wholes
from drumroll.backends.optim.muon import Muon

__all__ = ["Optimizer", "Wholes", "make"]


def make(spec: OptimSpec, pieces: Mapping[str, torch.Tensor], wholes: Wholes) -> Optimizer:
    """The optimizer that `spec` names, over the pieces (name -> float32 tensor, updated in place; may be empty)."""
    match spec.name:
        case "adamw":
            return AdamW(pieces, spec)
        case "muon":
            return Muon(pieces, spec, wholes)
        case "adafactor":
            return Adafactor(pieces, spec, wholes)
