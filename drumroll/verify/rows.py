"""From what the ranks noted to rows with bounds: what each check may be off by, in float32 and in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch

from drumroll import plugins
from drumroll.backends import state
from drumroll.backends.base import GRADIENT, OPTIMIZER, PARAMETER, Kind, StepResult
from drumroll.observe.checks import CheckRow
from drumroll.types import Stat
from drumroll.verify.reference import Deviation, differing, distance
from drumroll.verify.report import ADAPTERS_SENT, BESIDE, FLOORS, FOREIGN_STEP, SAVED, SAVED_AGAIN, SENT_AGAIN, TRAINING, Case, Report

CHANGE = "change of the parameters"
# (float32, bfloat16). Relative to the largest absolute value of a tensor, or to a number's own size. What is not listed must be exact: 0.
_NUMBERS = (1e-5, 2e-2)
_WEIGHTS = (1e-5, 2e-3)  # three steps change a weight by about a hundredth of its size, so this is far tighter than it looks
BOUNDS: dict[str, tuple[float, float]] = {
    "log-probs": _NUMBERS,
    "entropy": _NUMBERS,
    "values": _NUMBERS,
    "outputs in training": _NUMBERS,
    "loss": _NUMBERS,
    "statistics of the loss": _NUMBERS,
    "gradients": (1e-5, 5e-2),  # a bfloat16 matmul rounds each of its results to 8 bits
    "gradients of later steps": (1e-5, 5e-2),
    "gradient norm": _NUMBERS,
    "parameters after 3 steps": _WEIGHTS,
    CHANGE: (5e-4, 2e-1),  # float32 rounds a weight by up to 1e-4 of such a change
    "log-probs after 3 steps": _NUMBERS,
    "entropy after 3 steps": _NUMBERS,
    "values after 3 steps": _NUMBERS,
    "weights saved": _WEIGHTS,
    SENT_AGAIN: _WEIGHTS,
    ADAPTERS_SENT: (5e-4, 2e-1),  # they began at 0: what they are is how they changed
    "step after saving": _WEIGHTS,
    "step after restoring": _WEIGHTS,
    FOREIGN_STEP: _WEIGHTS,
    "weights in the files": _WEIGHTS,
    "moments in the files": (1e-5, 5e-2),
    "skip: next gradients": (1e-5, 5e-2),
    "skip: gradient norms": _NUMBERS,
    "skip: next parameters": _WEIGHTS,
    "sleep: parameters after 3 steps": _WEIGHTS,
    "forward-only: log-probs": _NUMBERS,
    "forward-only: entropy": _NUMBERS,
    "forward-only: values": _NUMBERS,
    BESIDE: _NUMBERS,
    TRAINING: _NUMBERS,
    "memory: all tensors": (0.1, 0.1),  # buffers of communication, the batch
    "memory: after close": (0.05, 0.05),
}
NOISE_FACTOR = 10.0  # on the user's own model: depth and trained weights amplify rounding beyond what the numbers above allow
# One number may be near another by luck: its noise is that of the tensors which it sums up.
_NOISE_OF = {
    "loss": "outputs in training",
    "statistics of the loss": "outputs in training",
    "gradient norm": "gradients of later steps",
    "skip: gradient norms": "skip: next gradients",
}
BIT_EQUAL = f"bits that differ from {plugins.SPECIFICATION_BACKEND}"
BYTES_PER_PARAMETER, BYTES_BY_FORMULA = "memory: bytes a parameter", "memory: bytes a parameter, formula"
FORMULA_BOUND = 0.02
NOT_APPLICABLE = "not applicable"
NOT_RUN = ": not run"  # end of the name of a row that stands for a scenario which was not tried
WHERE = "where"  # key of a failed row's options: rank, step and tensor, or the first line of an error
_BYTES: dict[Kind, int] = {PARAMETER: 4, GRADIENT: 4, OPTIMIZER: 8}  # of an element that trains, in float32, over all ranks together


@dataclass(slots=True, frozen=True)
class Labels:
    """What the rows of one scenario have in common."""

    backend: str
    ranks: int
    options: Mapping[str, Any]
    dtype: torch.dtype
    noise: dict[str, float] = field(default_factory=dict)  # check -> distance of the specification from itself, where it was measured

    def row(self, check: str, value: float, where: str = "", like: str = "") -> CheckRow:
        """A row that passes within the check's bound, or that of the check `like`; `where` is kept where it does not."""
        bound = BOUNDS.get(like or check, (0.0, 0.0))[self.dtype is torch.bfloat16]
        if bound > 0:
            bound = max(bound, NOISE_FACTOR * self.noise.get(_NOISE_OF.get(check, check), 0.0))
        return self._row(check, value, bound, value <= bound, where)

    def at_least_one(self, check: str, value: float) -> CheckRow:
        """A row for the share of something that must all be there."""
        return self._row(check, value, 1.0, value >= 1.0, "")

    def at_most(self, check: str, value: float, bound: float, where: str) -> CheckRow:
        """A row with a bound of its own."""
        return self._row(check, value, bound, value <= bound, where)

    def measured(self, check: str, value: float) -> CheckRow:
        """A row that only reports."""
        return self._row(check, value, None, True, "")

    def not_applicable(self, why: str) -> CheckRow:
        """A row for what the backend says that it does not do."""
        row = self._row(NOT_APPLICABLE, 0.0, None, True, "")
        return replace(row, options={**self.options, WHERE: why})

    def failed(self, check: str, error: str) -> CheckRow:
        """A row for what could not be measured."""
        return self._row(check, math.nan, None, False, error)

    def _row(self, check: str, value: float, bound: float | None, passed: bool, where: str) -> CheckRow:
        options = dict(self.options) if passed or not where else {**self.options, WHERE: where}
        return CheckRow(
            check=check, backend=self.backend, options=options, ranks=self.ranks, value=float(value), tolerance=bound, passed=passed
        )


