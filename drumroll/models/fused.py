"""Parameters that a model folder keeps in pieces: transformers holds all experts of a layer in one tensor, and files have one an expert.

[Note: file tensors] Which tensors of a file make up a parameter is known to transformers, which takes parameters apart when it saves them.
So it is asked: once with shapes alone, and once with numbers in place of values, which tell where each row of a parameter went. What can
be read and written by ranges is a contiguous range of a flattened parameter; anything else is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from drumroll.errors import UserError


@dataclass(slots=True, frozen=True)
class FileTensor:
    """A tensor as a file has it."""

    name: str
    shape: torch.Size
    start: int  # index of its first element in the flattened parameter

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its values, in those of the full parameter: a view of a contiguous one."""
        return whole.reshape(-1).narrow(0, self.start, self.shape.numel()).view(self.shape)


def file_tensors(hf: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> dict[str, list[FileTensor]]:
    """HF name -> the tensors of a file that make up what is called so in the model, in order; mostly one, of the same name.

    `shapes`: HF name -> full shape, of parameters and buffers. Raises UserError where a file has other numbers, or another order of them.
    """
    outer = revert_weight_conversion(hf, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    if all(name in outer and outer[name].shape == shape for name, shape in shapes.items()) and len(outer) == len(shapes):
        return {name: [FileTensor(name, shape, 0)] for name, shape in shapes.items()}
    names = list(shapes)
    probes = {name: torch.Size([*shape[:-1], *(min(2, size) for size in shape[-1:])]) for name, shape in shapes.items()}
    starts = list(accumulate((probe.numel() for probe in probes.values()), initial=0))
    numbers = {name: torch.arange(starts[index], starts[index + 1]).view(probes[name]) for index, name in enumerate(names)}
    found: dict[str, list[FileTensor]] = {name: [] for name in names}
    for file_name, places in revert_weight_conversion(hf, numbers).items():
        first = int(places.flatten()[0])
        index = bisect_right(starts, first) - 1
        name, shape = names[index], outer[file_name].shape
        width, probed = (whole[-1:].numel() for whole in (shapes[name], probes[name]))
        in_order = torch.equal(places.flatten(), torch.arange(first, first + places.numel()))
        if not in_order or shape.numel() * probed != places.numel() * width:
            raise UserError(f"{type(hf).__name__}: {file_name} of a model folder is {name} of the model rearranged, which is not supported")
        found[name].append(FileTensor(file_name, shape, (first - starts[index]) * width // probed))
    for name, tensors in found.items():
        tensors.sort(key=lambda tensor: tensor.start)
        if sum(tensor.shape.numel() for tensor in tensors) != shapes[name].numel():
            raise UserError(f"{type(hf).__name__}: transformers saves a part of {name} only, which is not supported")
    return found
