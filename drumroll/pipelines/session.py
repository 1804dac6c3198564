"""One run from its first to its last line: the run directory, the recorder, the clock, and a summary whatever happens."""

from __future__ import annotations

import itertools
import json
import platform
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import transformers

import drumroll
from drumroll import config as configs
from drumroll.checkpoint.store import CheckpointStore, DriverState
from drumroll.config import RunConfig, WarmupConfig
from drumroll.errors import UserError
from drumroll.observe.closing import closing
from drumroll.observe.console import console_sink
from drumroll.observe.metrics import StepPhase
from drumroll.observe.recorder import Recorder
from drumroll.observe.report import write_report
from drumroll.observe.run import CONFIG_FILE, SUMMARY_FILE, TENSORBOARD_DIR
from drumroll.observe.sinks import Sink, TensorBoardSink
from drumroll.observe.summary import Status, summarise, write_summary
from drumroll.observe.timer import PhaseTimer
from drumroll.runtime.policy import Policy

START_FILE = "start.json"  # what the run began with, for `drumroll replay`
MODEL_DIR = "model"  # with adapters: they are merged in
ADAPTER_DIR = "adapter"
BATCHES_DIR = "batches"
CHECKPOINTS_DIR = "checkpoints"


@dataclass(slots=True)
class Session:
    config: RunConfig
    run_dir: Path
    recorder: Recorder
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    peak_bytes_per_rank: list[int] = field(default_factory=list)
    pushes: int = 0
    pushes_matched: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.peak_bytes_per_rank, default=0)

    def start_from(self, folder: Path) -> None:
        """Record the model folder that the main phase starts from, and with what it runs."""
        facts = {
            "model": str(folder.resolve()),
            "drumroll": drumroll.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        (self.run_dir / START_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    def push(self, policy: Policy) -> None:
        """Weights to the engines; counted, so that the summary can say that every push arrived."""
        with self.timer.phase("sync"):
            report = policy.push()
        self.pushes += 1
        self.pushes_matched += report.matched == report.tensors

    def measure(self, policy: Policy) -> None:
        """Read the peak memory of every rank."""
        self.peak_bytes_per_rank = [held["peak"] for held in policy.memory()]

    def checkpoint(self, policy: Policy, step: int) -> None:
        """Write a checkpoint where the config asks for one after this step."""
        every = self.config.checkpoint.every
        if every and step % every == 0:
            store = CheckpointStore(self.run_dir / CHECKPOINTS_DIR, self.config.checkpoint.keep)
            self.recorder.sync()
            written = store.write(DriverState(step, policy.applied_steps, policy.version), policy.save)
            self.recorder.note(f"checkpoint {written}")

    def finish(self, policy: Policy) -> None:
        """Leave the trained model behind as a HF folder."""
        self.measure(policy)
        policy.export(self.run_dir / MODEL_DIR)
        self.recorder.note(f"model {self.run_dir / MODEL_DIR}")
        if self.config.model.lora is not None:
            policy.export_adapter(self.run_dir / ADAPTER_DIR)
            self.recorder.note(f"adapter {self.run_dir / ADAPTER_DIR}")


@contextmanager
def open_session(config: RunConfig) -> Iterator[Session]:
    """A new run directory with its recorder. However the block ends, records are closed and summary and report written."""
    run_dir = Path(config.run_dir)
    kept = _make_room(run_dir)
    configs.dump(config, run_dir / CONFIG_FILE)
    started = time.monotonic()
    sinks: list[Sink] = [console_sink(config.run_dir, _totals(config))]
    if config.record.tensorboard:
        sinks.append(TensorBoardSink(run_dir / TENSORBOARD_DIR))
    session = Session(config, run_dir, Recorder(run_dir, sinks, rollouts=config.record.rollouts))
    status: Status = "completed"
    error: str | None = None
    try:
        with _sigterm_as_interrupt():
            yield session
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except BaseException as caught:
        status, error = "failed", f"{type(caught).__name__}: {caught}".strip()
        raise
    finally:
        session.recorder.close()
        if status != "completed" and not session.recorder.records and not session.recorder.evals:
            _undo(run_dir, kept)
        else:
            _finish_records(session, status, error, time.monotonic() - started)


def _totals(config: RunConfig) -> dict[StepPhase, int]:
    """Steps of each phase, for the console's progress."""
    totals: dict[StepPhase, int] = {config.pipeline: config.max_steps}
    if isinstance(config.warmup, WarmupConfig):
        totals["sft"] = config.warmup.steps
    return totals


def _make_room(run_dir: Path) -> Path | None:
    """An empty directory at `run_dir`. A run that is there is kept under the next free name, `run_dir.1`, ..., which is returned."""
    kept: Path | None = None
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"run_dir: {run_dir} is a file; expected a directory or a name that is free")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        if not (run_dir / CONFIG_FILE).is_file():
            raise UserError(
                f"run_dir: {run_dir} holds files that are no run of drumroll; name an empty directory or one that does not exist"
            )
        kept = next(p for n in itertools.count(1) if not (p := run_dir.with_name(f"{run_dir.name}.{n}")).exists())
        run_dir.rename(kept)
        print(f"the run that was in {run_dir} is now in {kept}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / CONFIG_FILE).touch()
    except OSError as error:
        raise UserError(f"run_dir: cannot write into {run_dir}: {error}; name another directory, or free the disk") from error
    return kept


def _undo(run_dir: Path, kept: Path | None) -> None:
    """A run that ended before its first step leaves nothing, and puts back the run it displaced."""
    shutil.rmtree(run_dir)
    if kept is not None:
        kept.rename(run_dir)
        print(f"nothing was trained; the run that was in {run_dir} is there again")


def _finish_records(session: Session, status: Status, error: str | None, seconds: float) -> None:
    summary = summarise(
        status=status,
        records=session.recorder.records,
        evals=session.recorder.evals,
        weight_pushes=session.pushes,
        digests_matched=session.pushes_matched,
        wall_seconds=seconds,
        peak_bytes_per_rank=session.peak_bytes_per_rank,
        error=error,
    )
    write_summary(session.run_dir / SUMMARY_FILE, summary)
    write_report(session.run_dir)
    print(closing(summary, session.run_dir))


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A scheduler's SIGTERM ends a run the way Ctrl-C does: ranks closed, records whole, summary written."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
