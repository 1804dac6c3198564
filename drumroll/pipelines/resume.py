"""From which checkpoint a run goes on, and what it may promise when it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drumroll import config as configs
from drumroll.algorithms.presets import resolve
from drumroll.checkpoint.driver import DriverState, environment
from drumroll.checkpoint.identity import ELASTIC, FREE, Fingerprint, compare_configs, fingerprint, sample_weights
from drumroll.checkpoint.store import STEP, Checkpoint, CheckpointStore, Skipped, unheard
from drumroll.config import RunConfig, WarmupConfig
from drumroll.errors import RunError, UserError
from drumroll.models.locate import locate
from drumroll.observe.run import CONFIG_FILE, SUMMARY_FILE
from drumroll.observe.summary import read_summary
from drumroll.pipelines.critic import critic_start
from drumroll.runtime.local import resolve_device

CHECKPOINTS_DIR = "checkpoints"
START_FILE = "start.json"  # what the run began with


@dataclass(slots=True, frozen=True)
class Resumed:
    """A checkpoint that has been checked against this run."""

    checkpoint: Checkpoint
    state: DriverState
    folder: Path  # the model that the run started with: a frozen reference is still that one
    differences: list[str]  # of where and how it computes; none: what follows is exact
    skipped: list[Skipped]
    finished: bool  # the run had come to its end

    @property
    def exact(self) -> bool:
        return not self.differences

    def words(self) -> str:
        """What was skipped and why, where the run goes on, and the contract that it keeps."""
        lines = [f"skipped {one.path}: {one.reason}" for one in self.skipped]
        lines.append(f"resume: after step {self.state.step}, from {self.checkpoint.path}")
        if self.exact:
            lines.append("contract: exact (same ranks, backend, options, versions): what follows is bit-equal to a run that never stopped")
        else:
            lines.append(
                "contract: elastic: parameters and moments are bit-equal after loading, prompts and seeds stay the same; "
                f"the numbers that follow differ, because of {'; '.join(self.differences)}"
            )
        return "\n".join(lines)


def store_of(config: RunConfig, reached: Callable[[str], None] = unheard) -> CheckpointStore:
    """The checkpoints in a run's directory. `reached`: told each stage of a save."""
    return CheckpointStore(Path(config.run_dir) / CHECKPOINTS_DIR, config.checkpoint, reached)


def find(config: RunConfig, path: Path | None) -> Resumed | None:
    """The newest valid checkpoint of `run_dir`, or the one at `path`; None: there is none yet, and the run starts from the beginning.

    Raises UserError when all there are were refused, with the reason of each; for a `path`, when it is.
    """
    store = store_of(config)
    _check_run(config)
    if path is None or path.resolve() == Path(config.run_dir).resolve():
        if not store.paths():
            return None
        candidates = store.paths()[::-1]
    else:
        candidates = [_given(path, config, store)]
    skipped: list[Skipped] = []
    for candidate in candidates:
        try:
            return _resumed(store.open(candidate), config, skipped)
        except (RunError, UserError) as error:  # UserError: its config is of another version
            skipped.append(Skipped(candidate, str(error)))
    reasons = "\n".join(f"  {one.path}: {one.reason}" for one in skipped)
    raise UserError(f"--resume: nothing that this run can go on from:\n{reasons}\nwithout --resume it starts from the beginning")


def _check_run(config: RunConfig) -> None:
    """Raises UserError naming the keys in which this run's config differs from that of the run in `run_dir`."""
    file = Path(config.run_dir) / CONFIG_FILE
    if not file.is_file() or not file.stat().st_size:
        return
    found = compare_configs(configs.load(file), config).refused
    if found:
        raise UserError(
            f"--resume: {config.run_dir} is a run with another config: {'; '.join(found)}. Give the same values, or another run_dir for a "
            "new run; only these may change: " + ", ".join((*FREE, *ELASTIC))
        )


