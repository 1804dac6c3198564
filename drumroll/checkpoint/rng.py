"""The random number generators of one process: python's, numpy's, torch's and, where it is used, the GPU's.

No draw that decides a number of drumroll's own comes from them (sampling is a hash of identities); a user's reward or engine may use them.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import torch

from drumroll.checkpoint.driver import check_names

Generators = dict[str, np.ndarray]
_GPU = "cuda"  # name of the generator that not every process has


def seed(value: int) -> None:
    """Start them all from `value`, any integer."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value % 2**63)  # the GPU's too


def capture() -> Generators:
    """Their states, as arrays."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=True)
    assert isinstance(legacy, tuple)
    found: Generators = {
        "python": np.array(words, np.uint32),
        "python_rest": np.array([version] if gauss is None else [version, gauss], np.float64),
        "numpy": np.asarray(legacy[1], np.uint32),
        "numpy_rest": np.array(legacy[2:], np.float64),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_initialized():
        found[_GPU] = torch.cuda.get_rng_state().numpy()
    return found


def restore(states: Generators, where: str) -> None:
    """Set them. Raises RunError when `states` has other names than `capture` gives here; `where`: in messages.

    Whether a process uses a GPU may change: a driver does where it has the only rank in itself.
    """
    check_names(set(capture()) - {_GPU}, set(states) - {_GPU}, where)
    rest = states["python_rest"].tolist()
    random.setstate((int(rest[0]), tuple(int(word) for word in states["python"]), rest[1] if len(rest) > 1 else None))
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    np.random.set_state(("MT19937", states["numpy"], int(position), int(has_gauss), gauss))
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    if _GPU in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.from_numpy(states[_GPU]))


def write(file: Path, states: Generators) -> None:
    with file.open("wb") as out:
        np.savez(out, allow_pickle=False, **states)
        out.flush()
        os.fsync(out.fileno())


def read(file: Path) -> Generators:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
