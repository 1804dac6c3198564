"""Memory that is not needed for a while: copied to the host, released on the device, brought back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from drumroll.errors import RunError

_CHUNK_BYTES = 1 << 28  # of host memory taken at a time: torch rounds pinned memory up to a power of two, which this is


@dataclass(slots=True, frozen=True)
class _Asleep:
    host: list[torch.Tensor]  # uint8, chunks of a whole, pinned where the device is a GPU
    storages: list[tuple[torch.UntypedStorage, int]]  # and the bytes that each had, in the order of `host`


class Sleeper:
    """Tensors by kind. Their storages are emptied and filled in place, so that every view of them stays valid."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asleep: dict[str, _Asleep] = {}

    @property
    def asleep(self) -> frozenset[str]:
        """The kinds that sleep."""
        return frozenset(self._asleep)

    def sleep(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Release the storages of `tensors` that lie on the device. Nothing to do for a kind that sleeps already."""
        if kind in self._asleep:
            return
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == self._device and storage.nbytes():
                storages[storage.data_ptr()] = storage
        sized = [(storage, storage.nbytes()) for storage in storages.values()]
        host = _host(sum(size for _, size in sized), self._device.type == "cuda")
        for here, there in _parts(sized, host):
            there.copy_(here, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies read what is released next
        for storage, _ in sized:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what torch's allocator keeps is nobody else's: vLLM takes its memory from the driver
        self._asleep[kind] = _Asleep(host, sized)

    def wake(self) -> None:
        """Bring everything back."""
        for asleep in self._asleep.values():
            for storage, size in asleep.storages:
                storage.resize_(size)
            for here, there in _parts(asleep.storages, asleep.host):
                here.copy_(there, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies read host memory that is let go next
        self._asleep.clear()

    def require(self, verb: str, kinds: Iterable[str]) -> None:
        """Raises RunError when one of `kinds` sleeps."""
        if asleep := [kind for kind in kinds if kind in self._asleep]:
            raise RunError(f"{verb} needs {' and '.join(asleep)} on the device, but the backend sleeps: call wake() first")


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host(size: int, pinned: bool) -> list[torch.Tensor]:
    """`size` bytes of host memory, in chunks."""
    return [
        torch.empty(min(_CHUNK_BYTES, size - start), dtype=torch.uint8, pin_memory=pinned) for start in range(0, size, _CHUNK_BYTES)
    ]


def _parts(storages: Iterable[tuple[torch.UntypedStorage, int]], host: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of the storages, end to end, each run of them beside its place in `host`."""
    place = 0
    for storage, size in storages:
        held, start = _bytes(storage), 0
        while start < size:
            chunk, offset = divmod(place, _CHUNK_BYTES)
            length = min(size - start, _CHUNK_BYTES - offset)
            yield held[start : start + length], host[chunk][offset : offset + length]
            start, place = start + length, place + length
