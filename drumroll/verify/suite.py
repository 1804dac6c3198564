"""`drumroll verify`: training backends against the executable specification, on the same data.

The specification runs in one process and writes down what it gets; each backend under test then runs the same scenarios on its ranks and
compares. What each check proves stands in docs/verify.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from drumroll import plugins
from drumroll.backends.base import ModelSpec, OptimSpec
from drumroll.config import ModelConfig
from drumroll.errors import UserError
from drumroll.runtime.worker import spec_of
from drumroll.verify import subjects, variants
from drumroll.verify.batches import POISONED, SPLITS, WHOLE
from drumroll.verify.cell import Cell
from drumroll.verify.probe import Probe
from drumroll.verify.report import Case
from drumroll.verify.rows import Labels
from drumroll.verify.subjects import Subject
from drumroll.verify.trial import Expected, Job, Key, Specification, Trial
from drumroll.verify.variants import AS_IS, COMMON, Variant

TIMEOUT_S = 60.0  # of one scenario on the suite's own models
TIMEOUT_OWN_MODEL_S = 600.0
# As a recipe that says nothing of it computes, in float32; at a temperature that has to be seen.
MODEL = replace(spec_of(ModelConfig(path=""), Path(), torch.device("cpu")), temperature=0.7)
# Not the defaults, so that a backend which has them built in is seen. Clip and epsilon fit the model: see `Specification.case`.
OPTIM = OptimSpec(betas=(0.8, 0.95), weight_decay=0.1)


@dataclass(slots=True, frozen=True, kw_only=True)
class Setup:
    """What is to be verified, whatever the backend."""

    ranks: int = 2
    models: Sequence[str] = ()  # folders, hub ids or builtin:NAME; none: small models made for it
    model: ModelSpec = MODEL  # how a model computes; its path is each subject's
    optim: OptimSpec = OPTIM
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # backend -> its options in every variant
    variants: Sequence[Variant] | None = None  # none: as it is, then all that the package knows of and the backend's options
    only: str = ""  # text in the name of a variant; empty: all
    device: str = "auto"
    timeout_s: float | None = None  # of one scenario

    @property
    def limit_s(self) -> float:
        return self.timeout_s or (TIMEOUT_OWN_MODEL_S if self.models else TIMEOUT_S)


def verify(backends: Sequence[str], setup: Setup, say: Callable[[Cell], None] = lambda cell: None) -> list[Cell]:
    """A cell a backend and variant, backend by backend; `say` is told of each when it is done.

    Raises UserError for input that makes no sense.
    """
    wanted = {backend: _variants(backend, setup) for backend in backends}
    distinct = {variant.name: variant for of_backend in wanted.values() for variant in of_backend}
    if not distinct:
        raise UserError(f"--only {setup.only!r} is in no variant's name; names look like {', '.join(v.name for v in (AS_IS, *COMMON))}")
    with TemporaryDirectory(prefix="drumroll-verify-") as folder:
        root = Path(folder)
        tested = subjects.of_paths(setup.models) if setup.models else subjects.builtin(root / "models")
        prepared = Prepared(setup)
        with Specification(root, setup.device, setup.limit_s) as specification:
            for variant in distinct.values():
                prepared.add(variant, tested, specification)
        cells: list[Cell] = []
        for backend, of_backend in wanted.items():
            with ExitStack() as stack:
                trials = _Trials(backend, setup, root / f"trial-{len(cells)}", prepared.expected, stack)
                for variant in of_backend:
                    cells.append(_cell(trials, variant, prepared, setup))
                    say(cells[-1])
        return cells


def jobs(cases: Sequence[Case], variant: Variant) -> Iterator[Job]:
    """Every scenario of a variant. What no family can change runs on one tied and one untied subject."""
    if variant.experts:
        cases = [case for case in cases if case.subject.experts] or cases  # without one among them, the backend says why it does not apply
    pair = _pair(cases)[: 1 if variant.one_model else 2]
    for case in cases if variant.splits == SPLITS else pair:
        if Probe.train in variant.scenarios:
            yield from (Job(Probe.train, replace(case, split=split), split.name) for split in variant.splits)
        if Probe.forward_only in variant.scenarios:
            yield Job(Probe.forward_only, replace(case, split=SPLITS[-1]), SPLITS[-1].name)
    for case in pair:
        if Probe.memory in variant.scenarios:
            yield Job(Probe.memory, replace(case, split=WHOLE), WHOLE.name)
        for scenario in (Probe.checkpoint, Probe.adopt, Probe.sleep):
            if scenario in variant.scenarios:
                yield Job(scenario, replace(case, split=SPLITS[1]), SPLITS[1].name)
        if Probe.skip in variant.scenarios:
            yield Job(Probe.skip, replace(case, split=POISONED), POISONED.name)


def frozen_body(subject: Subject) -> Variant:
    """The embedding alone trains: the gradient is NaN in some of its rows only, on one rank if it is sharded by rows."""
    return Variant(name="as it is", model={"trainable": (f"^{re.escape(subject.embedding)}$",)}, scenarios=(Probe.skip,))


def backends_of_the_package() -> list[str]:
    """The specification first."""
    found = plugins.names("backends")
    return sorted(found, key=lambda name: name != plugins.SPECIFICATION_BACKEND)


class Prepared:
    """The cases of every variant, and what the specification says about them."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._jobs: dict[str, list[Job]] = {}
        self.expected: dict[Key, Expected] = {}
        self.refused: dict[str, str] = {}  # variant -> why there is nothing to measure it against

    def add(self, variant: Variant, tested: Sequence[Subject], specification: Specification) -> None:
        """Let the specification run what the variant needs and it has not run yet; what it refuses is kept as a reason."""
        try:
            made = list(self._of(variant, tested, specification))
            self.expected |= specification.run((job for job in made if job.key not in self.expected), noise=bool(self._setup.models))
        except UserError as error:
            self.refused[variant.name] = str(error)
            return
        self._jobs[variant.name] = made

    def _of(self, variant: Variant, tested: Sequence[Subject], specification: Specification) -> Iterator[Job]:
        cases = [self._case(variant, subject, specification) for subject in tested]
        yield from jobs(cases, variant)
        if Probe.skip in variant.scenarios and self._setup.model.lora is None:
            for case in _pair(cases):
                if not case.subject.tied:
                    alone = self._case(frozen_body(case.subject), case.subject, specification)
                    unclipped = replace(alone, split=POISONED, optim=replace(alone.optim, max_grad_norm=0.0))
                    yield Job(Probe.skip, unclipped, f"{POISONED.name}, embedding alone trains")

    def _case(self, variant: Variant, subject: Subject, specification: Specification) -> Case:
        model = replace(self._setup.model, path=subject.path, **variant.model)
        return specification.case(subject, model, replace(self._setup.optim, **variant.optim))

    def jobs(self, variant: Variant, options: Mapping[str, Any]) -> list[Job]:
        """The variant's jobs for a backend with these options of its own."""
        merged = {**options, **variant.options}
        return [replace(job, case=replace(job.case, options=merged)) for job in self._jobs[variant.name]]


