"""When a run saves a checkpoint, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep

from drumroll.checkpoint import rng
from drumroll.checkpoint.driver import DriverState
from drumroll.checkpoint.identity import Fingerprint
from drumroll.checkpoint.store import CheckpointStore, name_of
from drumroll.config import RunConfig
from drumroll.runtime.policy import Policy

POLL_S = 0.05


@dataclass(slots=True, frozen=True)
class Boundary:
    """Everything of the driver's after a whole step, so that it can be saved later, until the next optimizer step."""

    state: DriverState
    generators: rng.Generators


@dataclass(slots=True)
class Saver:
    """Saves in the background unless told otherwise; a save that failed raises RunError at the next step, or at the end."""

    config: RunConfig
    store: CheckpointStore
    model: Fingerprint
    say: Callable[[str], None]
    last: int = 0  # newest step that is saved, or being saved
    _under_way: str | None = None  # what to say of it when it is done

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
        step = boundary.state.step
        if step <= self.last:
            return
        self.hear(policy, wait=True)
        started = perf_counter()
        draft = self.store.draft(boundary.state, self.config, self.model, boundary.generators)
        policy.save(self.store, draft, self.config.checkpoint.async_save)
        self.last, self._under_way = step, f"checkpoint {self.store.folder / name_of(step)}, {perf_counter() - started:.2f} s of waiting"
        if not self.config.checkpoint.async_save:
            self.hear(policy, wait=True)

    def hear(self, policy: Policy, wait: bool) -> None:
        """Say that the save under way is done, when it is. Raises RunError when it failed."""
        if self._under_way is None:
            return
        while not (done := policy.saved()) and wait:  # asked again and again: no call is silent for as long as a large save takes
            sleep(POLL_S)
        if done:
            self.say(self._under_way)
            self._under_way = None
