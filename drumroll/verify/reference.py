"""Tensors that the specification gave, kept on disk, and the distance of another backend's tensors from them.

A group is one file: the tensors of one kind at one moment. They are compared one at a time where they are made, so that no process holds a
second model for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drumroll.backends.base import NamedTensor
from drumroll.digest import digest


@dataclass(slots=True, frozen=True)
class Deviation:
    """The largest difference found, and where."""

    value: float
    where: str = ""


@dataclass
class Observer:
    """Writes the specification's groups below `folder`, or measures those of another backend against them.

    `deviations`: check -> the worst seen. `floor`: a tensor whose values are all much smaller than the group's largest is what is left of a
    sum that cancels (the bias of attention's keys is one): rounding, without a scale of its own.
    """

    folder: Path
    writes: bool
    floor: float  # share of a group's largest value that every tensor is measured against at least
    deviations: dict[str, Deviation] = field(default_factory=dict)

    def note(self, check: str, value: float, where: str = "") -> None:
        """Keep the worse of `value` and what the check had."""
        known = self.deviations.get(check)
        if known is None or value > known.value:
            self.deviations[check] = Deviation(value, where)

    def compare(self, check: str, group: str, named: Iterable[NamedTensor], whole: bool = True, one_scale: bool = False) -> None:
        """Measure `named` against the group; see `distance`. `whole`: a name that is missing counts too.

        `one_scale`: over the group's largest value, for numbers on both sides of 0, of which a few near it have no scale of their own.
        """
        if self.writes:
            self._write(group, named)
            self.note(check, 0.0)
            return
        with safe_open(self._file(group), framework="pt") as reader:
            floor = float(reader.metadata()["largest"]) * (1.0 if one_scale else self.floor)
            missing = set(reader.keys())
            self.note(check, 0.0)
            for name, tensor in named:
                if name not in missing:
                    self.note(check, math.inf, f"{name}: not expected, or twice")
                    continue
                missing.remove(name)
                value, why = distance(tensor.detach().cpu(), reader.get_tensor(name), floor)
                self.note(check, value, f"{name}{why}")
        if whole and missing:
            self.note(check, math.inf, f"missing: {', '.join(sorted(missing)[:3])}")

    def compare_change(self, check: str, before: str, after: str, named: Iterable[NamedTensor]) -> None:
        """Measure how far `named` are from the group `after`, relative to how far that is from the group `before`.

        Where that is less than 0.2 % of the tensor's size, the size counts: float32 itself rounds a weight by 1e-7 of it in every step.
        """
        if self.writes:
            self.note(check, 0.0)
            return
        with safe_open(self._file(before), framework="pt") as start, safe_open(self._file(after), framework="pt") as end:
            names = set(end.keys())
            for name, tensor in named:
                if name in names and tensor.shape == tuple(end.get_slice(name).get_shape()):
                    expected = end.get_tensor(name)
                    change = float((expected - start.get_tensor(name)).abs().max())
                    scale = max(change, 2e-3 * float(expected.abs().max()))
                    error = float((tensor.detach().cpu() - expected).abs().max()) / scale if scale > 0 else 0.0
                    self.note(check, error if math.isfinite(error) else math.inf, name)
                else:
                    self.note(check, math.inf, f"{name}: not expected, or of another shape")

    def names(self, check: str, group: str, found: Sequence[str]) -> None:
        """Count names that are missing, unexpected or there twice."""
        with safe_open(self._file(group), framework="pt") as reader:
            expected = list(reader.keys())
        wrong = sorted(name for name in {*found, *expected} if found.count(name) != expected.count(name))
        self.note(check, len(wrong), f"missing, unexpected or twice: {', '.join(wrong[:3])}" if wrong else "")

    def _write(self, group: str, named: Iterable[NamedTensor]) -> None:
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named}
        largest = max((float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel()), default=0.0)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, self._file(group), metadata={"largest": repr(largest)})

    def _file(self, group: str) -> Path:
        return self.folder / f"{group}.safetensors"


def distance(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> tuple[float, str]:
    """Largest absolute difference over the largest absolute expected value (or `floor`, where that is more), and what else is wrong.

    Infinite for another shape or dtype, and where a value is not finite.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf, f": {found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    if not found.numel() or torch.equal(found, expected):
        return 0.0, ""
    error = float((found.double() - expected.double()).abs().max())
    if not math.isfinite(error):
        return math.inf, ": not finite"
    scale = max(float(expected.abs().max()), floor)
    return (error / scale if scale > 0 else math.inf), ""


def fingerprints(named: Iterable[NamedTensor]) -> dict[str, int]:
    """Name -> digest of the tensor as it is now."""
    return {name: digest(tensor) for name, tensor in named}


def differing(found: dict[str, int], expected: dict[str, int]) -> list[str]:
    """Names that only one of them has, or whose digests differ."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
