"""Trainer and engine in one process: buckets of full tensors are handed over one at a time."""

from __future__ import annotations

import torch

from drumroll.backends.base import Backend, NamedTensor
from drumroll.engines.base import Engine
from drumroll.sync.base import PushReport, compare_digests


class InProcess:
    """One trainer and one engine."""

    def __init__(self) -> None:
        self._has_all = False  # the engine has had every weight once

    def push(self, backend: Backend, engine: Engine, dtype: torch.dtype, version: int) -> PushReport:
        sizes: list[int] = []

        def count(bucket: list[NamedTensor]) -> list[NamedTensor]:
            sizes.extend(tensor.nbytes for _, tensor in bucket)
            return bucket

        apart = engine.adapters_apart
        engine.load_weights(map(count, backend.weights(dtype, self._has_all, apart)), version, partial=self._has_all)
        report = compare_digests(backend.digests(dtype, apart), engine.digests(), version, sum(sizes))
        self._has_all = True
        return report


PLUGIN = InProcess
