"""Train a recorded step again from its stored token ids and log-probs, on any backend and any number of ranks, and compare.

Sampling plays no part: the batches are those of the record. So a difference here is the trainer's, and no difference here means that a
difference between two runs was the sampler's. Replay starts from the newest checkpoint before the step, or from the model that the run
started with, and trains the recorded batches in between.

[Note: how exact a KL is] The recorded KL is the mean of k3(d) = e^d - 1 - d over tokens. An error e in every log-prob, some 1e-7, changes
it by at most e * mean |k3'(d)|, and |k3'(d)| = |e^d - 1| <= k3(d) + sqrt(2 k3(d)) for every d: by at most e * (KL + sqrt(2 KL)) (Jensen).
Its difference is divided by that, so what is bounded is the error of the log-probs; relative to the KL itself, near 0, it has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drumroll.algorithms.presets import Algorithm, resolve
from drumroll.checkpoint.store import Checkpoint, CheckpointStore, step_of
from drumroll.config import RunConfig
from drumroll.errors import RunError, UserError
from drumroll.observe import batches, checks
from drumroll.observe.metrics import StepRecord, UpdateFacts, tokens_digest, update_facts
from drumroll.observe.run import read_steps
from drumroll.pipelines.recipe import read_of_run
from drumroll.pipelines.resume import CHECKPOINTS_DIR, start_model
from drumroll.pipelines.rl import total_optimizer_steps, update
from drumroll.pipelines.session import BATCHES_DIR
from drumroll.runtime.local import launch
from drumroll.runtime.plan import Plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec
from drumroll.types import StepStats

RELATIVE = 1e-5  # grad_norm, entropy, logprob_mean, loss_abs
LOSS_SCALE = 1e-6  # loss, in units of the mean |advantage|: its terms cancel, so a relative bound would mean nothing
COMPARED = ("loss_abs", "grad_norm", "entropy", "logprob_mean")


@dataclass(slots=True, frozen=True)
class Target:
    run_dir: Path
    step: int


@dataclass(slots=True, frozen=True)
class Replayed:
    facts: UpdateFacts
    redone: int  # optimizer steps trained again before those of the step itself
    start: int  # the step whose checkpoint it began from; 0: the model that the run started with

    def way(self) -> str:
        """How it came to the step, in words."""
        origin = f"the checkpoint of step {self.start}" if self.start else "the model that the run started with"
        if not self.redone:
            return f"0 updates redone: the step follows {origin}"
        count = f"{self.redone} update{'s' if self.redone > 1 else ''} redone since {origin}"
        return f"{count}; rounding adds up over them, and after a dozen may pass the bounds: checkpoint.every gives a nearer start"


def replay(run: str, overrides: Sequence[str], json: Path | None) -> bool:
    """`drumroll replay RUN@STEP [key=value ...]`: print recorded and replayed numbers; true when all agree.

    Raises UserError for a run, step or file that is not there.
    """
    run_dir, step, config = read_of_run(run, overrides)
    if not step:
        raise UserError(f"{run!r}: expected RUN@STEP, e.g. runs/quickstart@3")
    target = Target(run_dir, step)
    if config.algorithm is None:
        raise UserError(f"{target.run_dir}: replay trains RL steps again, and this run has none (pipeline: {config.pipeline})")
    recorded = _recorded(target)
    replayed = _train_again(target, config)
    rows = compare(recorded, replayed.facts, config)
    console = Console()
    console.print(f"{target.run_dir}, step {target.step}, on {config.backend.name} x {config.runtime.ranks}", markup=False, highlight=False)
    console.print(table(rows))
    console.print(replayed.way(), markup=False, highlight=False)
    if json is not None:
        checks.write_rows(json, rows)
    return all(row.passed for row in rows)


def compare(recorded: StepRecord, replayed: UpdateFacts, config: RunConfig) -> list[checks.CheckRow]:
    """A row a number: relative difference; for the loss over the mean |advantage|, for the KL see [Note: how exact a KL is]."""
    rows = []
    for name in COMPARED:
        before, now = getattr(recorded, name), getattr(replayed, name)
        if before is not None or now is not None:
            rows.append(_row(name, before, now, abs(before), RELATIVE, config))
    if recorded.kl is not None and replayed.kl is not None:
        rows.append(_row("kl", recorded.kl, replayed.kl, recorded.kl + math.sqrt(2 * recorded.kl), RELATIVE, config))
    rows.append(_row("loss", recorded.loss, replayed.loss, recorded.advantage_abs_mean or 1.0, LOSS_SCALE, config))
    return rows


def table(rows: Sequence[checks.CheckRow]) -> Table:
    """The rows with both numbers side by side, whole at 80 columns."""
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    grid.add_column("check", no_wrap=True)
    for name in ("recorded", "replayed", "difference", "at most"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("")
    for row in rows:
        numbers = (row.options["recorded"], row.options["replayed"], f"{row.value:.2g}", f"{row.tolerance:.0e}")
        grid.add_row(escape(row.check), *numbers, checks.verdict(row))
    return grid


def _row(name: str, before: float, now: float, scale: float, tolerance: float, config: RunConfig) -> checks.CheckRow:
    """`scale`: what the difference is divided by. Two NaNs are the same: no optimizer step was applied, then and now."""
    difference = 0.0 if math.isnan(before) and math.isnan(now) else abs(now - before) / max(scale, 1e-12)
    options = {"recorded": f"{before:.9g}", "replayed": f"{now:.9g}"}
    return checks.at_most(name, difference, tolerance, backend=config.backend.name, options=options, ranks=config.runtime.ranks)


def _train_again(target: Target, config: RunConfig) -> Replayed:
    assert config.algorithm is not None
    algorithm = resolve(config.algorithm, config.rollout.max_tokens)
    if not algorithm.trains_policy(target.step):
        raise UserError(
            f"{target.run_dir}: step {target.step} trained the critic alone, and replay trains the policy again; name one after step "
            f"{algorithm.critic.warmup_steps} (algorithm.critic.warmup_steps)"
        )
    folder = start_model(target.run_dir, config)
    before = _checkpoint_before(target, config)
    spec = WorkerSpec(config, folder, Plan(config.runtime.ranks, frozenset({"policy"})))
    with launch(partial(Worker, spec=spec), config.runtime.ranks, config.runtime.device, config.runtime.timeout_s) as ranks:
        policy = Policy(ranks, config, total_optimizer_steps(config, algorithm))
        start = redone = 0
        if before is not None:
            state = before.state()
            policy.restore(before, state, generators=False)
            start = state.step
        for step in range(start + 1, target.step):
            redone += len(_step_again(target, step, policy, algorithm))
        rate = policy.next_learning_rate
        updates = _step_again(target, target.step, policy, algorithm)
    return Replayed(update_facts(updates, rate), redone, start)


def _checkpoint_before(target: Target, config: RunConfig) -> Checkpoint | None:
    """The newest valid one of an earlier step; says which it passed over, and why."""
    store = CheckpointStore(target.run_dir / CHECKPOINTS_DIR, config.checkpoint)
    for path in reversed(store.paths()):
        if step_of(path) < target.step:
            try:
                return store.open(path)
            except RunError as error:
                print(f"skipped {path}: {error}")
    return None


def _step_again(target: Target, step: int, policy: Policy, algorithm: Algorithm) -> list[StepStats]:
    """None for a step that was the critic's alone. The policy needs no critic: its advantages are in the batch."""
    if not algorithm.trains_policy(step):
        return []
    return update(policy, batches.read(_batch_file(target.run_dir, step)), algorithm.loss(), algorithm)


def _recorded(target: Target) -> StepRecord:
    """The step's record. Raises UserError when it was not reached, or the batch is not the one that was recorded."""
    records = [r for r in read_steps(target.run_dir) if r.phase == "rl" and r.step == target.step]
    if not records:
        last = max((r.step for r in read_steps(target.run_dir) if r.phase == "rl"), default=0)
        raise UserError(f"{target.run_dir}: no RL step {target.step} in the records; the last one is {last}")
    digest = tokens_digest([s.token_ids.tolist() for s in batches.read(_batch_file(target.run_dir, target.step))])
    if digest != records[0].tokens_digest:
        raise UserError(
            f"{target.run_dir}: the stored batch of step {target.step} has digest {digest}, its record {records[0].tokens_digest}"
        )
    return records[0]


def _batch_file(run_dir: Path, step: int) -> Path:
    file = batches.path(run_dir / BATCHES_DIR, step)
    if not file.is_file():
        raise UserError(f"{file}: no such file; a run writes its batches when record.batches is true")
    return file
