"""Bytes that a rank sends in one step, as rings and trees of any library send at least (Chan et al. 2007, Collective communication)."""

from __future__ import annotations

from dataclasses import dataclass

from drumroll.planner import state as states
from drumroll.planner.phases import Scene


@dataclass(slots=True, frozen=True)
class Traffic:
    """One kind of communication in a step."""

    what: str
    bytes: int  # sent by a rank, and received by it
    times: int  # in a step


def traffic(scene: Scene, ranks: int, *, optimizer_steps: int, scored: int) -> list[Traffic]:
    """Of one step of the run.

    It has `optimizer_steps` updates of `scene.micros` micro-batches each, and `scored` micro-batches without a gradient.
    """
    footprint = scene.footprint
    found: list[Traffic] = []
    if (gathering := footprint.gathering) is not None and footprint.parameter > 1:
        whole = sum(scene.unit_elements.values()) * scene.itemsize
        root = scene.unit(states.OUTSIDE)
        again = _gathered(whole - root, gathering.between)
        trained = optimizer_steps * scene.micros
        found.append(Traffic("parameters gathered in forward", _gathered(whole, footprint.parameter), trained + scored))
        if again:
            found.append(Traffic("parameters gathered in backward", again, trained))
    found += _gradients(scene, ranks, optimizer_steps)
    if footprint.parameter < footprint.optimizer:
        updated = 4 * footprint.optimizer * states.share(scene.tensors, footprint.optimizer, footprint)
        found.append(Traffic("updated parameters shared", _gathered(updated, footprint.optimizer), optimizer_steps))
    if scene.engine is not None and footprint.parameter > 1:
        whole = sum(scene.unit_elements.values()) * scene.itemsize
        found.append(Traffic("weights for the engine", _gathered(whole, footprint.parameter), 1))
    return found


def _gradients(scene: Scene, ranks: int, optimizer_steps: int) -> list[Traffic]:
    footprint = scene.footprint
    trained = [tensor for tensor in scene.tensors if tensor.trained]
    whole = footprint.reduce_itemsize * footprint.gradient * states.share(trained, footprint.gradient, footprint)
    times = optimizer_steps * (scene.micros if footprint.every_micro else 1)
    found = []
    if footprint.gradient > 1:
        found.append(Traffic("gradients reduce-scattered", _gathered(whole, footprint.gradient), times))
    replicas = ranks // footprint.gradient
    if replicas > 1:
        found.append(Traffic("gradients all-reduced", 2 * _gathered(whole // footprint.gradient, replicas), times))
    return found


def _gathered(whole: int, ranks: int) -> int:
    """Bytes that a rank sends, or receives, for `whole` to be gathered from, or reduce-scattered over, `ranks`."""
    return whole * (ranks - 1) // ranks if ranks > 1 else 0
