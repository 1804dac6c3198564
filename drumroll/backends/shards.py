"""A rank's part of a checkpoint: one safetensors file, written tensor by tensor.

DCP's own writer makes one string of bytes of the whole part before it writes the first of them. Beside the parameters, and the copies
that a save in the background is made from, that would be the part once more in host memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

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


class ShardWriter(HuggingFaceStorageWriter):
    """Writes what `HuggingFaceStorageReader` reads; at most one tensor is on the host beside what is saved."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)
        self._directory = directory

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file, on the disk when this returns."""
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._write(plan, planner) if plan.items else [])
        return written

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        file = self._directory / f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
        # Wide types first, so that everything is aligned to its size.
        items = sorted(plan.items, key=lambda item: (-_data(item).properties.dtype.itemsize, item.index.fqn))
        with file.open("wb") as out:
            out.write(_header(items))
            for item in items:
                tensor: Any = planner.resolve_data(item)
                out.write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
            out.flush()
            os.fsync(out.fileno())
        return [WriteResult(item.index, _bytes(item), storage_data=file.name) for item in items]


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, f"{item.index.fqn}: not a tensor"
    return item.tensor_data


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