def noted(labels: Labels, reports: Sequence[Report]) -> list[CheckRow]:
    """What the ranks compared themselves: the worst of them a check."""
    rows = []
    for check in reports[0].observer.deviations:
        of_ranks = [report.observer.deviations.get(check, Deviation(math.inf, "not noted")) for report in reports]
        worst = max(range(len(reports)), key=lambda rank: of_ranks[rank].value)
        rows.append(labels.row(check, of_ranks[worst].value, f"rank {worst}, {of_ranks[worst].where}"))
    return rows


def trained(labels: Labels, reports: Sequence[Report], expected: Report) -> list[CheckRow]:
    """Numbers that only make sense over all ranks."""
    merged = [(_merged(reports, step), seen.stats) for step, seen in enumerate(expected.steps)]
    return [
        _worst(labels, "loss", [_relative(mine["loss"].sum, theirs["loss"].sum) for mine, theirs in merged]),
        _worst(labels, "statistics of the loss", [_statistics(mine, theirs) for mine, theirs in merged]),
        _norms(labels, "gradient norm", reports, expected),
        agreeing(labels, reports),
    ]


def skipped(labels: Labels, reports: Sequence[Report], expected: Report) -> list[CheckRow]:
    """Whether all ranks skipped the poisoned step and no other."""
    flags = [seen.result.skipped for seen in expected.steps]
    wrong = [rank for rank, report in enumerate(reports) if [seen.result.skipped for seen in report.steps] != flags]
    return [
        labels.row("skip: all ranks together", len(wrong), f"ranks {wrong} skipped other steps than {flags}"),
        _norms(labels, "skip: gradient norms", reports, expected),
        agreeing(labels, reports),
    ]


def agreeing(labels: Labels, reports: Sequence[Report]) -> CheckRow:
    """How many ranks got another norm or exported other weights than rank 0."""
    def told(report: Report) -> tuple[list[StepResult], dict[str, int]]:
        return [seen.result for seen in report.steps], report.exported

    wrong = [rank for rank, report in enumerate(reports) if told(report) != told(reports[0])]
    return labels.row("ranks agree", len(wrong), f"ranks {wrong} got other norms or weights than rank 0")


def bit_equal(labels: Labels, reports: Sequence[Report], expected: Report) -> CheckRow:
    """How many weights and norms of one rank differ from the specification's in any bit, after three steps. Reported, not required."""
    (report,) = reports
    weights = differing(report.exported, expected.exported)
    norms = sum(mine.result != theirs.result for mine, theirs in zip(report.steps, expected.steps, strict=True))
    return labels.measured(BIT_EQUAL, len(weights) + norms)


def memory(labels: Labels, reports: Sequence[Report], case: Case, divisors: Mapping[Kind, int] | None) -> list[CheckRow]:
    """Float32 storage of everything, by the backend's own account, and that account against the tensors that are there."""
    off = [abs(sum(report.memory.values()) / report.live_bytes - 1.0) if report.live_bytes > 0 else math.inf for report in reports]
    worst = max(range(len(off)), key=off.__getitem__)
    told = f"rank {worst} says {reports[worst].memory}; its tensors take {reports[worst].live_bytes} bytes"
    everything = labels.row("memory: all tensors", off[worst], told)
    if case.model.lora is not None:
        return [everything]  # what trains is not of the model
    kinds = [kind for kind in _BYTES if kind != OPTIMIZER or case.optim.name == "adamw"]  # others have less state than two moments
    shapes = {kind: case.subject.trained(() if kind == PARAMETER else case.model.trainable, case.model.head) for kind in kinds}
    rows = []
    for kind in kinds:
        held = sum(report.memory.get(kind, 0) for report in reports)
        rows.append(labels.at_least_one(f"memory: {kind}", held / (_BYTES[kind] * _elements(shapes[kind]))))
    return [*rows, everything, *(_by_formula(labels, reports, shapes, divisors) if divisors is not None else ())]


