"""Whether a run's checkpoints fit on its disk: asked before the first step, not met at the fifth save."""

from __future__ import annotations

import re
import shutil

from drumroll.checkpoint.identity import Fingerprint
from drumroll.checkpoint.retention import most_held
from drumroll.checkpoint.store import CheckpointStore, folder_is_writable
from drumroll.config import LoraConfig, RunConfig
from drumroll.errors import UserError

_PARAMETER, _MOMENTS = 4, 8  # bytes an element: float32, and at most two float32 moments of what trains


Critic = tuple[Fingerprint, tuple[str, ...]]  # its model, and the patterns of what trains of it


def checkpoint_bytes(config: RunConfig, model: Fingerprint, critic: Critic | None = None) -> int:
    """Most bytes of one checkpoint; of a model with adapters it holds these alone."""
    lora = config.model.lora
    policy = _bytes(model, config.model.trainable) if lora is None else (_PARAMETER + _MOMENTS) * _adapter_elements(lora, model)
    return policy + (_bytes(*critic) if critic is not None else 0)


def _bytes(model: Fingerprint, patterns: tuple[str, ...]) -> int:
    sizes = model.elements()
    trained = sum(size for name, size in sizes.items() if not patterns or any(re.search(pattern, name) for pattern in patterns))
    return _PARAMETER * sum(sizes.values()) + _MOMENTS * trained


def _adapter_elements(lora: LoraConfig, model: Fingerprint) -> int:
    """At most: of every matrix that `lora.targets` may mean, rank x (rows + columns)."""
    matrices = {name.removesuffix(".weight"): shape for name, shape in model.tensors.items() if len(shape) == 2}
    chosen = [shape for name, shape in matrices.items() if lora.targets == "all-linear" or name.endswith(tuple(lora.targets))]
    return lora.rank * sum(sum(shape) for shape in chosen)


def check_room(config: RunConfig, model: Fingerprint, store: CheckpointStore, critic: Critic | None = None) -> None:
    """Raises UserError when the disk cannot take the checkpoints that `checkpoint` keeps beside those that are there already."""
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir: cannot write into {store.folder}: {error}; name another directory, or free the disk") from error
    if not folder_is_writable(store.folder):
        raise UserError(f"run_dir: no permission to write into {store.folder}; name another directory, or change its permissions")
    one, held = checkpoint_bytes(config, model, critic), most_held(config)
    there = sum(file.stat().st_size for file in store.folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(store.folder).free
    if one * held > free + there:
        raise UserError(
            f"checkpoint: {held} checkpoints of {_gib(one)} each (with the one being written) need {_gib(one * held)} in {store.folder}, "
            f"and {_gib(free)} are free{f' beside {_gib(there)} of checkpoints' if there else ''}: "
            "lower checkpoint.keep, raise checkpoint.keep_every, free the disk, or name another run_dir"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
