"""Whether a checkpoint belongs to this run: its model and config, compared name by name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drumroll.config import RunConfig
from drumroll.errors import RunError
from drumroll.models.stream import tensor_files

# Keys that a resumed run may change without any effect on its numbers,
FREE = ("run_dir", "checkpoint", "record", "eval", "runtime.timeout_s", "runtime.max_restarts", "optim.max_skips")
# and those that change where and how it computes: the same prompts and seeds, but other rounding (and, by a schedule, learning rates).
ELASTIC = (
    "runtime",
    "backend",
    "engine",
    "max_steps",
    "train.micro_batch_tokens",
    "model.dtype",
    "model.layout",
    "model.share_prompts",
    "model.attention",
    "model.checkpointing",
    "model.compile",
    "model.tile_mlp",
    "optim.offload",
)
_PIECES, _PIECE_BYTES = 64, 4096
_NOT_THE_MODEL = {"_name_or_path", "transformers_version"}  # keys of config.json


@dataclass(slots=True, frozen=True)
class ConfigDifferences:
    refused: list[str]  # "optim.lr 0.001 -> 0.002"
    elastic: list[str]


def compare_configs(saved: RunConfig, now: RunConfig) -> ConfigDifferences:
    """What differs, except in FREE keys."""
    before, after = dict(_flat(saved.model_dump(mode="json"))), dict(_flat(now.model_dump(mode="json")))
    keys = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key) and not _below(key, FREE)]
    if saved.optim.schedule == "constant":
        keys = [key for key in keys if key != "max_steps"]  # the learning rate does not depend on it
    words = {key: f"{key} {_shown(before.get(key))} -> {_shown(after.get(key))}" for key in keys}
    if "max_steps" in words:
        words["max_steps"] += f" (optim.schedule={saved.optim.schedule} is laid over them)"
    elastic = {key for key in keys if _below(key, ELASTIC)}
    return ConfigDifferences([words[key] for key in keys if key not in elastic], [words[key] for key in keys if key in elastic])


def _below(key: str, parents: tuple[str, ...]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key -> value; a list is one value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, Mapping):
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    text = "null" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(slots=True, frozen=True)
class Fingerprint:
    """Of a model: its config.json, and the names and shapes of its tensors."""

    config: dict[str, Any]
    tensors: dict[str, list[int]]

    def elements(self) -> dict[str, int]:
        """Tensor name -> number of its elements."""
        return {name: math.prod(shape) for name, shape in self.tensors.items()}


def fingerprint(folder: Path) -> Fingerprint:
    """Of a HF model folder; no tensor is read. Raises UserError for a folder without tensors."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = tensor_files(folder)
    shapes: dict[str, list[int]] = {}
    for file in sorted(set(names.values())):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
    return Fingerprint({key: value for key, value in config.items() if key not in _NOT_THE_MODEL}, dict(sorted(shapes.items())))


def sample_weights(folder: Path) -> str:
    """A digest of pieces of every weight file of a HF model folder: training changes all of a model, so pieces tell one from another.

    At most 64 pieces of 4 KiB a file, evenly spread, and its size: as quick for a large model as for a small one.
    """
    digest = hashlib.sha256()
    for file in sorted(set(tensor_files(folder).values())):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for piece in range(_PIECES):
                content.seek(size * piece // _PIECES)
                digest.update(content.read(_PIECE_BYTES))
    return digest.hexdigest()


def dump(model: Fingerprint) -> str:
    """As JSON."""
    return json.dumps({"config": model.config, "tensors": model.tensors}, indent=1) + "\n"


def check_model(file: Path, now: Fingerprint) -> None:
    """Raises RunError naming what differs between a model of a checkpoint, as `dump` wrote it, and this run's."""
    row = json.loads(file.read_text(encoding="utf-8"))
    saved = Fingerprint(row["config"], row["tensors"])
    found = [
        f"config.json {key}: {_shown(saved.config.get(key))} -> {_shown(now.config.get(key))}"
        for key in dict.fromkeys((*saved.config, *now.config))
        if saved.config.get(key) != now.config.get(key)
    ]
    found += [
        f"{name}: {saved.tensors.get(name, 'absent')} -> {now.tensors.get(name, 'absent')}"
        for name in dict.fromkeys((*saved.tensors, *now.tensors))
        if saved.tensors.get(name) != now.tensors.get(name)
    ]
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise RunError(f"{file.parent}: of another {file.stem}: {'; '.join(found[:5])}{more}")
