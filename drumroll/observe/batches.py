"""Training batches as recorded: what `drumroll replay` trains again. One `.npz` a step, plain arrays, no pickle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from drumroll.errors import RunError
from drumroll.types import TrainSample

PER_TARGET = ("advantages", "engine_logprobs", "old_logprobs", "ref_logprobs", "values", "returns")


def path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.npz"


def write(file: Path, samples: Sequence[TrainSample]) -> None:
    """Write samples in order, flat: arrays of a field follow each other, `lengths` cuts them; a field that is None is absent.

    Raises RunError when the disk refuses.
    """
    flat: dict[str, np.ndarray] = {
        "lengths": np.array([len(s.token_ids) for s in samples], np.int64),
        "group_id": np.array([s.group_id for s in samples], np.int64),
        "index": np.array([s.index for s in samples], np.int64),
        "token_ids": _join([s.token_ids for s in samples], np.int64),
        "target_mask": _join([s.target_mask for s in samples], np.bool_),
    }
    for name, columns in _per_target(samples).items():
        if columns is not None:
            flat[name] = _join(columns, np.float32)
    staging = file.with_suffix(".tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("wb") as out:
            np.savez(out, allow_pickle=False, **flat)
        os.replace(staging, file)
    except OSError as error:
        raise RunError(f"{file}: cannot write the batch: {error}; free the disk, or set record.batches=false") from error


def read(file: Path) -> list[TrainSample]:
    """Samples in the order written."""
    with np.load(file, allow_pickle=False) as flat:
        if not flat["lengths"].size:
            return []  # every sample was left out of training; np.split would make one of nothing
        ends = np.cumsum(flat["lengths"])[:-1]
        token_ids, masks = np.split(flat["token_ids"], ends), np.split(flat["target_mask"], ends)
        target_ends = np.cumsum([int(mask.sum()) for mask in masks])[:-1]
        samples = [
            TrainSample(token_ids=ids, target_mask=mask, group_id=int(group), index=int(index))
            for ids, mask, group, index in zip(token_ids, masks, flat["group_id"], flat["index"], strict=True)
        ]
        for name in PER_TARGET:
            if name in flat:
                for sample, values in zip(samples, np.split(flat[name], target_ends), strict=True):
                    setattr(sample, name, values)
    return samples


def _per_target(samples: Sequence[TrainSample]) -> dict[str, list[np.ndarray] | None]:
    columns: dict[str, list[np.ndarray] | None] = {}
    for name in (f.name for f in fields(TrainSample) if f.name in PER_TARGET):
        values = [getattr(s, name) for s in samples]
        if any(v is None for v in values) and not all(v is None for v in values):
            raise ValueError(f"{name} is set on some samples of a batch and not on others")
        columns[name] = None if not values or values[0] is None else values
    return columns


def _join(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)
