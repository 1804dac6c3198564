"""Tensors that are alive in a process, by their storages."""

from __future__ import annotations

import gc
import time

import torch
from torch.distributed.tensor import DTensor

SETTLING, SETTLING_S = 10, 1.0  # looks, and seconds that they take together


def live_bytes(device: torch.device) -> int:
    """Bytes of the storages of all tensors on `device` that Python has made since `gc.freeze`, each storage once."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor)]
    tensors = [*found, *(tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None)]
    storages = {}
    for tensor in tensors:
        if tensor.device == device and not isinstance(tensor, DTensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def settled_bytes(device: torch.device) -> int:
    """`live_bytes` once they stop falling: a collective's own thread lets go of its tensors a moment after it is done."""
    left = live_bytes(device)
    for _ in range(SETTLING):
        if not left:
            break
        time.sleep(SETTLING_S / SETTLING)
        left = live_bytes(device)
    return left
