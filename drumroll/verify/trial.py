"""Scenarios run on the specification, and on the backend under test: processes are started, watched, and started again after a crash."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType

import torch

from drumroll import plugins
from drumroll.backends.base import OptimSpec
from drumroll.errors import RunError
from drumroll.observe.checks import CheckRow
from drumroll.runtime.local import Ranks, launch
from drumroll.verify import rows
from drumroll.verify.batches import WHOLE
from drumroll.verify.probe import Case, MakeProbe, Probe, Report, failed_check
from drumroll.verify.rows import Labels
from drumroll.verify.subjects import Subject

BETAS = (0.8, 0.95)  # not the defaults, so that a backend which has them built in is seen
WEIGHT_DECAY = 0.1
CLIP_SHARE = 0.4  # of the first gradient's norm
EPSILON_SHARE = 0.3  # of a clipped gradient's typical element: then an update is a smooth function of its gradient, and epsilon matters
MAX_CRASHES = 3  # of the backend's processes, after which the rest is not tried

Scenario = Callable[[Probe, Case], Report]
Key = tuple[str, str, bool]  # scenario, subject, whether only some parameters train


@dataclass(slots=True, frozen=True)
class Job:
    """A scenario to run, and how its rows are labelled."""

    scenario: Scenario
    case: Case
    label: str  # e.g. how the batch was split

    @property
    def key(self) -> Key:
        """Which of the specification's reports it is measured against: one for all splits and options."""
        return self.scenario.__name__, self.case.subject.name, bool(self.case.trainable)


@dataclass(slots=True, frozen=True)
class Expected:
    """What the specification noted in one scenario.

    `noise`: check -> how far it is from itself when its samples are cut in other micro-batches: no backend need be closer to it than that.
    """

    report: Report
    noise: dict[str, float]


class Specification(AbstractContextManager["Specification"]):
    """The specification's processes: what others are measured against is written down by them."""

    def __init__(self, folder: Path, device: str, timeout_s: float) -> None:
        self._folder = folder
        self._ranks = launch(MakeProbe(plugins.SPECIFICATION_BACKEND), 1, device, timeout_s, in_process=False)

    def case(self, subject: Subject, dtype: torch.dtype) -> Case:
        """The case of a subject, with a clip that binds in some steps and an epsilon that fit the size of its gradient."""
        folder = Path(mkdtemp(prefix="reference-", dir=self._folder))
        optim = OptimSpec(betas=BETAS, eps=1.0, weight_decay=WEIGHT_DECAY, max_grad_norm=0.0)
        case = Case(subject, {}, dtype, optim, WHOLE, folder, folder, writes=True)
        (norm,) = self._ranks.call(Probe.gradient_norm, case)
        clip = CLIP_SHARE * norm
        return replace(case, optim=replace(optim, max_grad_norm=clip, eps=EPSILON_SHARE * clip / math.sqrt(subject.parameters)))

    def run(self, jobs: Iterable[Job], noise: bool = False) -> dict[Key, Expected]:
        """Run every job whose like has not run yet; with `noise`, once more in other micro-batches. See `Expected`."""
        found: dict[Key, Expected] = {}
        for job in jobs:
            if job.key not in found:
                (report,) = self._ranks.call(job.scenario, job.case)
                found[job.key] = Expected(report, self._noise(job, report) if noise else {})
        return found

    def _noise(self, job: Job, expected: Report) -> dict[str, float]:
        scratch = Path(mkdtemp(prefix="noise-", dir=self._folder))
        case = replace(job.case, split=replace(job.case.split, passes=job.case.split.passes + 3), scratch=scratch, writes=False)
        labels = Labels(plugins.SPECIFICATION_BACKEND, 1, {}, case.dtype)
        rows = _judged(labels, replace(job, case=case), self._ranks.call(job.scenario, case), expected)
        return {row.check: row.value for row in rows}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ranks.close()


class Trial(AbstractContextManager["Trial"]):
    """The processes of the backend under test. What crashes or hangs becomes a failed row, and the next job gets fresh processes."""

    def __init__(
        self, backend: str, ranks: int, device: str, timeout_s: float, scratch: Path, expected: dict[Key, Expected]
    ) -> None:
        self._backend = backend
        self._world_size = ranks
        self._device = device
        self._timeout_s = timeout_s
        self.scratch = scratch
        self.expected = expected
        self._ranks: Ranks[Probe] | None = None
        self._jobs = 0
        self._crashes = 0

    def rows(self, job: Job) -> list[CheckRow]:
        """The rows of one job; raises UserError where the backend says that it cannot run like this at all."""
        options = {"model": job.case.subject.name, "batch": job.label, **job.case.options}
        labels = Labels(self._backend, self._world_size, options, job.case.dtype, self.expected[job.key].noise)
        if self._crashes >= MAX_CRASHES:
            return [labels.failed(f"{job.scenario.__name__}: not run", f"given up after {MAX_CRASHES} crashes")]
        self._jobs += 1
        case = replace(job.case, scratch=self.scratch / f"{self._jobs}", writes=False)
        try:
            if self._ranks is None:
                self._ranks = launch(MakeProbe(self._backend), self._world_size, self._device, self._timeout_s, in_process=False)
            reports = self._ranks.call(job.scenario, case)
        except RunError as error:
            self._ranks = None  # the runtime has ended them
            self._crashes += 1
            return [_crash(labels, job, str(error))]
        return _judged(labels, replace(job, case=case), reports, self.expected[job.key].report)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._ranks is not None:
            self._ranks.close()


def _judged(labels: Labels, job: Job, reports: Sequence[Report], expected: Report) -> list[CheckRow]:
    noted = rows.noted(labels, reports)
    if job.scenario is Probe.train:
        return [*noted, *rows.trained(labels, reports, expected)]
    if job.scenario is Probe.checkpoint:
        return [*noted, *rows.checkpoint(labels, reports, job.case)]
    if job.scenario is Probe.memory:
        return [*noted, *rows.memory(labels, reports, job.case)]
    if job.scenario is Probe.skip:
        return [*noted, *rows.skipped(labels, reports, expected)]
    return noted


def _crash(labels: Labels, job: Job, text: str) -> CheckRow:
    """A row that names the check and the first line of the error; outside a check (a hang, a killed process), the scenario."""
    who, *rest = text.splitlines()
    who = who.partition(" failed first")[0]
    if named := failed_check(text):
        return labels.failed(named[0], f"{who}: {named[1]}")
    told = [line for line in rest if line.strip() and not line.startswith("(ranks ")]
    return labels.failed(job.scenario.__name__, f"{who}: {told[-1] if told else text}")
