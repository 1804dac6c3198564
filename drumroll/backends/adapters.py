"""Low-rank adapters in a backend: given values, merged into the weights that leave, put back to what they began as, for a reference.

[Note: merging] A weight is merged where it lies: a rank adds to what it holds of W the same part of scale · B A, in float32, and only then
is the result cast and gathered, or digested. So only A and B are gathered for a digest, (in + out) · rank numbers a layer, and a digest is
of the very bits that a push sends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from drumroll.backends.base import LoraSpec
from drumroll.backends.division import Division
from drumroll.backends.state import BASE
from drumroll.errors import RunError
from drumroll.models import lora
from drumroll.models.lora import Adapter
from drumroll.models.scorer import Scorer
from drumroll.models.stream import Held

DIGESTS = f"{BASE}digests"  # names in a checkpoint
SCALE = f"{BASE}scale"


class Adapters:
    """Those of one backend instance, over whatever a rank holds of them."""

    def __init__(self, scorer: Scorer, spec: LoraSpec, division: Division) -> None:
        """Fills A and B: from `spec.start`, else by their names and `spec.seed`. Raises UserError for a folder that does not fit."""
        self._hf = scorer.hf
        self._division = division
        self.scale = spec.alpha / spec.rank  # of every adapter
        self._adapters = {adapter.weight: adapter for adapter in lora.adapters(scorer.hf)}
        named = {scorer.hf_name(name): parameter for name, parameter in scorer.named_parameters()}
        self._matrices = {name: named[name] for adapter in self._adapters.values() for name in (adapter.a, adapter.b)}
        shapes = {name: division.held(parameter).shape for name, parameter in self._matrices.items()}
        given = lora.read_folder(Path(spec.start), spec, shapes) if spec.start is not None else {}
        for name, parameter in self._matrices.items():
            held = division.held(parameter)
            held.local.copy_(_cut(given[name] if given else lora.initial(name, held.shape, spec.seed), held))
        self._begun = {name: division.held(self._matrices[name]).local.clone() for name in given}

    @property
    def matrices(self) -> Collection[str]:
        """Names of every A and B."""
        return self._matrices.keys()

    @property
    def weights(self) -> Collection[str]:
        """HF names of the weights that are adapted."""
        return self._adapters.keys()

    @property
    def kept(self) -> list[torch.Tensor]:
        """Memory beyond the parameters: what loaded adapters began as."""
        return list(self._begun.values())

    @torch.no_grad()
    def merged(self, weights: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Name -> what this rank holds of each of `weights` that is adapted: float32, the adapter in it. Collective; [Note: merging]."""
        here = [self._adapters[name] for name in weights if name in self._adapters]
        if not here:
            return {}
        matrices = {name: self._matrices[name] for adapter in here for name in (adapter.a, adapter.b)}
        parts = [self._division.held(parameter).local for parameter in matrices.values()]
        wholes = dict(zip(matrices, self._division.whole(list(matrices.values()), parts), strict=True))
        return {
            adapter.weight: _merge(self._division.held(weights[adapter.weight]), adapter, wholes[adapter.a], wholes[adapter.b])
            for adapter in here
        }

    @contextmanager
    def as_begun(self) -> Iterator[None]:
        """Within, the model is the one that training began with: fresh adapters are switched off, loaded ones as they were loaded."""
        if not self._begun:
            with lora.switched_off(self._hf):
                yield
            return
        held = {name: self._division.held(self._matrices[name]).local for name in self._begun}
        now = {name: local.clone() for name, local in held.items()}
        try:
            for name, local in held.items():
                local.copy_(self._begun[name])
            yield
        finally:
            for name, local in held.items():
                local.copy_(now[name])


def check_base(directory: Path, names: Sequence[str], saved: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor]) -> None:
    """Raises RunError for adapters in a checkpoint that were trained on another model, or at another scale.

    `names`: of the weights below them, in the order of their digests; `saved` and `here`: see `TorchBackend._base`.
    """
    different = (saved[DIGESTS] != here[DIGESTS]).nonzero().flatten().tolist()
    if different:
        raise RunError(
            f"{directory}: its adapters belong to another model: {len(different)} of {len(names)} weights differ, first "
            f"{names[different[0]]}; load it with the model.path and model.lora.base_dtype that it was saved with"
        )
    if saved[SCALE] != here[SCALE]:
        raise RunError(
            f"{directory}: its adapters are scaled by {float(saved[SCALE]):g}, these by {float(here[SCALE]):g}: "
            "set model.lora.alpha to what it was"
        )


def _merge(weight: Held, adapter: Adapter, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    row = weight.shape[1]
    end = weight.start + weight.local.numel()
    first, last = weight.start // row, -(-end // row)
    delta = adapter.delta(a, b, first, last).reshape(-1)[weight.start - first * row : end - first * row]
    return weight.local.float() + delta.view(weight.local.shape)


def _cut(whole: torch.Tensor, held: Held) -> torch.Tensor:
    """The part of `whole` that `held` describes, shaped as what is held."""
    return whole.reshape(-1).narrow(0, held.start, held.local.numel()).view(held.local.shape)
