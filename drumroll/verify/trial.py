"""Scenarios run on the specification, and on the backend under test: processes are started, watched, and started again after a crash."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import BaseModel

from drumroll import plugins
from drumroll.backends.base import GRADIENT, OPTIMIZER, PARAMETER, Kind, ModelSpec, OptimSpec
from drumroll.backends.footprint import Footprint
from drumroll.errors import RunError, UserError
from drumroll.observe.checks import CheckRow
from drumroll.runtime.local import launch
from drumroll.runtime.ranks import Ranks
from drumroll.verify import rows
from drumroll.verify.batches import WHOLE
from drumroll.verify.failure import failed_check
from drumroll.verify.probe import MakeProbe, Probe, Scenario
from drumroll.verify.report import Case, Report
from drumroll.verify.rows import Labels
from drumroll.verify.subjects import Subject
from drumroll.verify.variants import specified

CLIP_SHARE = 0.4  # of the first gradient's norm
EPSILON_SHARE = 0.3  # of a clipped gradient's typical element: then an update is a smooth function of its gradient, and epsilon matters
MAX_CRASHES = 3  # of the backend's processes, after which the rest is not tried

Key = tuple[str, Path]  # scenario, and the folder of what the specification wrote


@dataclass(slots=True, frozen=True)
class Job:
    """A scenario to run, and how its rows are labelled."""

    scenario: Scenario
    case: Case
    label: str  # e.g. how the batch was split

    @property
    def key(self) -> Key:
        """Which of the specification's reports it is measured against: one for all splits and options."""
        return self.scenario.__name__, self.case.reference


@dataclass(slots=True, frozen=True)
class Expected:
    """What the specification noted in one scenario.

    `noise`: check -> how far it is from itself when its samples are cut in other micro-batches: no backend need be closer to it than that.
    """

    report: Report
    case: Case
    noise: dict[str, float]


@runtime_checkable
class _Foreseen(Protocol):
    """A plug-in that says how it divides memory."""

    Config: type[BaseModel]

    def footprint(self, options: Any, ranks: int) -> Footprint:
        """See `Footprint`."""


class Side:
    """The processes of one backend: started when they are needed, and afresh after an error."""

    def __init__(self, backend: str, ranks: int, device: str, timeout_s: float) -> None:
        self.backend = backend
        self.world_size = ranks
        self._device = device
        self._timeout_s = timeout_s
        self._ranks: Ranks[Probe] | None = None

    def call(self, scenario: Scenario, case: Case) -> list[Report]:
        """Raises RunError when a rank fails, UserError where the backend says that it cannot run like this."""
        with self._watched() as ranks:
            return ranks.call(scenario, case)

    def gradient_norm(self, case: Case) -> float:
        with self._watched() as ranks:
            return ranks.call(Probe.gradient_norm, case)[0]

    @contextmanager
    def _watched(self) -> Iterator[Ranks[Probe]]:
        try:
            if self._ranks is None:
                self._ranks = launch(MakeProbe(self.backend), self.world_size, self._device, self._timeout_s, in_process=False)
            yield self._ranks
        except (RunError, UserError):
            self._ranks = None  # the runtime has ended them
            raise

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


class Specification(AbstractContextManager["Specification"]):
    """What others are measured against, written down by one process."""

    def __init__(self, folder: Path, device: str, timeout_s: float) -> None:
        self._folder = folder
        self._side = Side(plugins.SPECIFICATION_BACKEND, 1, device, timeout_s)
        self._known: dict[tuple[str, ModelSpec, OptimSpec], Case] = {}

    def case(self, subject: Subject, model: ModelSpec, optim: OptimSpec) -> Case:
        """The case of a subject, with a clip that binds in some steps and an epsilon that fit the size of its gradient.

        Raises UserError for a model that cannot be had like this.
        """
        plain_model, plain_optim = specified(model, optim)
        key = (subject.name, plain_model, plain_optim)
        if key not in self._known:
            folder = Path(mkdtemp(prefix="reference-", dir=self._folder))
            unclipped = replace(plain_optim, eps=1.0, max_grad_norm=0.0)
            case = Case(subject, {}, plain_model, unclipped, WHOLE, folder, folder, writes=True)
            clip = CLIP_SHARE * self._side.gradient_norm(case)
            elements = sum(math.prod(shape) for shape in subject.trained(model.trainable, model.head))
            scaled = replace(unclipped, max_grad_norm=clip, eps=EPSILON_SHARE * clip / math.sqrt(elements))
            self._known[key] = replace(case, optim=scaled)
        known = self._known[key]
        return replace(known, model=model, optim=replace(known.optim, offload=optim.offload))

    def run(self, jobs: Iterable[Job], noise: bool = False) -> dict[Key, Expected]:
        """Run every job whose like has not run yet; with `noise`, once more in other micro-batches. See `Expected`."""
        found: dict[Key, Expected] = {}
        for job in jobs:
            if job.key not in found:
                model, optim = specified(job.case.model, job.case.optim)
                case = replace(job.case, model=model, optim=optim, options={}, scratch=job.case.reference, writes=True)
                (report,) = self._side.call(job.scenario, case)
                found[job.key] = Expected(report, case, self._noise(job, case, report) if noise else {})
        return found

    def _noise(self, job: Job, case: Case, expected: Report) -> dict[str, float]:
        scratch = Path(mkdtemp(prefix="noise-", dir=self._folder))
        case = replace(case, split=replace(case.split, passes=case.split.passes + 3), scratch=scratch, writes=False)
        labels = Labels(plugins.SPECIFICATION_BACKEND, 1, {}, case.dtype)
        reports = self._side.call(job.scenario, case)
        return {row.check: row.value for row in _judged(labels, replace(job, case=case), reports, Expected(expected, case, {}), None)}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._side.close()


