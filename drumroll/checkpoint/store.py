"""The checkpoints of a run: `checkpoints/step-00000020/`, complete or not there at all. docs/design/checkpoints.md tells the order.

A checkpoint is drafted under a staging name on the same file system, described by its manifest, put on the disk, and renamed last. Older
ones are removed only when the new one is in place.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drumroll import config as configs
from drumroll.checkpoint import driver, identity, manifest, retention, rng
from drumroll.checkpoint.driver import DriverState
from drumroll.checkpoint.identity import Fingerprint
from drumroll.checkpoint.manifest import Damaged
from drumroll.config import CheckpointConfig, RunConfig
from drumroll.errors import RunError

STEP = "step-"
STAGING = "staging-"  # a save under way, or what a killed one left
ABANDONED = "abandoned-"  # a step that a resumed run will do again; removed with its next save

_STEP_NAME = re.compile(f"{STEP}[0-9]+")

DRIVER_FILE = "driver.json"
CONFIG_FILE = "config.yaml"
MODEL_FILE, CRITIC_FILE = "model.json", "critic.json"


def unheard(stage: str) -> None:
    """Nobody listens to the stages of a save."""


class CannotWrite(RunError):
    """A disk refuses a checkpoint; the run itself is whole. The message names the file or directory and the space that is left."""


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """A directory that has been checked, or is being written."""

    path: Path

    @property
    def tensors(self) -> Path:
        """Parameters and optimizer state, for torch.distributed.checkpoint."""
        return self.path / "state"

    @property
    def critic(self) -> Path:
        """The same of a critic; there only if a run has one."""
        return self.path / "critic"

    def state(self) -> DriverState:
        """Raises RunError when its names are not those of today."""
        return driver.load(self.path / DRIVER_FILE)

    def config(self) -> RunConfig:
        return configs.load(self.path / CONFIG_FILE)

    def generators(self, rank: int | None) -> Path:
        """The random number generators of a rank; None: of the driver."""
        return self.path / "rng" / ("driver.npz" if rank is None else f"rank-{rank:05d}.npz")

    def check_model(self, model: Fingerprint, critic: Fingerprint | None = None) -> None:
        """Raises RunError naming what differs: of the policy, or of a critic, which older checkpoints do not tell."""
        identity.check_model(self.path / MODEL_FILE, model)
        if critic is not None and (self.path / CRITIC_FILE).is_file():
            identity.check_model(self.path / CRITIC_FILE, critic)


@dataclass(slots=True, frozen=True)
class Skipped:
    path: Path
    reason: str


@dataclass(slots=True, frozen=True)
class CheckpointStore:
    """All checkpoints of a run. Picklable: the draft is made by the driver and committed by a rank."""

    folder: Path
    retention: CheckpointConfig
    reached: Callable[[str], None] = field(default=unheard)  # told each stage of a save, where it happens; for tests

    def draft(
        self,
        state: DriverState,
        config: RunConfig,
        model: Fingerprint,
        generators: rng.Generators,
        of_ranks: Sequence[rng.Generators],
        critic: Fingerprint | None = None,
    ) -> Checkpoint:
        """A staging directory with everything but the ranks' tensors; these are added, then comes `commit`. Raises CannotWrite.

        `generators`: the driver's; `of_ranks`: one entry a rank; `critic`: of the folder that a critic began as.
        """
        made = Checkpoint(self.folder / f"{STAGING}{state.step:08d}")
        try:
            shutil.rmtree(made.path, ignore_errors=True)
            made.tensors.mkdir(parents=True)
            made.generators(None).parent.mkdir()
            rng.write(made.generators(None), generators)
            for rank, states in enumerate(of_ranks):
                rng.write(made.generators(rank), states)
            (made.path / DRIVER_FILE).write_text(driver.dump(state), encoding="utf-8")
            (made.path / MODEL_FILE).write_text(identity.dump(model), encoding="utf-8")
            if critic is not None:
                (made.path / CRITIC_FILE).write_text(identity.dump(critic), encoding="utf-8")
            configs.dump(config, made.path / CONFIG_FILE)
        except OSError as error:
            raise cannot_write(made.path, error) from error
        self.reached("drafted")
        return made

    def discard(self, step: int) -> None:
        """Remove what a save of `step` that failed has written."""
        shutil.rmtree(self.folder / f"{STAGING}{step:08d}", ignore_errors=True)

    def commit(self, draft: Checkpoint) -> Path:
        """Make a draft with all its parts a checkpoint, then remove those that it replaces. Raises CannotWrite."""
        self.reached("written")
        final = self.folder / draft.path.name.replace(STAGING, STEP)
        try:
            manifest.write(draft.path)
            self.reached("described")
            if final.exists():  # a damaged one: a valid one of this step would not be written again
                self._abandon(final)
            draft.path.rename(final)
            manifest.sync_folder(self.folder)
        except OSError as error:
            raise cannot_write(draft.path, error) from error
        self.reached("renamed")
        self._rotate(final)
        self.reached("rotated")
        return final

    def _rotate(self, written: Path) -> None:
        """Older valid checkpoints that the config does not keep go, and what a resumed run has abandoned.

        One that cannot go (somebody reads it on a network disk, or has removed it already) is no fault of the one just written: the next
        save tries again, and `left_over` names it until then.
        """
        metrics: dict[int, dict[str, float]] = {}
        for path in self.paths():
            if step_of(path) <= step_of(written) and (path / manifest.NAME).is_file():
                with contextlib.suppress(RunError):  # of another version: not ours to count or to remove
                    metrics[step_of(path)] = Checkpoint(path).state().metrics
        for step in metrics.keys() - retention.kept(metrics, self.retention):
            with contextlib.suppress(OSError):
                self._abandon(self.folder / name_of(step))  # first under another name: a removal that is killed leaves no half
        for path in self.left_over():
            with contextlib.suppress(OSError):
                _delete(path)

    def left_over(self) -> list[Path]:
        """What is to be removed, and still there."""
        return sorted(self.folder.glob(f"{ABANDONED}*"))

    def _abandon(self, path: Path) -> Path:
        aside = path.with_name(ABANDONED + path.name)
        if aside.exists():
            _delete(aside)
        return path.rename(aside)

    def paths(self) -> list[Path]:
        """Directories named as checkpoints, valid or not, by ascending step."""
        found = (path for path in self.folder.glob(f"{STEP}*") if path.is_dir() and _STEP_NAME.fullmatch(path.name))
        return sorted((path for path in found if path.name == name_of(step_of(path))), key=step_of)

    def open(self, path: Path) -> Checkpoint:
        """Raises Damaged naming the file that is missing, cut or changed, RunError for names of another version."""
        manifest.check(path)
        checkpoint = Checkpoint(path)
        if checkpoint.state().step != step_of(path):
            raise Damaged(f"{path}: holds step {checkpoint.state().step}; it was renamed")
        return checkpoint

    def go_on_from(self, step: int) -> list[Path]:
        """Put everything later than `step` aside, remove what killed saves left; returns what was put aside. Raises RunError."""
        try:
            for path in self.folder.glob(f"{STAGING}*"):
                shutil.rmtree(path)
            return [self._abandon(path) for path in self.paths() if step_of(path) > step]
        except OSError as error:
            raise RunError(f"{self.folder}: cannot put aside what is later than step {step}: {error}; see to its permissions") from error


def _delete(path: Path) -> None:
    """A directory, or a link to one that somebody has put in its place: that one stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def name_of(step: int) -> str:
    """The directory of a step."""
    return f"{STEP}{step:08d}"


def step_of(path: Path) -> int:
    """The step that a directory's name says."""
    return int(path.name.removeprefix(STEP))


def cannot_write(path: Path, error: OSError) -> CannotWrite:
    """What to say of a disk that refuses."""
    try:
        free = f"{shutil.disk_usage(path.parent).free / 2**30:.2f} GiB free"
    except OSError:
        free = "its file system cannot be asked for its space"
    return CannotWrite(f"{path}: cannot write the checkpoint: {error.strerror or error} ({free}); free the disk, then resume the run")


def folder_is_writable(folder: Path) -> bool:
    """Whether this process may write there; the folder exists."""
    return os.access(folder, os.W_OK | os.X_OK)
