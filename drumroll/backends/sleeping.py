"""Memory that is not needed for a while: copied to the host, released on the device, brought back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from drumroll.errors import RunError


@dataclass(slots=True, frozen=True)
class _Asleep:
    host: torch.Tensor  # uint8, flat, pinned where the device is a GPU
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
        host = torch.empty(sum(size for _, size in sized), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        for (storage, _), part in zip(sized, _parts(host, sized), strict=True):
            part.copy_(_bytes(storage), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies read what is released next
        for storage, _ in sized:
            storage.resize_(0)
        self._asleep[kind] = _Asleep(host, sized)

    def wake(self) -> None:
        """Bring everything back."""
        for asleep in self._asleep.values():
            for (storage, size), part in zip(asleep.storages, _parts(asleep.host, asleep.storages), strict=True):
                storage.resize_(size)
                _bytes(storage).copy_(part, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies read host memory that is let go next
        self._asleep.clear()

    def require(self, verb: str, kinds: Iterable[str]) -> None:
        """Raises RunError when one of `kinds` sleeps."""
        if asleep := [kind for kind in kinds if kind in self._asleep]:
            raise RunError(f"{verb} needs {' and '.join(asleep)} on the device, but the backend sleeps: call wake() first")


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _parts(host: torch.Tensor, sized: list[tuple[torch.UntypedStorage, int]]) -> tuple[torch.Tensor, ...]:
    return host.split([size for _, size in sized]) if sized else ()
