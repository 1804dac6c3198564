"""Checkpoint directories of a run: `checkpoints/step-00000020/`, complete or not there at all.

A checkpoint is written under a staging name, described by `manifest.json` (name and size of every file, and the driver's state), and
renamed last. A directory without a valid manifest is never loaded; older ones are removed only when the new one is in place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from drumroll.errors import RunError

MANIFEST = "manifest.json"
STAGING = "staging-"


@dataclass(slots=True, frozen=True)
class DriverState:
    """What the driver must know to go on from here."""

    step: int  # RL or SFT steps completed
    applied_steps: int  # optimizer steps that were not skipped: the learning rate's argument
    version: int  # weight version


class CheckpointStore:
    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def write(self, state: DriverState, save: Callable[[Path], None]) -> Path:
        """`save(directory)` writes the ranks' parts; then the manifest, then the rename, then old checkpoints beyond `keep` go."""
        final = self._path(state.step)
        staging = self._folder / f"{STAGING}{state.step:08d}"
        shutil.rmtree(staging, ignore_errors=True)  # an earlier save that was killed
        staging.mkdir(parents=True)
        save(staging)
        files = {str(f.relative_to(staging)): f.stat().st_size for f in sorted(staging.rglob("*")) if f.is_file()}
        with (staging / MANIFEST).open("w", encoding="utf-8") as out:
            json.dump({"state": asdict(state), "files": files}, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        if final.exists():
            shutil.rmtree(final)
        staging.rename(final)
        for step in self.steps()[: -self._keep]:
            shutil.rmtree(self._path(step))
        return final

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending by number."""
        return sorted(int(p.name.removeprefix("step-")) for p in self._folder.glob("step-*") if (p / MANIFEST).is_file())

    def read(self, step: int) -> tuple[DriverState, Path]:
        """State and directory of a checkpoint. Raises RunError naming the file that is missing or cut."""
        path = self._path(step)
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, size in manifest["files"].items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                raise RunError(
                    f"{path / name}: expected {size} bytes, found {'no file' if found is None else found}; the checkpoint is damaged"
                )
        return DriverState(**manifest["state"]), path

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"
