"""One run from its first to its last line: the run directory, the recorder, the clock, and a summary whatever happens."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from drumroll import config as configs
from drumroll.backends.base import KINDS
from drumroll.checkpoint import rng
from drumroll.checkpoint.driver import DriverState, environment
from drumroll.checkpoint.identity import fingerprint
from drumroll.checkpoint.retention import check_metric
from drumroll.checkpoint.store import unheard
from drumroll.config import RunConfig, WarmupConfig
from drumroll.data.stream import Cursor
from drumroll.errors import RunError, UserError
from drumroll.observe.closing import closing
from drumroll.observe.console import console_sink
from drumroll.observe.foreseen import Foreseen, beside, size
from drumroll.observe.metrics import DigestRecord, StepPhase
from drumroll.observe.recorder import Recorder
from drumroll.observe.report import write_report
from drumroll.observe.run import CONFIG_FILE, STACKS_FILE, SUMMARY_FILE, TENSORBOARD_DIR
from drumroll.observe.sinks import TensorBoardSink, scalars
from drumroll.observe.summary import Status, summarise, write_summary
from drumroll.observe.timer import PhaseTimer
from drumroll.pipelines.export import check
from drumroll.pipelines.resume import Resumed, store_of, write_start
from drumroll.pipelines.room import check_room
from drumroll.pipelines.run_dir import claim, make_room, undo
from drumroll.pipelines.saving import Boundary, Saver
from drumroll.pipelines.signals import Signals
from drumroll.planner.forecast import Forecast, forecast
from drumroll.rewards.failure import RewardFailure
from drumroll.runtime.failure import RankFailure
from drumroll.runtime.local import resolve_device
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import CriticStart

MODEL_DIR = "model"  # with adapters: they are merged in
ADAPTER_DIR = "adapter"
BATCHES_DIR = "batches"


class Stream(Protocol):
    """Where the training data comes from, as a checkpoint sees it."""

    def state(self) -> Cursor: ...

    def restore(self, cursor: Cursor) -> None: ...


@dataclass(slots=True)
class Session:
    config: RunConfig
    run_dir: Path
    recorder: Recorder
    signals: Signals
    resumed: Resumed | None = None
    restart: str = ""  # of the ranks, and why
    reached: Callable[[str], None] = unheard  # told each stage of a save
    begun: bool = False  # something of a resumed run's directory has been changed
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    peak_bytes_per_rank: list[int] = field(default_factory=list)
    state_bytes_per_rank: list[int] = field(default_factory=list)
    folder: Path | None = None  # of the model that the main phase starts from
    plan: Forecast | None = None  # None: nothing could be foreseen
    foreseen: Foreseen | None = None  # of memory; with what the processes hold besides once they have been measured
    pushes: int = 0
    pushes_matched: int = 0
    saver: Saver | None = None  # None: the config asks for no checkpoints
    _boundary: Boundary | None = None  # after the last whole step
    _started: float = field(default_factory=time.monotonic)

    @property
    def peak_bytes(self) -> int:
        return max(self.peak_bytes_per_rank, default=0)

    @property
    def seconds(self) -> float:
        """Wall clock of the run, that of before a resume included."""
        before = self.resumed.state.seconds if self.resumed is not None else 0.0
        return before + time.monotonic() - self._started

    def start_from(self, folder: Path, critic: CriticStart | None = None) -> None:
        """Record the model folder that the main phase starts from, and with what it runs. Raises UserError for a disk that is too small."""
        self.folder = folder
        if self.config.checkpoint.every:
            model, store = fingerprint(folder), store_of(self.config, self.reached)
            check_metric(self.config)
            beside = fingerprint(critic.folder) if critic is not None else None
            check_room(self.config, model, store, (beside, critic.trainable) if beside is not None and critic is not None else None)
            self.saver = Saver(self.config, store, model, self.recorder, beside)
        self.plan = self._foresee(folder)
        if self.resumed is None:
            write_start(self.config, folder, environment(self._device))

    @property
    def _device(self) -> str:
        return resolve_device(self.config.runtime.device, self.config.runtime.ranks)

    def begin(self, policy: Policy, stream: Stream) -> int:
        """The first step to do. A resumed run stands afterwards where its checkpoint stood: ranks, data, records."""
        if self.resumed is None:
            rng.seed(self.config.seed)  # for a user's rewards: nothing of ours draws from them
            self._record_digests(policy, 0)
            self._note_restart()
            return 1
        checkpoint, state = self.resumed.checkpoint, self.resumed.state
        policy.restore(checkpoint, state, generators=self.resumed.exact)
        stream.restore(state.cursor)
        self._rewind(state)
        self._note_restart()
        if self.resumed.exact:
            rng.restore(rng.read(checkpoint.generators(None)), str(checkpoint.generators(None)))
        return state.step + 1

    def _note_restart(self) -> None:
        if self.restart:
            self.recorder.event("restart", self.restart)

    def _rewind(self, state: DriverState) -> None:
        """What the directory holds of later steps is put aside or cut away: they will be done again."""
        self.begun = True
        for path in store_of(self.config).go_on_from(state.step):
            self.recorder.note(f"later than the checkpoint, kept until the next one is written: {path}")
        self.recorder.cut_back(state.records)
        (self.run_dir / SUMMARY_FILE).unlink(missing_ok=True)
        configs.dump(self.config, self.run_dir / CONFIG_FILE)
        shutil.rmtree(self.run_dir / TENSORBOARD_DIR, ignore_errors=True)  # made again from the records
        self.attach_tensorboard()
        self.pushes, self.pushes_matched = state.pushes, state.pushes_matched
        if self.saver is not None:
            self.saver.last = state.step

    def attach_tensorboard(self) -> None:
        if self.config.record.tensorboard:
            self.recorder.attach("TensorBoard", lambda: TensorBoardSink(self.run_dir / TENSORBOARD_DIR))

    def push(self, policy: Policy) -> None:
        """Weights to the engines; counted, so that the summary can say that every push arrived."""
        with self.timer.phase("sync"):
            report = policy.push()
        self.pushes += 1
        self.pushes_matched += report.matched == report.tensors

    def _foresee(self, folder: Path) -> Forecast | None:
        """None, and a note, where the backend or the model cannot be foreseen."""
        try:
            plan = forecast(self.config, folder)
        except UserError as error:
            self.recorder.note(f"memory cannot be foreseen: {error}")
            return None
        longest = f"for sequences of {self.config.max_length} tokens (data.max_prompt_tokens + rollout.max_tokens)"
        self.recorder.note(f"memory foreseen: {size(plan.peak.total)} a rank at most, in {plan.peak.name}, {longest}")
        return plan

    def measure(self, policy: Policy) -> None:
        """Read the memory of every rank; the first time, show it beside what was foreseen."""
        first = not self.peak_bytes_per_rank
        by_rank = policy.memory()
        self.peak_bytes_per_rank = [held["peak"] for held in by_rank]
        self.state_bytes_per_rank = [sum(held[kind] for kind in KINDS) + held.get("critic", 0) for held in by_rank]
        if first and self.plan is not None:
            process = max(held["process"] for held in by_rank) if self.plan.device == "cpu" else 0
            self.foreseen = Foreseen(self.plan.between, self.plan.peak.total + process, process)
            self.recorder.note(beside(self.foreseen, self.state_bytes_per_rank, self.peak_bytes_per_rank))

    def training(self) -> AbstractContextManager[None]:
        """Around the loop: where there are checkpoints, a first Ctrl-C or SIGTERM saves what is done and then ends the run."""
        return self.signals.deferred() if self.saver is not None else nullcontext()

    def after_step(self, policy: Policy, step: int, stream: Stream) -> None:
        """Metrics of `step` are recorded: record the weights and save a checkpoint where the config asks for it."""
        self._record_digests(policy, step)
        if self.saver is not None:
            self._boundary = Boundary(self._state(policy, step, stream.state()), rng.capture(), policy.generators())
            if self.saver.due(step):
                self.recorder.sync()
            self.saver.after_step(policy, self._boundary)
            self.leave_if_asked(policy)

    def _record_digests(self, policy: Policy, step: int) -> None:
        every = self.config.record.digests
        if every and (step % every == 0 or step == self.config.max_steps):
            digests = {name: f"{value:016x}" for name, value in policy.digests().items()}
            self.recorder.digests(DigestRecord(step=step, digests=digests))

    def leave_if_asked(self, policy: Policy) -> None:
        """Where a signal has asked for it: save the last whole step, whose parameters `policy` must still have, and end the run.

        Raises KeyboardInterrupt.
        """
        if not self.signals.requested or self.saver is None:
            return
        if self._boundary is not None:
            self.recorder.sync()
            self.saver.save(policy, self._boundary)
        self.saver.hear(policy, wait=True)
        done = self.saver.last
        self.recorder.note(f"--resume goes on after step {done}" if done else "stopped before the first step was done; nothing is saved")
        raise KeyboardInterrupt

    def _state(self, policy: Policy, step: int, cursor: Cursor) -> DriverState:
        """The driver's state after `step`."""
        record = self.recorder.records[-1]
        metrics = {f"{record.phase}/{name}": value for name, value in scalars(record)}
        if self.recorder.evals and self.recorder.evals[-1].step == step:
            metrics |= {f"eval/{name}": value for name, value in scalars(self.recorder.evals[-1])}
        return DriverState(
            step=step,
            applied_steps=policy.applied_steps,
            skips_in_a_row=policy.skips_in_a_row,
            version=policy.version,
            cursor=cursor,
            critic_applied_steps=policy.critic.applied_steps if policy.critic is not None else 0,
            critic_skips_in_a_row=policy.critic.skips_in_a_row if policy.critic is not None else 0,
            records=self.recorder.sizes(),
            pushes=self.pushes,
            pushes_matched=self.pushes_matched,
            seconds=self.seconds,
            metrics=metrics,
            environment=environment(self._device),
        )

    def finish(self, policy: Policy) -> None:
        """Leave the trained model behind as a HF folder. Raises RunError when the last checkpoint could not be written."""
        self.leave_if_asked(policy)  # by a signal since the last step was done
        if self.saver is not None:
            self.saver.hear(policy, wait=True)
        self.measure(policy)
        model, adapter = self.run_dir / MODEL_DIR, self.run_dir / ADAPTER_DIR
        policy.export(model)
        self.recorder.note(f"model {model} ({check(model, policy, self.config)})")
        if self.config.model.lora is not None:
            assert self.folder is not None, "start_from comes first"
            policy.export_adapter(adapter)
            self.recorder.note(f"adapter {adapter} ({check(self.folder, policy, self.config, adapter=adapter)})")


