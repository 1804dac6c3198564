"""Streaming a safetensors folder into a placed model, tensor by tensor: a rank reads only the rows that it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from drumroll.errors import UserError
from drumroll.models.build import non_persistent_buffers, parameter_names
from drumroll.models.lora import is_adapter, outer_name
from drumroll.models.scorer import Scorer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(slots=True, frozen=True)
class Held:
    """The part of a tensor that this rank holds: a contiguous range of the flattened whole."""

    local: torch.Tensor  # a view of what is held, of any shape: writing into it writes the parameter
    start: int  # index of its first element in the flattened whole
    shape: torch.Size  # of the whole


def held_whole(tensor: torch.Tensor) -> Held:
    return Held(tensor.detach(), 0, tensor.shape)


def load(scorer: Scorer, folder: str | Path, held: Callable[[nn.Parameter], Held] = held_whole) -> None:
    """Fill every parameter and persistent buffer from `folder`, cast to the stored dtype; adapters are not in it.

    `held`: which part of a parameter lies here. Raises UserError naming tensors that are missing, unexpected, of another shape, or tied
    in the model but different in the file.
    """
    hf = scorer.hf
    files = tensor_files(Path(folder))
    aliases = [
        (held(parameter), [outer_name(name) for name in names])
        for parameter, names in parameter_names(hf).items()
        if not is_adapter(names[0])
    ]
    aliases += [(held_whole(buffer), [name]) for name, buffer in persistent_buffers(hf)]
    known = {name for _, names in aliases for name in names}
    stored = {_model_name(name, known, hf.base_model_prefix): name for name in files}
    _check_names(hf, Path(folder), [names for _, names in aliases], stored, known)
    readers: dict[Path, Any] = {}
    for part, names in aliases:
        found = [_read(readers, files[stored[name]], stored[name], part) for name in names if name in stored]
        for other in found[1:]:
            if not torch.equal(found[0], other):
                raise UserError(
                    f"{folder}: {' and '.join(names)} are tied by config.json but hold different values; "
                    "correct tie_word_embeddings or the file"
                )
        with torch.no_grad():
            part.local.copy_(found[0].view(part.local.shape))


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


def _read(readers: dict[Path, Any], file: Path, name: str, part: Held) -> torch.Tensor:
    """The elements of the part, flat; no more rows than it touches are read."""
    if file not in readers:
        if not file.is_file():
            raise UserError(f"{file}: named by {_INDEX} for {name!r}, but there is no such file")
        readers[file] = _open(file)
    view = readers[file].get_slice(name)
    if tuple(view.get_shape()) != tuple(part.shape):
        raise UserError(f"{file}: {name!r} has shape {tuple(view.get_shape())}; the model of config.json has {tuple(part.shape)}")
    row = part.shape[1:].numel()
    if not part.shape or not row:
        whole: torch.Tensor = readers[file].get_tensor(name)
        return whole.flatten()
    first, last = part.start // row, -(-(part.start + part.local.numel()) // row)
    rows: torch.Tensor = view[first:last]
    return rows.flatten().narrow(0, part.start - first * row, part.local.numel())


def _model_name(name: str, known: set[str], prefix: str) -> str:
    """A file saved from the bare body lacks the body's prefix."""
    prefixed = f"{prefix}.{name}"
    return prefixed if name not in known and prefixed in known else name


def _check_names(hf: PreTrainedModel, folder: Path, aliases: list[list[str]], stored: dict[str, str], known: set[str]) -> None:
    ignored = [*(hf._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    missing = [names[0] for names in aliases if not any(name in stored for name in names)]
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
    rebuilt = {name for name, _ in non_persistent_buffers(hf)}
    return [(name, buffer) for name, buffer in hf.named_buffers() if name not in rebuilt]
