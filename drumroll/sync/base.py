"""The Transport contract: move the weights of a backend into an engine, and prove that they arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from drumroll.backends.base import Backend
from drumroll.engines.base import Engine
from drumroll.errors import RunError


@dataclass(slots=True, frozen=True)
class PushReport:
    version: int
    tensors: int
    matched: int  # tensors whose digest in the engine equals the trainer's; `push` raises unless all do
    sent_bytes: int  # of full tensors, as the engine got them


class Transport(Protocol):
    def push(self, backend: Backend, engine: Engine, dtype: torch.dtype, version: int) -> PushReport:
        """Send the weights, cast to `dtype`: all of them the first time, then those alone that training changes. Collective.

        Raises RunError when a digest differs, of any weight, sent or not.
        """


def compare_digests(sent: dict[str, int], held: dict[str, int], version: int, sent_bytes: int) -> PushReport:
    """Hold what the engine computes with against what the trainer has, by name. Raises RunError naming the tensors that differ."""
    if missing := sorted(sent.keys() - held.keys()):
        raise RunError(
            f"weight push {version}: the engine holds no {', '.join(missing[:5])} ({len(missing)} of {len(sent)} tensors missing)"
        )
    if unsent := sorted(held.keys() - sent.keys()):
        raise RunError(f"weight push {version}: the engine computes with {', '.join(unsent[:5])}, which the trainer never sent")
    if wrong := sorted(name for name, digest in sent.items() if held[name] != digest):
        raise RunError(
            f"weight push {version}: digests differ for {len(wrong)} of {len(sent)} tensors, first {wrong[0]}: "
            f"trainer {sent[wrong[0]]:#018x}, engine {held[wrong[0]]:#018x}; the engine would sample from other weights than were trained"
        )
    return PushReport(version=version, tensors=len(sent), matched=len(sent), sent_bytes=sent_bytes)