class _Trials:
    """The processes of one backend, by number of ranks and time limit; `stack` ends them."""

    def __init__(self, backend: str, setup: Setup, scratch: Path, expected: dict[Key, Expected], stack: ExitStack) -> None:
        self._stack = stack
        self.backend = backend
        self._setup = setup
        self._scratch = scratch
        self._expected = expected
        self._known: dict[tuple[int, int], Trial] = {}

    def of(self, variant: Variant) -> Trial:
        """Where a variant runs: on as many ranks as it says, or as are asked for; the specification has one."""
        ranks = 1 if self.backend == plugins.SPECIFICATION_BACKEND else variant.ranks or self._setup.ranks
        key = ranks, variant.patience
        if key not in self._known:
            limit, scratch = self._setup.limit_s * variant.patience, self._scratch / f"{len(self._known)}"
            trial = Trial(self.backend, ranks, self._setup.device, limit, scratch, self._expected)
            self._known[key] = self._stack.enter_context(trial)
        return self._known[key]


def _cell(trials: _Trials, variant: Variant, prepared: Prepared, setup: Setup) -> Cell:
    started = time.monotonic()
    trial = trials.of(variant)
    named = {"variant": variant.name}
    if variant.name in prepared.refused:
        labels = Labels(trials.backend, trial.ranks, {"model": "", "batch": "", **named}, setup.model.compute_dtype)
        rows = [labels.not_applicable(prepared.refused[variant.name])]
        return Cell(variant.name, trials.backend, trial.ranks, rows, time.monotonic() - started)
    rows, refused = [], set[str]()
    for job in prepared.jobs(variant, setup.options.get(trials.backend, {})):
        if job.case.subject.name in refused:
            continue
        try:
            rows += trial.rows(job, named, variant.rounds)
        except UserError as error:
            refused.add(job.case.subject.name)
            rows.append(trial.labels(job, named).not_applicable(str(error)))
    return Cell(variant.name, trials.backend, trial.ranks, rows, time.monotonic() - started)


def _variants(backend: str, setup: Setup) -> list[Variant]:
    """What this backend is run in. Raises UserError for a plug-in whose options cannot be known."""
    config = _config(backend)
    given = setup.options.get(backend, {})
    if setup.variants is not None:
        return list(setup.variants)
    return [v for v in (AS_IS, *variants.of_options(config), *COMMON) if setup.only in v.name and (v is AS_IS or _changes(v, setup, given))]


def _changes(variant: Variant, setup: Setup, given: Mapping[str, Any]) -> bool:
    """Whether a variant is another run than the one asked for."""
    model, optim = replace(setup.model, **variant.model), replace(setup.optim, **variant.optim)
    return bool(variant.ranks) or (model, optim, {**given, **variant.options}) != (setup.model, setup.optim, given)


def _config(backend: str) -> type[BaseModel]:
    """The options' schema. Raises UserError for a plug-in without one, or with options that have no default."""
    plugin = plugins.load("backends", backend)
    try:
        schema: type[BaseModel] = plugin.Config
        schema()
    except AttributeError as error:
        raise UserError(f"{backend}: {error}; expected a class or object as in drumroll.backends.base.BackendPlugin") from error
    except ValidationError as error:
        raise UserError(f"{backend}: its Config needs a default for every option, so that it can be verified: {error}") from error
    return schema


def _pair(cases: Sequence[Case]) -> list[Case]:
    """The last untied subject and the first tied one: where there are two families, one of each."""
    untied, tied = [case for case in cases if not case.subject.tied], [case for case in cases if case.subject.tied]
    return [*untied[-1:], *tied[:1]]