class Trial(AbstractContextManager["Trial"]):
    """The backend under test. What crashes or hangs becomes a failed row, and the next job gets fresh processes."""

    def __init__(
        self, backend: str, ranks: int, device: str, timeout_s: float, scratch: Path, expected: dict[Key, Expected]
    ) -> None:
        self._side = Side(backend, ranks, device, timeout_s)
        self.scratch = scratch
        self.expected = expected
        self.ranks = ranks
        self._jobs = 0
        self._crashes = 0

    def rows(self, job: Job, named: Mapping[str, str], rounds: bool = False) -> list[CheckRow]:
        """The rows of one job, under the keys of `named` too; raises UserError where the backend says that it cannot run like this.

        `rounds`: judged by the bounds of bfloat16.
        """
        expected = self.expected[job.key]
        labels = self.labels(job, named, rounds)
        if self._crashes >= MAX_CRASHES:
            return [labels.failed(f"{job.scenario.__name__}{rows.NOT_RUN}", f"given up after {MAX_CRASHES} crashes")]
        self._jobs += 1
        case = replace(job.case, scratch=self.scratch / f"{self._jobs}", writes=False)
        try:
            reports = self._side.call(job.scenario, case)
        except RunError as error:
            self._crashes += 1
            return [_crash(labels, job, str(error))]
        return _judged(labels, replace(job, case=case), reports, expected, self._divisors(job.case))

    def labels(self, job: Job, named: Mapping[str, str], rounds: bool = False) -> Labels:
        """What the rows of a job have in common."""
        options = {"model": job.case.subject.name, "batch": job.label, **named, **job.case.options}
        dtype = torch.bfloat16 if rounds else job.case.dtype
        return Labels(self._side.backend, self.ranks, options, dtype, self.expected[job.key].noise)

    def _divisors(self, case: Case) -> Mapping[Kind, int] | None:
        """Over how many ranks this backend says that it divides each kind of state; None where it does not say.

        A unit that is cut as one has the gradient of all of it, whatever part of it trains: then ZeRO's formula says nothing.
        """
        plugin = plugins.load("backends", self._side.backend)
        if not isinstance(plugin, _Foreseen):
            return None
        said = plugin.footprint(plugin.Config(**case.options), self.ranks)
        if said.flat and case.model.trainable:
            return None
        return {PARAMETER: said.parameter, GRADIENT: said.gradient, OPTIMIZER: said.optimizer}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._side.close()


def _judged(labels: Labels, job: Job, reports: Sequence[Report], expected: Expected, divisors: Mapping[Kind, int] | None) -> list[CheckRow]:
    noted = rows.noted(labels, reports)
    if job.scenario is Probe.train:
        same_batch = labels.ranks == 1 and job.case.split == expected.case.split and not job.case.writes
        bits = [rows.bit_equal(labels, reports, expected.report)] if same_batch else []
        return [*noted, *rows.trained(labels, reports, expected.report), *bits]
    if job.scenario is Probe.checkpoint:
        return [*noted, *rows.checkpoint(labels, reports, job.case)]
    if job.scenario is Probe.memory:
        return [*noted, *rows.memory(labels, reports, job.case, divisors)]
    if job.scenario is Probe.skip:
        return [*noted, *rows.skipped(labels, reports, expected.report)]
    return noted


def _crash(labels: Labels, job: Job, text: str) -> CheckRow:
    """A row that names the check and the first line of the error; outside a check (a hang, a killed process), the scenario."""
    who, *rest = text.splitlines()
    who = who.partition(" failed first")[0]
    if named := failed_check(text):
        return labels.failed(named[0], f"{who}: {named[1]}")
    told = [line for line in rest if line.strip() and not line.startswith("(ranks ")] or [text]
    line = told[-1] if told[0].startswith("Traceback") else told[0]  # a traceback ends in its error, anything else begins with it
    return labels.failed(job.scenario.__name__, f"{who}: {line}")
