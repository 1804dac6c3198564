"""A recipe as the commands take it, refused for everything that can be said of it before torch is imported: that takes seconds.

What is left for later needs the model, the ranks or every row: lengths, the vocabulary, the rows of a file. Values of a plug-in's options
are checked last, since the plug-in is imported for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from drumroll import config, plugins
from drumroll.algorithms import presets
from drumroll.config import RunConfig, SourceConfig, WarmupConfig
from drumroll.data.sources import check_source
from drumroll.errors import UserError
from drumroll.observe.run import CONFIG_FILE
from drumroll.rewards import lookup

# What is read beside the recipe: by a training run all of it, by one that goes on rows and rewards (where its warmed-up model is, nothing
# that made it has to be), by an evaluation the model, its rows and rewards, by `plan` or `verify` nothing.
Purpose = Literal["train", "resume", "eval", "look"]


def read(path: Path, overrides: Sequence[str] = (), purpose: Purpose = "look") -> RunConfig:
    """Load a recipe and check it. Raises UserError naming the key or the file, what was expected and what was got."""
    run = config.load(path, overrides)
    if run.algorithm is not None:
        presets.resolve(run.algorithm, run.rollout.max_tokens)
    for where, folder in _folders(run, purpose):
        if folder.startswith((".", "/", "~")) and not Path(folder).expanduser().is_dir():
            raise UserError(f"{where}: no such folder: {folder} (from {Path.cwd()})")
    for where, source in _sources(run, purpose):
        check_source(source, where)
    for reward in run.rewards if purpose != "look" else ():
        lookup.check(reward.fn, reward.args)
        lookup.resolve(reward.fn, reward.args)
    plugins.check(run, str(path))
    return run


def read_of_run(name: str, overrides: Sequence[str] = ()) -> tuple[Path, int | None, RunConfig]:
    """Directory, step and config of what `RUN` or `RUN@STEP` names. Raises UserError where there is no run."""
    folder, at, step = name.rpartition("@")
    if at and not step.isdecimal():
        raise UserError(f"{name!r}: expected RUN@STEP, e.g. runs/quickstart@3")
    run_dir = Path(folder if at else name)
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"{run_dir}: not the directory of a run: no {CONFIG_FILE} in it")
    return run_dir, int(step) if at else None, read(file, overrides)


def _folders(run: RunConfig, purpose: Purpose) -> Iterator[tuple[str, str]]:
    """What may be folders of models; whether one is that of a model is seen when it is loaded."""
    if purpose in ("train", "eval"):
        yield "model.path", run.model.path
        if isinstance(run.warmup, str):
            yield "warmup", run.warmup
    if purpose == "train" and run.algorithm is not None and run.algorithm.critic is not None and run.algorithm.critic.path is not None:
        yield "algorithm.critic.path", run.algorithm.critic.path


def _sources(run: RunConfig, purpose: Purpose) -> Iterator[tuple[str, SourceConfig]]:
    if purpose in ("train", "resume"):
        yield "data.train", run.data.train
    if purpose == "train" and isinstance(run.warmup, WarmupConfig) and run.warmup.data is not None:
        yield "warmup.data", run.warmup.data
    if purpose != "look" and run.data.eval is not None:
        yield "data.eval", run.data.eval