def _given(path: Path, config: RunConfig, store: CheckpointStore) -> Path:
    place = path.resolve()  # a link to a checkpoint is as good as its name
    if not place.is_dir() or not place.name.startswith(STEP):
        raise UserError(f"--resume {path}: expected the directory of a checkpoint, e.g. {store.folder}/{STEP}00000020")
    if place.parent != store.folder.resolve():
        raise UserError(
            f"--resume {path}: not a checkpoint of run_dir={config.run_dir}, where the run would go on; "
            f"name its run: run_dir={place.parent.parent}"
        )
    if store.folder / place.name not in store.paths():
        raise UserError(f"--resume {path}: no name of a checkpoint; there are {', '.join(p.name for p in store.paths()) or 'none'}")
    return store.folder / place.name


def _resumed(checkpoint: Checkpoint, config: RunConfig, skipped: list[Skipped]) -> Resumed:
    """Raises RunError naming what differs from this run's model and config."""
    saved, state = checkpoint.config(), checkpoint.state()
    found = compare_configs(saved, config)
    if found.refused:
        raise RunError(f"of a run with another config: {'; '.join(found.refused)}; give the same values, or another run_dir for a new run")
    folder = start_model(Path(config.run_dir), config)
    _check_reference(Path(config.run_dir), config, folder)
    checkpoint.check_model(fingerprint(folder), _critic(config, folder))
    now = environment(resolve_device(config.runtime.device, config.runtime.ranks))
    moved = [f"{key} {old} -> {now.get(key)}" for key, old in state.environment.items() if now.get(key) != old]
    summary = read_summary(Path(config.run_dir) / SUMMARY_FILE)
    finished = summary is not None and summary.status == "completed" and state.step >= config.max_steps
    return Resumed(checkpoint, state, folder, [*found.elastic, *moved], skipped, finished)


def _critic(config: RunConfig, policy: Path) -> Fingerprint | None:
    """Of the folder that a critic begins as, where the run has one; its tensors come from the checkpoint, and have to fit that model."""
    algorithm = resolve(config.algorithm, config.rollout.max_tokens) if config.algorithm is not None else None
    start = critic_start(config, algorithm, policy) if algorithm is not None else None
    return fingerprint(start.folder) if start is not None else None


def write_start(config: RunConfig, folder: Path, facts: Mapping[str, str]) -> None:
    """Write down which model a run starts from, and with what. `facts`: what numbers depend on beside the config."""
    weights = {"weights": sample_weights(folder)} if _holds_reference(config) else {}
    text = json.dumps({"model": str(folder.resolve()), **weights, **facts}, indent=1)
    (Path(config.run_dir) / START_FILE).write_text(text + "\n", encoding="utf-8")


def _holds_reference(config: RunConfig) -> bool:
    """Whether a resumed run loads the model that it started from again; that of adapters is known to the checkpoint by its digests."""
    if config.algorithm is None or config.model.lora is not None:
        return False
    return resolve(config.algorithm, config.rollout.max_tokens).needs_reference


def _start_facts(run_dir: Path) -> dict[str, str]:
    """Raises UserError for a file that is not whole."""
    file = run_dir / START_FILE
    if not file.is_file():
        return {}
    try:
        facts: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f'{file}: not whole: {error}; put back {{"model": FOLDER}}, the model that the run began with') from error
    return facts


def _check_reference(run_dir: Path, config: RunConfig, folder: Path) -> None:
    """Raises UserError when a frozen reference would be loaded from weights that are no longer those that the run started from."""
    before = _start_facts(run_dir).get("weights")
    if before is not None and _holds_reference(config) and sample_weights(folder) != before:
        raise UserError(
            f"{folder}: its weights changed since the run started from them, and the reference (algorithm.kl) is that model; put them back"
        )


def start_model(run_dir: Path, config: RunConfig) -> Path:
    """Folder of the model that a run started with, after its warm-up. Raises UserError when it is gone."""
    file, facts = run_dir / START_FILE, _start_facts(run_dir)
    folder = Path(facts["model"]) if "model" in facts else None
    if folder is not None and (folder / "config.json").is_file():
        return folder
    if isinstance(config.warmup, WarmupConfig):
        raise UserError(
            f"{folder or file}: the model that {run_dir} started from is gone; train the recipe again to make it, or restore the folder"
        )
    return locate(config.warmup or config.model.path)
