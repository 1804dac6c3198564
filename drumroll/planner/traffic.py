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
    trained = optimizer_steps * scene.micros
    if (gathering := footprint.gathering) is not None and footprint.parameter > 1:
        found.append(Traffic("parameters gathered in forward", _units_gathered(scene, footprint.parameter), trained + scored))
        root = _gathered(scene.unit(states.OUTSIDE), gathering.between)
        if again := _units_gathered(scene, gathering.between) - root:
            found.append(Traffic("parameters gathered in backward", again, trained))
    if scene.travelling:
        found.append(Traffic("tokens to experts and back in forward", scene.travelling, trained + scored))
        found.append(Traffic("the same in backward", scene.travelling * (2 if scene.recomputed else 1), trained))
    found += _gradients(scene, ranks, optimizer_steps)
    if footprint.parameter < footprint.optimizer:
        updated = 4 * footprint.optimizer * states.share(scene.tensors, footprint.optimizer, footprint)
        found.append(Traffic("updated parameters shared", _gathered(updated, footprint.optimizer), optimizer_steps))
    if scene.engine is not None and footprint.parameter > 1:
        whole = footprint.parameter * states.share(scene.tensors, footprint.parameter, footprint) * scene.itemsize
        found.append(Traffic("weights for the engine", _gathered(whole, footprint.parameter), 1))
    return found


def _units_gathered(scene: Scene, ranks: int) -> int:
    """Bytes received for all units to be gathered once, from `ranks` each; from as many times fewer as groups have experts of their own."""
    apart = {tensor.unit: tensor.apart for tensor in scene.tensors}
    return sum(_gathered(scene.unit(unit), min(ranks, scene.footprint.parameter // apart[unit])) for unit in scene.unit_elements)


def _gradients(scene: Scene, ranks: int, optimizer_steps: int) -> list[Traffic]:
    footprint = scene.footprint
    trained = [tensor for tensor in scene.tensors if tensor.trained]
    times = optimizer_steps * (scene.micros if footprint.every_micro else 1)
    found = []
    share = footprint.reduce_itemsize * states.share(trained, footprint.gradient, footprint)
    if footprint.gradient > 1:
        groups = {tensor.apart for tensor in trained}
        shares = {apart: states.share([t for t in trained if t.apart == apart], footprint.gradient, footprint) for apart in groups}
        others = sum(size * (footprint.gradient // apart - 1) for apart, size in shares.items())
        found.append(Traffic("gradients reduce-scattered", footprint.reduce_itemsize * others, times))
    replicas = ranks // footprint.gradient
    if replicas > 1:
        found.append(Traffic("gradients all-reduced", 2 * _gathered(share, replicas), times))
    return found


def _gathered(whole: int, ranks: int) -> int:
    """Bytes that a rank sends, or receives, for `whole` to be gathered from, or reduce-scattered over, `ranks`."""
    return whole * (ranks - 1) // ranks if ranks > 1 else 0
