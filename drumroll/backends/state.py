"""Training state through torch.distributed.checkpoint, with the names compared: what was saved is what is restored.

Names: `model.<HF name>`, `optimizer.<HF name>.exp_avg`, `optimizer.<HF name>.exp_avg_sq`, `optimizer.step`. DCP itself restores what
the template asks for and is silent about the rest of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from drumroll.errors import RunError

MODEL = "model."
OPTIMIZER = "optimizer."


def save(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` (plain: the same on all ranks; DTensor: each rank its shard). Collective."""
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(directory))


def load(directory: Path, tensors: Mapping[str, torch.Tensor], prefixes: tuple[str, ...]) -> None:
    """Restore `tensors` in place. Collective.

    Raises RunError when the names below `prefixes`, a shape or a dtype in the checkpoint differ from those of `tensors`.
    """
    reader = dcp.FileSystemReader(directory)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise RunError(f"{directory}: not a checkpoint, {Path(error.filename).name} is missing") from error
    saved_names = {name for name in saved if name.startswith(prefixes)}
    if saved_names != set(tensors):
        missing, unexpected = sorted(set(tensors) - saved_names), sorted(saved_names - set(tensors))
        raise RunError(
            f"{directory}: names saved and restored differ: {_some(missing)} missing in the checkpoint, {_some(unexpected)} only in it; "
            "load it with the model and the trainable parameters it was saved with"
        )
    for name, tensor in tensors.items():
        _check_alike(directory, name, tensor, saved[name])
    dcp.load(dict(tensors), storage_reader=reader)


def _check_alike(directory: Path, name: str, tensor: torch.Tensor, saved: object) -> None:
    if not isinstance(saved, TensorStorageMetadata):
        raise RunError(f"{directory}: {name} is saved as {type(saved).__name__}, expected a tensor")
    if saved.size != tensor.shape or saved.properties.dtype != tensor.dtype:
        raise RunError(
            f"{directory}: {name} is saved as {saved.properties.dtype} {tuple(saved.size)}, expected {tensor.dtype} {tuple(tensor.shape)}"
        )


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "none"
