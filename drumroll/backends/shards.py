"""A rank's part of a checkpoint: one safetensors file, written tensor by tensor.

DCP's own writer makes one string of bytes of the whole part before it writes the first of them. Beside the parameters, and the copies
that a save in the background is made from, that would be the part once more in host memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from drumroll.backends.clip import local_part

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
# In the header, where DCP's reader looks for the place of each shard in its tensor; see torch/distributed/checkpoint/_hf_utils.py.
_PLACES, _VERSION = "DCP_SHARDING_INFO", {"DCP_VERSION": "1.0", "format": "pt"}


@dataclass(slots=True, frozen=True)
class Later:
    """A tensor that is made when its turn has come, so that all of them are never there at once."""

    like: torch.Tensor  # of its shape, dtype and place; without memory
    make: Callable[[], torch.Tensor]  # collective


def made(tensor: torch.Tensor | Later) -> torch.Tensor:
    """The tensor itself. Collective for one that is made."""
    return tensor.make() if isinstance(tensor, Later) else tensor


class ShardWriter(HuggingFaceStorageWriter):
    """Writes what `HuggingFaceStorageReader` reads; at most one tensor is there beside what is saved."""

    def __init__(self, directory: Path, later: Mapping[str, Later]) -> None:
        """`later`: what is made while the file is written, by name; the same names on all ranks."""
        super().__init__(str(directory), save_distributed=True)
        self._directory = directory
        self._later = later

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file, on the disk when this returns. Collective where something is made."""
        written: Future[list[WriteResult]] = Future()
        tensors = self._in_turn(plan.items, planner)
        try:
            written.set_result(self._write(plan, tensors) if plan.items else [])
        finally:
            deque(tensors, maxlen=0)  # a rank that has nothing to write, or whose disk refuses, takes part in what the others make
        return written

    def _write(self, plan: SavePlan, tensors: Iterator[torch.Tensor]) -> list[WriteResult]:
        file = self._directory / f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
        items = sorted(plan.items, key=lambda item: _turn(item.index.fqn, _data(item).properties.dtype))
        with file.open("wb") as out:
            out.write(_header(items))
            for tensor in tensors:
                out.write(_raw(tensor))
                del tensor  # before the next one is made
            out.flush()
            os.fsync(out.fileno())
        return [WriteResult(item.index, _bytes(item), storage_data=file.name) for item in items]

    def _in_turn(self, items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[torch.Tensor]:
        """What `items` stand for, in the order of the file. What is made is made on every rank in this order, whoever writes it."""
        here = {item.index.fqn: item for item in items}
        dtypes = {name: later.like.dtype for name, later in self._later.items()}
        dtypes |= {name: _data(item).properties.dtype for name, item in here.items()}
        for name in sorted(dtypes, key=lambda name: _turn(name, dtypes[name])):
            if name not in here:
                self._later[name].make()
            elif name in self._later:
                yield local_part(self._later[name].make())
            else:
                yield local_part(planner.resolve_data(here[name]))  # type: ignore[arg-type]


def _turn(name: str, dtype: torch.dtype) -> tuple[int, str]:
    """Place in a file: wide types first, so that everything is aligned to its size."""
    return -dtype.itemsize, name


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, f"{item.index.fqn}: not a tensor"
    return item.tensor_data


def _raw(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _bytes(item: WriteItem) -> int:
    return _data(item).chunk.sizes.numel() * _data(item).properties.dtype.itemsize


def _header(items: Sequence[WriteItem]) -> bytes:
    """Its length as 8 bytes, then name -> dtype, shape and place in the file as JSON, padded to whole 8 bytes (the safetensors format)."""
    tensors: dict[str, Any] = {}
    places, end = {}, 0
    for item in items:
        data, name = _data(item), item.index.fqn
        if name in tensors:
            raise ValueError(f"{name}: a rank holds two shards of it, and its file has room for one under each name")
        start, end = end, end + _bytes(item)
        tensors[name] = {"dtype": _CODES[data.properties.dtype], "shape": list(data.chunk.sizes), "data_offsets": [start, end]}
        places[name] = {"saved_offsets": list(data.chunk.offsets)}
    text = json.dumps({"__metadata__": {_PLACES: json.dumps(places), **_VERSION}, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
