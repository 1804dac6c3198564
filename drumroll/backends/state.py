"""Training state through torch.distributed.checkpoint, with the names compared: what was saved is what is restored.

Names: `model.<HF name>`, `optimizer.<HF name>.exp_avg`, `optimizer.<HF name>.exp_avg_sq`, `optimizer.step`. Of a model with adapters
these alone are saved; what they were trained on is known by `base.digests` and `base.scale`. DCP itself restores what the template asks
for and is silent about the rest of a checkpoint.

Files are safetensors, one a rank, each with the place of its shards in its header: DCP's own format keeps that in a pickle, and loading a
pickle runs whatever code it names.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from drumroll.backends.clip import local_part
from drumroll.backends.shards import Later, ShardWriter, made
from drumroll.errors import RunError

MODEL = "model."
OPTIMIZER = "optimizer."
BASE = "base."


def save(directory: Path, tensors: Mapping[str, torch.Tensor | Later]) -> None:
    """Write `tensors` (plain: the same on all ranks; DTensor: each rank its shard). Collective. Raises RunError when a disk refuses."""
    _write(directory, tensors, None)


class BackgroundSaver:
    """Saves on a thread of its own, from copies made at once: what is trained meanwhile does not get into them.

    Its collectives overlap with training's, so they have a process group to themselves. The copies' memory is kept from one save to the
    next, because filling fresh memory takes several times as long as copying into it, and training waits for that.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drumroll-save")
        self._group: dist.ProcessGroup | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._writing: Future[None] | None = None

    def start(self, directory: Path, tensors: Mapping[str, torch.Tensor | Later]) -> Future[None]:
        """As `save`, once the save before has ended; `tensors` may change when this returns. Collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        self.wait()
        for name, tensor in tensors.items():
            self._copy(name, made(tensor))  # no name for it here: what is made dies before the next is
        self._writing = self._thread.submit(_write, directory, self._copies, self._group)
        return self._writing

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._copies:
            local_part(self._copies[name]).copy_(local_part(tensor))
        else:
            self._copies[name] = tensor.detach().to("cpu", copy=True)

    def wait(self) -> None:
        """Until nothing is being written, whatever came of it."""
        if self._writing is not None:
            self._writing.exception()

    def held(self) -> list[torch.Tensor]:
        """The copies that lie here."""
        return [local_part(copy) for copy in self._copies.values()]

    def close(self) -> None:
        """Wait for the save under way and release the copies."""
        self._thread.shutdown()
        self._copies = {}


def _write(directory: Path, tensors: Mapping[str, torch.Tensor | Later], group: dist.ProcessGroup | None) -> None:
    later = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Later)}
    planned = {name: tensor.like if isinstance(tensor, Later) else tensor for name, tensor in tensors.items()}
    try:
        dcp.save(planned, storage_writer=ShardWriter(directory, later), process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RunError(
            f"{directory}: rank {rank} cannot write its part of the checkpoint: {type(cause).__name__}: {cause} ({_space(directory)}); "
            "free the disk, then resume the run from the checkpoint before"
        ) from error


def _space(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free / 2**30:.2f} GiB free there"
    except OSError as error:
        return f"its file system cannot be asked for its space: {error}"


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, in this process alone. Raises RunError for a folder that is none."""
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in _entries(directory).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # as it should be here
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return tensors


def load(directory: Path, tensors: Mapping[str, torch.Tensor], prefixes: tuple[str, ...]) -> None:
    """Restore `tensors` in place. Collective.

    Raises RunError when the names below `prefixes`, a shape or a dtype in the checkpoint differ from those of `tensors`, or a file
    cannot be read.
    """
    saved = _entries(directory)
    saved_names = {name for name in saved if name.startswith(prefixes)}
    if saved_names != set(tensors):
        missing, unexpected = sorted(set(tensors) - saved_names), sorted(saved_names - set(tensors))
        raise RunError(
            f"{directory}: names saved and restored differ: {_some(missing)} missing in the checkpoint, {_some(unexpected)} only in it; "
            "load it with the model and the trainable parameters it was saved with"
        )
    for name, tensor in tensors.items():
        _check_alike(directory, name, tensor, saved[name])
    try:
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(directory)))
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RunError(f"{directory}: rank {rank} cannot read its part of the checkpoint: {type(cause).__name__}: {cause}") from error


def _entries(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> what the headers of all files say together."""
    if not any(directory.glob("*.safetensors")):
        raise RunError(f"{directory}: not a checkpoint, it holds no *.safetensors")
    found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def _check_alike(directory: Path, name: str, tensor: torch.Tensor, saved: TensorStorageMetadata) -> None:
    if saved.size != tensor.shape or saved.properties.dtype != tensor.dtype:
        raise RunError(
            f"{directory}: {name} is saved as {saved.properties.dtype} {tuple(saved.size)}, expected {tensor.dtype} {tuple(tensor.shape)}"
        )


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "none"