@contextmanager
def open_session(
    config: RunConfig, resumed: Resumed | None = None, restart: str = "", reached: Callable[[str], None] = unheard
) -> Iterator[Session]:
    """A run directory, new or that of the resumed run, with its recorder. `restart`, `reached`: see Session.

    However the block ends, records are closed and summary and report written; but a run that did not come to its first step leaves
    everything as it was.
    """
    run_dir = Path(config.run_dir)
    held, kept = make_room(run_dir) if resumed is None else (claim(run_dir), None)
    with held:
        session = _open(config, resumed, restart, reached)
        with _watched(session, kept):
            yield session


def _open(config: RunConfig, resumed: Resumed | None, restart: str, reached: Callable[[str], None]) -> Session:
    """Raises UserError for a directory that cannot be written into."""
    run_dir = Path(config.run_dir)
    sinks = [console_sink(config.run_dir, _totals(config))]
    try:
        recorder = Recorder(run_dir, sinks, rollouts=config.record.rollouts, digests=config.record.digests > 0)
        if resumed is None:
            configs.dump(config, run_dir / CONFIG_FILE)
    except OSError as error:
        raise UserError(f"run_dir: cannot write into {run_dir}: {error}; see to its permissions, or free the disk") from error
    session = Session(config, run_dir, recorder, Signals(), resumed, restart, reached)
    if resumed is None:
        session.attach_tensorboard()
    return session