def _by_formula(
    labels: Labels, reports: Sequence[Report], shapes: Mapping[Kind, list[tuple[int, ...]]], divisors: Mapping[Kind, int]
) -> Iterator[CheckRow]:
    """Persistent bytes of the rank that has most, against the formulas of ZeRO (Rajbhandari et al. 2020, section 3).

    A kind that is cut over n ranks takes 1/n of its bytes, and what it takes to fill the rows of every tensor up to a multiple of n.
    """
    most, wanted = dict[Kind, int](), dict[Kind, float]()
    for kind, of_kind in shapes.items():
        parts, size = divisors[kind], _BYTES[kind]
        most[kind] = max(report.memory.get(kind, 0) for report in reports)
        wanted[kind] = size * _elements(of_kind) / parts
        filled = size * sum(-(-shape[0] // parts) * math.prod(shape[1:]) for shape in of_kind)
        told = f"{most[kind]} bytes, expected {wanted[kind]:.0f} (1/{parts} of it all), {filled} with whole rows"
        bound = FORMULA_BOUND + filled / wanted[kind] - 1.0
        yield labels.at_most(f"memory: {kind} beyond 1/{parts}", most[kind] / wanted[kind] - 1.0, bound, told)
    yield labels.measured(BYTES_PER_PARAMETER, sum(most.values()) / _elements(shapes[PARAMETER]))
    yield labels.measured(BYTES_BY_FORMULA, sum(wanted.values()) / _elements(shapes[PARAMETER]))


def _elements(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def checkpoint(labels: Labels, reports: Sequence[Report], case: Case) -> list[CheckRow]:
    """What lies on disk, against the specification's checkpoint and against what was saved again after loading it."""
    try:
        saved, again = state.read(case.scratch / SAVED), state.read(case.scratch / SAVED_AGAIN)
    except Exception as error:  # noqa: BLE001 - whatever torch meets in a file that it does not understand
        why = f"torch.distributed.checkpoint cannot read it: {type(error).__name__}: {error}"
        return [labels.failed("names saved", why.splitlines()[0])]
    expected = state.read(case.reference / SAVED)
    wrong = sorted(saved.keys() ^ expected.keys())
    changed = [name for name in saved if name not in again or not torch.equal(saved[name], again[name])]
    fresh = case.model.lora is not None and case.model.lora.start is None  # adapters began at 0: what they are is how they changed
    return [
        labels.row("names saved", len(wrong), f"missing or unexpected: {wrong[:3]}"),
        labels.row("weights in the files", *_furthest(saved, expected, state.MODEL, case), like=CHANGE if fresh else ""),
        labels.row("moments in the files", *_furthest(saved, expected, state.OPTIMIZER, case)),
        labels.row("state as restored", len(changed), f"saved again after loading, these differ: {changed[:3]}"),
        agreeing(labels, reports),
    ]


def _furthest(saved: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], prefix: str, case: Case) -> tuple[float, str]:
    """Largest `distance` of the tensors below `prefix`; those of a kind (weights, either moment) have one floor."""
    wanted = {name: tensor for name, tensor in expected.items() if name.startswith(prefix)}
    largest: dict[str, float] = {}
    for name, tensor in wanted.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), float(tensor.abs().max()))
    worst = (0.0, "")
    for name, tensor in wanted.items():
        value, why = distance(saved[name], tensor, FLOORS[case.dtype] * largest[_kind(name)]) if name in saved else (math.inf, "")
        worst = max(worst, (value, f"{name}{why}"), key=lambda found: found[0])
    return worst


def _kind(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith(state.OPTIMIZER) else state.MODEL


def _merged(reports: Sequence[Report], step: int) -> dict[str, Stat]:
    names = {"loss"}.union(*(report.steps[step].stats for report in reports))
    return {name: reduce(Stat.merge, (report.steps[step].stats.get(name, Stat()) for report in reports)) for name in names}


def _statistics(found: dict[str, Stat], expected: dict[str, Stat]) -> float:
    """Largest relative error of sum and max, infinite for another count; the loss counts micro-batches, whose number may differ."""
    errors = [0.0]
    for name, stat in expected.items():
        if name != "loss":
            mine = found.get(name, Stat())
            errors += [_relative(mine.sum, stat.sum), _relative(mine.max, stat.max), 0.0 if mine.count == stat.count else math.inf]
    return max(errors)


def _norms(labels: Labels, check: str, reports: Sequence[Report], expected: Report) -> CheckRow:
    off = []
    for step, seen in enumerate(expected.steps):
        off.append(max(_relative(report.steps[step].result.grad_norm, seen.result.grad_norm) for report in reports))
    return _worst(labels, check, off)


def _worst(labels: Labels, check: str, of_steps: Sequence[float]) -> CheckRow:
    step = max(range(len(of_steps)), key=of_steps.__getitem__)
    return labels.row(check, of_steps[step], f"step {step + 1}")


def _relative(found: float, expected: float) -> float:
    """Difference over the expected size; infinite where only one of them is finite."""
    if found == expected:
        return 0.0
    if not (math.isfinite(found) and math.isfinite(expected)):
        return math.inf
    return abs(found - expected) / abs(expected) if expected else math.inf
