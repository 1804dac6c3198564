"""What every rank does: take a backend through the scenarios of the suite and note what it gave.

The same code runs the specification, whose tensors are written down, and the backend under test, whose tensors are compared with them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drumroll import plugins
from drumroll.backends.base import KINDS, Backend, BackendPlugin, NamedTensor, OptimSpec, RankContext, StepResult
from drumroll.digest import digest
from drumroll.errors import UserError
from drumroll.packing import collate, denominators
from drumroll.types import Denominators, MicroBatch, Stat
from drumroll.verify import batches
from drumroll.verify.batches import LEARNING_RATES, STEPS, WHOLE, Loss
from drumroll.verify.failure import check_error, checking
from drumroll.verify.live import live_bytes, settled_bytes
from drumroll.verify.reference import Observer, differing, fingerprints
from drumroll.verify.report import (
    ADAPTERS_SENT,
    BESIDE,
    FLOORS,
    FOREIGN_STEP,
    FOREIGN_WEIGHTS,
    SAVED,
    SAVED_AGAIN,
    SENT_AGAIN,
    TRAINING,
    Case,
    Report,
    SeenStep,
)


@dataclass(slots=True, frozen=True)
class MakeProbe:
    """Factory of the object on a rank."""

    backend: str

    def __call__(self, ctx: RankContext) -> Probe:
        return Probe(ctx, plugins.load("backends", self.backend))


class Probe:
    """One rank's side of the suite. Every public method is a scenario: a fresh backend in, a report out."""

    def __init__(self, ctx: RankContext, plugin: BackendPlugin) -> None:
        self._ctx = ctx
        self._plugin = plugin
        digest(torch.zeros(1, device=ctx.device))  # its table of keys is not to be counted as the backend's memory

    def gradient_norm(self, case: Case) -> float:
        """Of the first step's gradient, not clipped: the scale of what follows."""
        backend = self._start(case, replace(case.optim, max_grad_norm=0.0))
        norm = self._steps(case, backend, _observer(case, ""), range(1))[0].result.grad_norm
        _close(backend)
        return norm

    def train(self, case: Case) -> Report:
        """Outputs, three steps with every gradient, the weights after them, and what is exported."""
        report = Report(_observer(case, "train"))
        seen = report.observer
        backend = self._start(case, case.optim)
        with checking("weights as loaded"):
            seen.compare("weights as loaded", "loaded", _flat(backend.weights(torch.float32)))
        self._score(case, backend, seen, "before", "{}")
        report.steps = self._steps(case, backend, seen, range(1), gradients="gradients")
        report.steps += self._steps(case, backend, seen, range(1, STEPS), gradients="gradients of later steps")
        with checking("parameters after 3 steps"):
            seen.compare("parameters after 3 steps", "trained", _flat(backend.weights(torch.float32)))
        with checking("change of the parameters"):
            seen.compare_change("change of the parameters", "loaded", "trained", _flat(backend.weights(torch.float32)))
        self._score(case, backend, seen, "after", "{} after 3 steps")
        if case.split == WHOLE:
            self._exports(backend, report)
        else:
            report.exported = fingerprints(_flat(backend.weights(torch.float32)))
        _close(backend)
        return report

    def memory(self, case: Case) -> Report:
        """What the backend says it holds between the last backward and the step, where everything is there, and what there is."""
        report = Report(_observer(case, "train"))
        micros, counts = self._micros(case, 0)
        backend = self._start(case, case.optim)
        with checking("memory: all tensors"):
            for lr in (LEARNING_RATES[0], None):  # a step first: optimizer state may come with it
                for number, (_, micro) in enumerate(micros):
                    backend.forward_backward(micro, Loss(), counts, last=number == len(micros) - 1)
                if lr is not None:
                    backend.step(lr)
            report.memory = {kind: int(size) for kind, size in backend.memory().items()}
            report.live_bytes = live_bytes(self._ctx.device)
        _close(backend)
        with checking("memory: after close"):
            left = settled_bytes(self._ctx.device) / report.live_bytes if report.live_bytes else 0.0
            report.observer.note("memory: after close", left, "share of the tensors that are still there")
        return report

    def checkpoint(self, case: Case) -> Report:
        """Save after three steps; a fresh instance goes on from there."""
        report = Report(_observer(case, "checkpoint"))
        seen = report.observer
        backend = self._start(case, case.optim)
        self._steps(case, backend, seen, range(STEPS))
        with checking("save"):
            backend.save(case.scratch / SAVED)
            seen.compare("weights saved", "saved", _flat(backend.weights(torch.float32)))
        with checking(SENT_AGAIN):
            seen.compare(SENT_AGAIN, "changing", _flat(backend.weights(torch.float32, trained_only=True)))
            if case.model.lora is not None:
                seen.compare(ADAPTERS_SENT, "adapters", _flat(backend.weights(torch.float32, trained_only=True, apart=True)))
        with checking("save"):
            report.exported = fingerprints(_flat(backend.weights(torch.float32)))
        self._go_on(case, backend, seen, "step after saving")
        _close(backend)
        backend = self._restored(case, case.scratch / SAVED)
        with checking("weights as restored"):
            wrong = differing(fingerprints(_flat(backend.weights(torch.float32))), report.exported)
            seen.note("weights as restored", len(wrong), _some("differ from those before saving", wrong))
        with checking("save_async"):
            written = backend.save_async(case.scratch / SAVED_AGAIN)
        self._go_on(case, backend, seen, "step after restoring")  # which must not get into what is being written
        with checking("save_async"):
            written.result()
        _close(backend)
        return report

    def sleep(self, case: Case) -> Report:
        """Parameters, gradients and optimizer state are released after each step, and come back."""
        report = Report(_observer(case, "train"))
        seen = report.observer
        backend = self._start(case, case.optim)
        for step in range(STEPS):
            self._steps(case, backend, seen, range(step, step + 1))
            before = fingerprints(_flat(backend.weights(torch.float32)))
            with checking("sleep: bytes held"):
                backend.sleep(KINDS)
                held = backend.memory()
                seen.note("sleep: bytes held", sum(held.get(kind, 0) for kind in KINDS), str(held))
                backend.wake()
            with checking("sleep: weights after waking"):
                wrong = differing(fingerprints(_flat(backend.weights(torch.float32))), before)
                seen.note("sleep: weights after waking", len(wrong), _some("differ from those before", wrong))
        with checking("sleep: parameters after 3 steps"):
            seen.compare("sleep: parameters after 3 steps", "trained", _flat(backend.weights(torch.float32)))
        _close(backend)
        return report

    def adopt(self, case: Case) -> Report:
        """A fresh instance goes on from the specification's checkpoint."""
        report = Report(_observer(case, "checkpoint"))
        backend = self._restored(case, case.reference / SAVED)
        with checking(FOREIGN_WEIGHTS):
            report.observer.compare(FOREIGN_WEIGHTS, "saved", _flat(backend.weights(torch.float32)))
        self._go_on(case, backend, report.observer, FOREIGN_STEP)
        _close(backend)
        return report

    def skip(self, case: Case) -> Report:
        """A good step, one with a NaN on the last rank, and a good one."""
        report = Report(_observer(case, "skip"))
        seen = report.observer
        backend = self._start(case, case.optim)
        report.steps += self._steps(case, backend, seen, range(1), gradients="gradients")
        before = fingerprints(_flat(backend.weights(torch.float32)))
        report.steps += self._steps(case, backend, seen, range(1, 2), poison=True)
        wrong = differing(fingerprints(_flat(backend.weights(torch.float32))), before)
        seen.note("skip: nothing moves", len(wrong), _some("moved", wrong))
        report.steps += self._steps(case, backend, seen, range(2, 3), gradients="skip: next gradients")
        with checking("skip: next parameters"):
            seen.compare("skip: next parameters", "trained", _flat(backend.weights(torch.float32)))
        report.exported = fingerprints(_flat(backend.weights(torch.float32)))
        _close(backend)
        return report

    def forward_only(self, case: Case) -> Report:
        """An instance without an optimizer, as a reference is, scores and holds nothing else, also beside a policy that trains."""
        report = Report(_observer(case, "forward-only"))
        seen = report.observer
        policy = self._start(case, case.optim)
        backend = self._start(case, None)
        self._score(case, backend, seen, "before", "forward-only: {}")
        with checking("forward-only: memory"):
            held = backend.memory()
            extra = held["gradient"] + held["optimizer"]
            seen.note("forward-only: memory", extra, "bytes of gradients and optimizer state")
        self._steps(case, policy, seen, range(1))
        self._score(case, backend, seen, "before", BESIDE)
        self._score(case, policy, seen, "after", TRAINING)
        _close(backend)
        _close(policy)
        return report

    def close(self) -> None:
        """Every scenario has closed its own backend."""

    def _start(self, case: Case, optim: OptimSpec | None) -> Backend:
        gc.collect()
        gc.freeze()  # what is there now is not looked through again: half of the suite's time went into that
        try:
            backend = self._plugin(self._plugin.Config(**case.options))
            backend.setup(self._ctx, case.model, optim)
        except UserError:
            raise  # this backend cannot run here at all, and says why
        except Exception as error:
            raise check_error("setup", error) from error
        return backend

    def _restored(self, case: Case, directory: Path) -> Backend:
        backend = self._start(case, case.optim)
        with checking("load"):
            backend.load(directory)
        return backend

    def _micros(self, case: Case, step: int, poison: bool = False) -> tuple[list[tuple[list[int], MicroBatch]], Denominators]:
        """(sample indices, micro-batch) of this rank, and the step's denominators."""
        samples = batches.samples(step, case.subject.vocab, poison)
        indices = batches.plan(case.split, self._ctx.rank, self._ctx.world_size)
        return [(part, collate([samples[i] for i in part], self._ctx.device)) for part in indices], denominators(samples)

    def _steps(
        self, case: Case, backend: Backend, seen: Observer, steps: Iterable[int], gradients: str = "", poison: bool = False
    ) -> list[SeenStep]:
        """Optimizer steps. `gradients` is the check that their gradients are noted under; empty: they are not looked at."""
        done = []
        for step in steps:
            micros, counts = self._micros(case, step, poison)
            loss, stats = Loss(), dict[str, Stat]()
            for number, (_, micro) in enumerate(micros):
                with checking("forward and backward"):
                    found = backend.forward_backward(micro, loss, counts, last=number == len(micros) - 1)
                    stats |= {name: stats.get(name, Stat()).merge(stat) for name, stat in found.items()}
            if gradients:
                named = _shown(loss, micros, step)
                seen.compare("outputs in training", f"outputs-{step}", named, whole=False, one_scale=case.model.head == "value")
                with checking(gradients):
                    seen.compare(gradients, f"gradients-{step}", backend.gradients())
            with checking("step"):
                result = backend.step(LEARNING_RATES[step % STEPS])
                done.append(SeenStep(stats, StepResult(float(result.grad_norm), bool(result.skipped))))
        return done

    def _go_on(self, case: Case, backend: Backend, seen: Observer, check: str) -> None:
        """The fourth step, and the weights after it."""
        self._steps(case, backend, seen, range(STEPS, STEPS + 1))
        with checking(check):
            seen.compare(check, "fourth", _flat(backend.weights(torch.float32)))

    def _score(self, case: Case, backend: Backend, seen: Observer, moment: str, check: str) -> None:
        """Log-probs with entropy and without, or values, of the first batch. `check`: with {} for what is looked at."""
        micros, _ = self._micros(case, 0)
        if case.model.head == "value":
            self._value(backend, seen, moment, check.format("values"), micros)
            return
        logprobs, entropy = check.format("log-probs"), check.format("entropy")
        found: dict[str, list[NamedTensor]] = {"both": [], "entropy": [], "alone": []}
        with checking(logprobs):
            for indices, micro in micros:
                both, alone = backend.logprobs(micro, entropy=True), backend.logprobs(micro)
                found["both"] += batches.by_sample(_well_formed("log-probs", both.logprobs, micro), micro, indices, 0)
                found["alone"] += batches.by_sample(_well_formed("log-probs", alone.logprobs, micro), micro, indices, 0)
                found["entropy"] += batches.by_sample(_well_formed("entropy", both.entropy, micro), micro, indices, 0)
            seen.compare(logprobs, f"{moment}-logprobs", found["both"], whole=False)
            seen.compare(entropy, f"{moment}-entropy", found["entropy"], whole=False)
            seen.compare(logprobs, f"{moment}-logprobs", found["alone"], whole=False)

    def _value(self, backend: Backend, seen: Observer, moment: str, check: str, micros: list[tuple[list[int], MicroBatch]]) -> None:
        found: list[NamedTensor] = []
        with checking(check):
            for indices, micro in micros:
                found += batches.by_sample(_well_formed("values", backend.values(micro), micro), micro, indices, 0)
            seen.compare(check, f"{moment}-values", found, whole=False, one_scale=True)

    def _exports(self, backend: Backend, report: Report) -> None:
        """What `weights` and `digests` say, against each other and by name."""
        seen = report.observer
        with checking("names exported"):
            report.exported = fingerprints(_flat(backend.weights(torch.float32)))
            seen.names("names exported", "trained", [name for name, _ in _flat(backend.weights(torch.bfloat16))])
        with checking("weights in bfloat16"):
            cast = {name: digest(tensor.to(torch.bfloat16)) for name, tensor in _flat(backend.weights(torch.float32))}
            wrong = differing(fingerprints(_flat(backend.weights(torch.bfloat16))), cast)
            dtypes = {tensor.dtype for _, tensor in _flat(backend.weights(torch.bfloat16))} - {torch.bfloat16}
            seen.note("weights in bfloat16", len(wrong) + len(dtypes), _some("not the float32 weights cast", wrong or [str(dtypes)]))
        with checking("digests"):
            for dtype, expected in ((torch.float32, report.exported), (torch.bfloat16, cast)):
                wrong = differing(backend.digests(dtype), expected)
                seen.note("digests", len(wrong), _some(f"not those of the exported weights in {dtype}", wrong))


