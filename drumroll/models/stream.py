"""Streaming a safetensors folder into a placed model, tensor by tensor: a rank reads only the rows that it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from drumroll.errors import UserError
from drumroll.models import value
from drumroll.models.build import non_persistent_buffers, parameter_names
from drumroll.models.fused import FileTensor, file_tensors
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
    """Fill every parameter and persistent buffer from `folder`, cast to the stored dtype; adapters are not in it, a value head need not be.

    `held`: which part of a parameter lies here. Raises UserError naming tensors that are missing, unexpected, of another shape, or tied
    in the model but different in the file.
    """
    hf = scorer.hf
    folder = Path(folder)
    files = {name: file for name, file in tensor_files(folder).items() if name not in scorer.left_out}
    wanted = [
        (held(parameter), [outer_name(name) for name in names])
        for parameter, names in parameter_names(hf).items()
        if not is_adapter(names[0]) and not (names[0] == value.WEIGHT and value.WEIGHT not in files)
    ]
    wanted += [(held_whole(buffer), [name]) for name, buffer in persistent_buffers(hf)]
    apart = file_tensors(hf, {name: part.shape for part, names in wanted for name in names})
    known = apart.keys() | {tensor.name for tensors in apart.values() for tensor in tensors}
    stored = {_model_name(name, known, hf.base_model_prefix): name for name in files}
    _check_names(hf, folder, [names for _, names in wanted], apart, stored, known)
    reader = _Reader(files, stored)
    for part, names in wanted:
        sources = [[FileTensor(name, part.shape, 0)] if name in stored else apart[name] for name in names]
        found = [reader.read(tensors, part) for tensors in sources if tensors[0].name in stored]
        for other in found[1:]:
            if not torch.equal(found[0], other):
                raise UserError(
                    f"{folder}: {' and '.join(names)} are tied by config.json but hold different values; "
                    "correct tie_word_embeddings or the file"
                )
        with torch.no_grad():
            part.local.copy_(found[0].view(part.local.shape))
    if scorer.left_out and value.WEIGHT not in files:
        part = held(hf.get_parameter(value.WEIGHT))
        with torch.no_grad():
            part.local.copy_(value.initial(part.shape).flatten().narrow(0, part.start, part.local.numel()).view(part.local.shape))


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it. Raises UserError when the folder has none."""
    index = folder / _INDEX
    if index.is_file():
        try:
            return {name: folder / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: expected an object with weight_map, tensor name to file name ({error!r}); copy it again") from error
    single = folder / _SINGLE
    if not single.is_file():
        raise UserError(f"{folder}: expected {_SINGLE} or {_INDEX}, found neither; save the model with save_pretrained")
    return dict.fromkeys(_open(single).keys(), single)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file}: not a whole safetensors file ({error}); copy or download it again") from error


class _Reader:
    """Reads parts of parameters; files are opened once."""

    def __init__(self, files: Mapping[str, Path], stored: Mapping[str, str]) -> None:
        """`stored`: name as the model expects it -> name in the files."""
        self._files = files
        self._stored = stored
        self._open: dict[Path, Any] = {}

    def read(self, tensors: Sequence[FileTensor], part: Held) -> torch.Tensor:
        """The elements of the part, flat, from the tensors that make up its whole."""
        end = part.start + part.local.numel()
        pieces = [
            self._range(tensor, max(part.start, tensor.start) - tensor.start, min(end, tensor.start + tensor.shape.numel()) - tensor.start)
            for tensor in tensors
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _range(self, tensor: FileTensor, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) of the flattened tensor; no more rows than they touch are read, and nothing where there are none."""
        name = self._stored[tensor.name]
        file = self._files[name]
        if file not in self._open:
            if not file.is_file():
                raise UserError(f"{file}: named by {_INDEX} for {name!r}, but there is no such file")
            self._open[file] = _open(file)
        view = self._open[file].get_slice(name)
        if tuple(view.get_shape()) != tuple(tensor.shape):
            raise UserError(f"{file}: {name!r} has shape {tuple(view.get_shape())}; the model of config.json has {tuple(tensor.shape)}")
        row = tensor.shape[1:].numel()
        if not tensor.shape or not row:
            whole: torch.Tensor = self._open[file].get_tensor(name)
            return whole.flatten()
        if last <= first:
            nothing: torch.Tensor = view[:0]
            return nothing.flatten()
        top = first // row
        rows: torch.Tensor = view[top : -(-last // row)]
        return rows.flatten().narrow(0, first - top * row, last - first)


def _model_name(name: str, known: Collection[str], prefix: str) -> str:
    """A file saved from the bare body lacks the body's prefix."""
    prefixed = f"{prefix}.{name}"
    return prefixed if name not in known and prefixed in known else name


def _check_names(
    hf: PreTrainedModel,
    folder: Path,
    wanted: Sequence[Sequence[str]],
    apart: Mapping[str, Sequence[FileTensor]],
    stored: Mapping[str, str],
    known: Collection[str],
) -> None:
    """`wanted`: all names of each parameter and buffer; one of them is enough, whole or as the tensors of `apart`."""
    missing: list[str] = []
    for names in wanted:
        if not any(name in stored for name in names):
            lacking = [[tensor.name for tensor in apart[name] if tensor.name not in stored] for name in names]
            fewest: list[str] = min(lacking, key=len)
            missing += fewest
    ignored = [*(hf._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
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
