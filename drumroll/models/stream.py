"""Streaming a safetensors folder into a placed model, tensor by tensor: a rank reads only the rows that it holds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from drumroll.errors import UserError
from drumroll.models.build import parameter_names
from drumroll.models.scorer import Scorer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(slots=True, frozen=True)
class Shard:
    """The part of a full tensor that this rank holds."""

    local: torch.Tensor  # a view of what is held: writing into it writes the parameter
    offset: tuple[int, ...]  # of its first element, in each dimension of the full tensor
    shape: tuple[int, ...]  # of the full tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.local.shape, strict=True))

    @property
    def start(self) -> int:
        """Index of its first element in the flattened full tensor; meaningful for parts along dim 0, which are contiguous there."""
        return self.offset[0] * (self.shape_numel // self.shape[0]) if self.shape and self.shape[0] else 0

    @property
    def shape_numel(self) -> int:
        return torch.Size(self.shape).numel()


def shard_of(tensor: torch.Tensor) -> Shard:
    """A plain tensor is its own only part."""
    if not isinstance(tensor, DTensor):
        return Shard(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    with torch.no_grad():
        return Shard(tensor.to_local(), tuple(offset), tuple(tensor.shape))


def load(scorer: Scorer, folder: str | Path) -> None:
    """Fill every parameter and persistent buffer from `folder`, cast to the stored dtype (fp32).

    Raises UserError naming tensors that are missing, unexpected, of another shape, or tied in the model but different in the file.
    """
    hf = scorer.hf
    files = tensor_files(Path(folder))
    aliases = [*parameter_names(hf).items(), *((buffer, [name]) for name, buffer in persistent_buffers(hf))]
    known = {name for _, names in aliases for name in names}
    stored = {_model_name(name, known, hf.base_model_prefix): name for name in files}
    _check_names(hf, Path(folder), aliases, stored, known)
    readers: dict[Path, Any] = {}
    for tensor, names in aliases:
        shard = shard_of(tensor)
        parts = [_read(readers, files[stored[name]], stored[name], shard) for name in names if name in stored]
        for part in parts[1:]:
            if not torch.equal(parts[0], part):
                raise UserError(
                    f"{folder}: {' and '.join(names)} are tied by config.json but hold different values; "
                    "correct tie_word_embeddings or the file"
                )
        with torch.no_grad():
            shard.local.copy_(parts[0])


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it. Raises UserError when the folder has none."""
    index = folder / _INDEX
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / _SINGLE
    if not single.is_file():
        raise UserError(f"{folder}: expected {_SINGLE} or {_INDEX}, found neither; save the model with save_pretrained")
    return dict.fromkeys(_open(single).keys(), single)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file}: not a whole safetensors file ({error}); copy or download it again") from error


def _read(readers: dict[Path, Any], file: Path, name: str, shard: Shard) -> torch.Tensor:
    if file not in readers:
        if not file.is_file():
            raise UserError(f"{file}: named by {_INDEX} for {name!r}, but there is no such file")
        readers[file] = _open(file)
    view = readers[file].get_slice(name)
    if tuple(view.get_shape()) != shard.shape:
        raise UserError(f"{file}: {name!r} has shape {tuple(view.get_shape())}; the model of config.json has {shard.shape}")
    part: torch.Tensor = view[shard.slices] if shard.shape else readers[file].get_tensor(name)
    return part


def _model_name(name: str, known: set[str], prefix: str) -> str:
    """A file saved from the bare body lacks the body's prefix."""
    prefixed = f"{prefix}.{name}"
    return prefixed if name not in known and prefixed in known else name


def _check_names(hf: PreTrainedModel, folder: Path, aliases: list[tuple[Any, list[str]]], stored: dict[str, str], known: set[str]) -> None:
    ignored = [*(hf._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    missing = [names[0] for _, names in aliases if not any(name in stored for name in names)]
    unexpected = [file_name for name, file_name in stored.items() if name not in known and not any(re.search(p, name) for p in ignored)]
    if missing or unexpected:
        raise UserError(
            f"{folder}: the tensors are not those of {type(hf).__name__} as config.json describes it: "
            f"missing {_some(missing)}; unexpected {_some(unexpected)}"
        )


def _some(names: list[str]) -> str:
    return "none" if not names else ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def persistent_buffers(hf: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """(HF name, buffer) of what a folder stores beside the parameters."""
    kept = hf.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in hf.named_buffers() if name in kept]