Scenario = Callable[[Probe, Case], Report]


def _observer(case: Case, folder: str) -> Observer:
    return Observer(case.reference / folder, case.writes, FLOORS[case.dtype])


def _close(backend: Backend) -> None:
    with checking("close"):
        backend.close()


def _flat(buckets: Iterable[list[NamedTensor]]) -> Iterator[NamedTensor]:
    for bucket in buckets:
        yield from bucket


def _shown(loss: Loss, micros: list[tuple[list[int], MicroBatch]], step: int) -> list[NamedTensor]:
    """Per-sample log-probs and entropies, or values, that the loss was shown."""
    named: list[NamedTensor] = []
    for outputs, (indices, micro) in zip(loss.shown, micros, strict=True):
        for what, shown in (("log-probs", outputs.logprobs), ("entropy", outputs.entropy), ("values", outputs.values)):
            if shown is not None:  # the loss refuses to go without what it needs
                named += [(f"{what} of {name}", part) for name, part in batches.by_sample(shown, micro, indices, step)]
    return named


def _well_formed(name: str, values: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
    """Raises ValueError unless there is one detached float32 number a target."""
    if values is None or values.dtype is not torch.float32 or values.shape != micro.target_positions.shape or values.requires_grad:
        found = "None" if values is None else f"{values.dtype} {tuple(values.shape)} requires_grad={values.requires_grad}"
        raise ValueError(f"{name}: expected torch.float32 {tuple(micro.target_positions.shape)} without gradient, got {found}")
    return values


def _some(what: str, names: list[str]) -> str:
    return f"{what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