@contextmanager
def _watched(session: Session, kept: Path | None) -> Iterator[None]:
    """Whatever ends the block is written down. `kept`: what the run's directory has displaced."""
    status: Status = "completed"
    error: str | None = None
    stacks = ""
    try:
        with session.signals.installed():
            yield
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except BaseException as caught:
        status, error = "failed", f"{type(caught).__name__}: {caught}".strip()
        stacks = caught.stacks if isinstance(caught, RankFailure) else ""
        if isinstance(caught, RewardFailure) and caught.trace:
            session.recorder.event("reward", caught.trace.rstrip())
        raise
    finally:
        _close(session, status, error, stacks, kept)


def _close(session: Session, status: Status, error: str | None, stacks: str, kept: Path | None) -> None:
    """Records closed, summary and report written. A disk that refuses them does not hide what ended the run."""
    nothing_done = not session.begun if session.resumed is not None else not session.recorder.records and not session.recorder.evals
    try:
        session.recorder.close()
        if stacks:
            (session.run_dir / STACKS_FILE).write_text(stacks, encoding="utf-8")
        if status == "completed" or not nothing_done:
            _finish_records(session, status, error)
        elif session.resumed is None:
            undo(session.run_dir, kept)
    except OSError as refused:
        fault = RunError(f"{session.run_dir}: cannot write the end of the records: {refused}; free the disk, then `drumroll report` it")
        if status == "completed":
            raise fault from refused
        print(fault, file=sys.stderr)


def _totals(config: RunConfig) -> dict[StepPhase, int]:
    """Steps of each phase, for the console's progress."""
    totals: dict[StepPhase, int] = {config.pipeline: config.max_steps}
    if isinstance(config.warmup, WarmupConfig):
        totals["sft"] = config.warmup.steps
    return totals


def _finish_records(session: Session, status: Status, error: str | None) -> None:
    summary = summarise(
        status=status,
        records=session.recorder.records,
        evals=session.recorder.evals,
        weight_pushes=session.pushes,
        digests_matched=session.pushes_matched,
        wall_seconds=session.seconds,
        peak_bytes_per_rank=session.peak_bytes_per_rank,
        state_bytes_per_rank=session.state_bytes_per_rank,
        foreseen=session.foreseen,
        error=error,
    )
    write_summary(session.run_dir / SUMMARY_FILE, summary)
    write_report(session.run_dir)
    print(closing(summary, session.run_dir))
