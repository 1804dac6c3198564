"""When a run saves a checkpoint, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter, sleep

from drumroll.checkpoint import rng
from drumroll.checkpoint.driver import DriverState
from drumroll.checkpoint.identity import Fingerprint
from drumroll.checkpoint.store import CannotWrite, CheckpointStore, name_of
from drumroll.config import RunConfig
from drumroll.observe.alarms import Alarm
from drumroll.observe.recorder import Recorder
from drumroll.runtime.policy import Policy

POLL_S = 0.05


@dataclass(slots=True, frozen=True)
class Boundary:
    """Everything but tensors after a whole step, so that it can be saved later, until the next optimizer step."""

    state: DriverState
    generators: rng.Generators  # the driver's
    of_ranks: list[rng.Generators]


@dataclass(slots=True, frozen=True)
class _UnderWay:
    step: int
    words: str  # to say when it is done


@dataclass(slots=True)
class Saver:
    """Saves in the background unless told otherwise. A save that failed shows at the next step, or at the end: it raises CannotWrite, or is
    an alarm where `checkpoint.on_error` is `continue`."""

    config: RunConfig
    store: CheckpointStore
    model: Fingerprint
    recorder: Recorder
    critic: Fingerprint | None = None  # of what a critic began as
    last: int = 0  # newest step that is saved
    _under_way: _UnderWay | None = None

    def after_step(self, policy: Policy, boundary: Boundary) -> None:
        """Hear what became of the save under way, and begin the next one where it is due."""
        self.hear(policy, wait=False)
        if self.due(boundary.state.step):
            self.save(policy, boundary)

    def due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after this step."""
        return step % self.config.checkpoint.every == 0 or step == self.config.max_steps

    def save(self, policy: Policy, boundary: Boundary) -> None:
        """Begin a save of the boundary, whose parameters the ranks still have; nothing to do where it has been saved."""
        self.hear(policy, wait=True)
        step, started = boundary.state.step, perf_counter()
        if step <= self.last:
            return
        try:
            draft = self.store.draft(boundary.state, self.config, self.model, boundary.generators, boundary.of_ranks, self.critic)
            policy.save(self.store, draft, self.config.checkpoint.async_save)
        except CannotWrite as error:
            self._failed(step, error)
            return
        words = f"checkpoint {self.store.folder / name_of(step)}, {perf_counter() - started:.2f} s of waiting"
        self._under_way = _UnderWay(step, words)
        if not self.config.checkpoint.async_save:
            self.hear(policy, wait=True)

    def hear(self, policy: Policy, wait: bool) -> None:
        """What became of the save under way, when it has ended."""
        if self._under_way is None:
            return
        try:
            while not (done := policy.saved()) and wait:  # asked again and again: no call is silent for as long as a large save takes
                sleep(POLL_S)
        except CannotWrite as error:
            step, self._under_way = self._under_way.step, None
            self._failed(step, error)
            return
        if done:
            self.recorder.note(self._under_way.words)
            for path in self.store.left_over():
                self.recorder.note(f"could not be removed, tried again with the next checkpoint: {path}")
            self.last, self._under_way = self._under_way.step, None

    def _failed(self, step: int, error: CannotWrite) -> None:
        self.store.discard(step)
        if self.config.checkpoint.on_error == "stop":
            raise error
        kept = f"--resume would go on after step {self.last}" if self.last else "there is no checkpoint yet"
        what = f"the checkpoint of step {step} could not be written, and {kept}: {error}"
        action = "free the disk: the next checkpoint is tried when it is due"
        self.recorder.alarm(Alarm("checkpoint", what, "the disk is full, or gone", action))
