"""Backends that are wrong in one way each. `drumroll verify tests/contract/faulty_backends.py:Averages` must fail, and say why.

`PLUGIN` makes any of them by its option `fault`, so that many can be tried in the same processes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn

from drumroll.backends import state
from drumroll.backends.base import Kind, ModelSpec, NamedTensor, OptimSpec, RankContext, StepResult
from drumroll.config import Section
from drumroll.plugins import load_symbol
from drumroll.types import Denominators, LossFn, MicroBatch, Stat, TokenOutputs

Plain: Any = load_symbol(f"{Path(__file__).with_name('plain_backend.py')}:Plain")  # by path: a user's folder is not on the Python path

# Gradients


class Averages(Plain):
    def reduce(self, name: str, gradient: torch.Tensor) -> None:
        super().reduce(name, gradient)
        gradient.div_(dist.get_world_size())


class ForgetsToReduceBiases(Plain):
    def reduce(self, name: str, gradient: torch.Tensor) -> None:
        if gradient.ndim > 1 or "norm" in name:
            super().reduce(name, gradient)


class ForgetsToReduceNorms(Plain):
    def reduce(self, name: str, gradient: torch.Tensor) -> None:
        if "norm" not in name:
            super().reduce(name, gradient)


class ReducesInHalfPrecision(Plain):
    def reduce(self, name: str, gradient: torch.Tensor) -> None:
        low = gradient.bfloat16()
        super().reduce(name, low)
        gradient.copy_(low)


class LocalDenominators(Plain):
    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        local = Denominators(max(1, len(micro.target_positions)), max(1, len(micro.lengths)), denominators.groups)
        return super().forward_backward(micro, loss, local, last)


class DropsTheLastMicroBatch(Plain):
    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        if last:
            self.backward = lambda loss: None  # type: ignore[method-assign]
        stats = super().forward_backward(micro, loss, denominators, last)
        self.__dict__.pop("backward", None)
        return stats


class KeepsOnlyTheLastMicroBatch(Plain):
    def backward(self, loss: torch.Tensor) -> None:
        super().zero()
        loss.backward()


class AveragesMicroBatches(Plain):
    passes = 0

    def backward(self, loss: torch.Tensor) -> None:
        self.passes += 1
        loss.backward()

    def reduce(self, name: str, gradient: torch.Tensor) -> None:
        super().reduce(name, gradient.div_(max(1, self.passes)))

    def zero(self) -> None:
        self.passes = 0
        super().zero()


class ReducesWhatIsReduced(Plain):
    """All-reduces what has piled up after every micro-batch."""

    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        return super().forward_backward(micro, loss, denominators, True)


class TakesTheFirstRanksGradient(Plain):
    def reduce(self, name: str, gradient: torch.Tensor) -> None:
        dist.broadcast(gradient, 0)


class KeepsGradients(Plain):
    def zero(self) -> None:
        pass


class DetachesEntropy(Plain):
    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = super().forward(micro)
        return logprobs, entropy.detach()


# Outputs


class ForgetsABuffer(Plain):
    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim)
        self.model.model.rotary_emb.inv_freq.zero_()


class BufferInHalfPrecision(Plain):
    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim)
        self.model.model.rotary_emb.inv_freq = self.model.model.rotary_emb.inv_freq.bfloat16().float()


class IgnoresTemperature(Plain):
    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, replace(model, temperature=1.0), optim)


class IgnoresTemperatureWithoutEntropy(Plain):
    def logprobs(self, micro: MicroBatch, entropy: bool = False) -> TokenOutputs:
        kept = self.spec
        self.spec = self.spec if entropy else replace(self.spec, temperature=1.0)
        found = super().logprobs(micro, entropy)
        self.spec = kept
        return found


class EntropyAtAnotherTemperature(Plain):
    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        kept, (logprobs, _) = self.spec, super().forward(micro)
        self.spec = replace(self.spec, temperature=1.0)
        _, entropy = super().forward(micro)
        self.spec = kept
        return logprobs, entropy


class TrainsInTrainMode(Plain):
    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        self.model.train()
        stats = super().forward_backward(micro, loss, denominators, last)
        self.model.eval()
        return stats


class LeaksBetweenSamples(Plain):
    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(replace(micro, lengths=[sum(micro.lengths)]))


class OffByOne(Plain):
    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        targets = micro.target_positions
        return super().forward(replace(micro, target_positions=torch.where(targets > 1, targets - 1, targets)))


class KeepsTheGraph(Plain):
    def logprobs(self, micro: MicroBatch, entropy: bool = False) -> TokenOutputs:
        with torch.enable_grad():
            logprobs, entropies = self.forward(micro)
        return TokenOutputs(logprobs, entropies if entropy else None)


class ReportsTheMeanLoss(Plain):
    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        stats = super().forward_backward(micro, loss, denominators, last)
        stats["loss"] = Stat(stats["loss"].sum / dist.get_world_size(), 1, stats["loss"].max)
        return stats


class CountsTokensTwice(Plain):
    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        stats = super().forward_backward(micro, loss, denominators, last)
        return {name: stat if name == "loss" else stat.merge(stat) for name, stat in stats.items()}


# The step


class WithOptim(Plain):
    """Sets up with other numbers than it is given."""

    changes: dict[str, Any] = {}

    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, None if optim is None else replace(optim, **self.changes))


class OwnEpsilon(WithOptim):
    changes = {"eps": 1e-8}


class OwnBetas(WithOptim):
    changes = {"betas": (0.9, 0.999)}


class NoWeightDecay(WithOptim):
    changes = {"weight_decay": 0.0}


class NeverClips(WithOptim):
    changes = {"max_grad_norm": 0.0}


class ClipsAtOne(WithOptim):
    changes = {"max_grad_norm": 1.0}


class DecaysMatricesOnly(Plain):
    def update(self, lr: float) -> None:
        assert self.optim is not None
        with torch.no_grad():
            for parameter in self.trained.values():
                if parameter.ndim == 1:
                    parameter.div_(1 - lr * self.optim.weight_decay)
        super().update(lr)


class CouplesWeightDecay(WithOptim):
    """Adam with L2 in the gradient instead of AdamW."""

    changes = {"weight_decay": 0.0}

    def update(self, lr: float) -> None:
        with torch.no_grad():
            for name, gradient in self.gradients():
                gradient.add_(self.trained[name], alpha=0.1)
        super().update(lr)


class KeepsTheFirstLearningRate(Plain):
    first: float | None = None

    def update(self, lr: float) -> None:
        self.first = self.first or lr
        super().update(self.first)


class NoBiasCorrection(Plain):
    def update(self, lr: float) -> None:
        self.steps = 10_000
        super().update(lr)


class ForgetsMoments(Plain):
    def update(self, lr: float) -> None:
        super().update(lr)
        for moment in (*self.exp_avg.values(), *self.exp_avg_sq.values()):
            moment.zero_()


class RoundsMoments(Plain):
    """Float32 in memory and in files, with the values of float16."""

    def update(self, lr: float) -> None:
        super().update(lr)
        for moment in (*self.exp_avg.values(), *self.exp_avg_sq.values()):
            moment.copy_(moment.bfloat16())


class HalfPrecisionMoments(Plain):
    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim)
        self.exp_avg, self.exp_avg_sq = ({name: t.bfloat16() for name, t in kind.items()} for kind in (self.exp_avg, self.exp_avg_sq))


class HalfPrecisionParameters(Plain):
    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim)
        self.round()

    def update(self, lr: float) -> None:
        super().update(lr)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for parameter in self.parameters.values():
            parameter.copy_(parameter.bfloat16())


class ClipsByTheLocalNorm(Plain):
    local: dict[str, float]

    def reduce(self, name: str, gradient: torch.Tensor) -> None:
        self.local = {**vars(self).get("local", {}), name: float(gradient.norm())}
        super().reduce(name, gradient)

    def clip(self, norm: float) -> None:
        super().clip(math.hypot(*self.local.values()))


class ClipsEachParameter(Plain):
    def clip(self, norm: float) -> None:
        assert self.optim is not None
        for _, gradient in self.gradients():
            torch.nn.utils.clip_grad_norm_([nn.Parameter(gradient)], self.optim.max_grad_norm)
            own = float(gradient.norm())
            gradient.mul_(min(1.0, self.optim.max_grad_norm / own) if own else 1.0)


class ScalesUpToo(Plain):
    def clip(self, norm: float) -> None:
        assert self.optim is not None
        for _, gradient in self.gradients():
            gradient.mul_(self.optim.max_grad_norm / norm)


class ReportsTheClippedNorm(Plain):
    def step(self, lr: float) -> StepResult:
        assert self.optim is not None
        found = super().step(lr)
        return replace(found, grad_norm=min(found.grad_norm, self.optim.max_grad_norm))


class LocalGradientNorm(Plain):
    def norm(self) -> float:
        return super().norm() * (1.0 + 0.01 * dist.get_rank())


class TrainsWhatIsFrozen(Plain):
    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, replace(model, trainable=()), optim)


# Steps that are not finite


class NeverSkips(Plain):
    def step(self, lr: float) -> StepResult:
        norm = self.norm()
        self.clip(norm)
        self.update(lr)
        self.zero()
        return StepResult(norm, False)


class SkipsAlone(Plain):
    """A rank decides by its own loss."""

    poisoned = False

    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        stats = super().forward_backward(micro, loss, denominators, last)
        self.poisoned |= not math.isfinite(stats["loss"].sum)
        return stats

    def step(self, lr: float) -> StepResult:
        poisoned, self.poisoned = self.poisoned, False
        if poisoned:
            self.zero()
            return StepResult(float("inf"), True)
        self.clip(self.norm())
        norm = self.norm()
        self.update(lr)
        self.zero()
        return StepResult(norm, False)


class SkipKeepsGradients(Plain):
    def step(self, lr: float) -> StepResult:
        if math.isfinite(self.norm()):
            return super().step(lr)
        return StepResult(float("inf"), True)


class SkipCountsAsAStep(Plain):
    def step(self, lr: float) -> StepResult:
        found = super().step(lr)
        self.steps += found.skipped
        return found


class SkipDecaysMoments(Plain):
    def step(self, lr: float) -> StepResult:
        found = super().step(lr)
        if found.skipped:
            for moment in self.exp_avg.values():
                moment.mul_(0.8)
        return found


# Weights out


class StaleExport(Plain):
    first: dict[torch.dtype, list[list[NamedTensor]]]

    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        self.first = vars(self).get("first", {})
        if dtype not in self.first:
            self.first[dtype] = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in super().weights(dtype)]
        yield from self.first[dtype]


class StaleDigests(Plain):
    first: dict[torch.dtype, dict[str, int]]

    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim)
        self.first = {dtype: super(StaleDigests, self).digests(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def digests(self, dtype: torch.dtype, apart: bool = False) -> dict[str, int]:
        return self.first[dtype]


class DigestsOfFloat32(Plain):
    def digests(self, dtype: torch.dtype, apart: bool = False) -> dict[str, int]:
        return super().digests(torch.float32)


class IgnoresDtype(Plain):
    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        return super().weights(torch.float32)


class RoundsTheExport(Plain):
    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        for bucket in super().weights(torch.bfloat16):
            yield [(name, tensor.to(dtype)) for name, tensor in bucket]


class SendsAllAgain(Plain):
    """What is frozen too."""

    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        return super().weights(dtype)


class ForgetsToSendNorms(Plain):
    """The first push is whole, those after it are not."""

    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        buckets = super().weights(dtype, trained_only)
        yield from (bucket for bucket in buckets if not (trained_only and "norm" in bucket[0][0]))


class ExportsOnTheFirstRankOnly(Plain):
    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        yield from super().weights(dtype) if dist.get_rank() == 0 else ()


class ExportsTwice(Plain):
    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        yield from super().weights(dtype)
        yield next(super().weights(dtype))


class ExportsTheTieTwice(Plain):
    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        yield from super().weights(dtype)
        yield [("lm_head.weight", self.model.lm_head.weight.detach().to(dtype))]


class ExportsTrainableOnly(Plain):
    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        yield from (bucket for bucket in super().weights(dtype) if bucket[0][0] in self.trained)


class Unties(Plain):
    """The head becomes a parameter of its own, exported or not."""

    exported = True

    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim)
        head = nn.Parameter(self.model.lm_head.weight.detach().clone(), requires_grad=optim is not None)
        self.model.lm_head.weight = head
        self.head = head
        if self.exported:
            self.parameters["lm_head.weight"] = head
            if optim is not None:
                self.trained["lm_head.weight"] = head
                self.exp_avg["lm_head.weight"], self.exp_avg_sq["lm_head.weight"] = torch.zeros_like(head), torch.zeros_like(head)


class UntiesQuietly(Unties):
    exported = False


class RanksDiffer(Plain):
    """A rank that read something else."""

    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim)
        if ctx.rank == ctx.world_size - 1:
            with torch.no_grad():
                self.model.model.norm.weight[0] += 1e-3


# Checkpoints


class SavesParametersOnly(Plain):
    def save(self, directory: Path) -> None:
        state.save(directory, {name: tensor for name, tensor in self.stored().items() if name.startswith(state.MODEL)})

    def load(self, directory: Path) -> None:
        state.load(directory, {f"{state.MODEL}{name}": parameter.detach() for name, parameter in self.parameters.items()}, (state.MODEL,))


class LoadsParametersOnly(Plain):
    def load(self, directory: Path) -> None:
        state.load(directory, {f"{state.MODEL}{name}": parameter.detach() for name, parameter in self.parameters.items()}, (state.MODEL,))


class LoadsAllButOneMoment(Plain):
    def load(self, directory: Path) -> None:
        super().load(directory)
        self.exp_avg_sq["model.norm.weight"].zero_()


class LoadsAllButOneParameter(Plain):
    def load(self, directory: Path) -> None:
        kept = self.parameters["model.norm.weight"].detach().clone()
        super().load(directory)
        self.parameters["model.norm.weight"].data.copy_(kept)


class ForgetsTheStepCount(Plain):
    def load(self, directory: Path) -> None:
        super().load(directory)
        self.steps = 0


class SavesInItsOwnFormat(Plain):
    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(self.stored(), directory / f"rank-{dist.get_rank()}.pt")

    def load(self, directory: Path) -> None:
        saved = torch.load(directory / f"rank-{dist.get_rank()}.pt")
        for name, tensor in self.stored().items():
            tensor.copy_(saved[name])
        self.steps = int(saved[f"{state.OPTIMIZER}step"])


class CannotSave(Plain):
    def save(self, directory: Path) -> None:
        raise NotImplementedError("save comes later\nwith a second line")


class SavesLate(Plain):
    """What it writes is what is there when the file is asked for."""

    def save_async(self, directory: Path) -> Future[None]:
        late: Future[None] = Future()
        late.result = lambda timeout=None: self.save(directory)  # type: ignore[method-assign]
        return late


class StaysAwake(Plain):
    def sleep(self, what: Collection[Kind]) -> None:
        pass


class WakesInHalfPrecision(Plain):
    def wake(self) -> None:
        self.asleep = [(tensor, kept.bfloat16().float()) for tensor, kept in self.asleep]
        super().wake()


class WakesWithoutMoments(Plain):
    def wake(self) -> None:
        super().wake()
        for moment in (*self.exp_avg.values(), *self.exp_avg_sq.values()):
            moment.zero_()


# Memory


class HidesACopy(Plain):
    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim)
        self.copy = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


class StaysAfterClose(Plain):
    def close(self) -> None:
        pass


class HoldsMomentsWithoutAnOptimizer(Plain):
    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim or OptimSpec())


class SharesWhatIsAlive(Plain):
    """Instances of one model share what the first of them has loaded: a reference moves with its policy."""

    alive: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()

    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        super().setup(ctx, model, optim)
        self.model = self.alive.setdefault(model.path, self.model)


# Processes


class Waits(Plain):
    """One rank decides alone that all must meet."""

    def step(self, lr: float) -> StepResult:
        if dist.get_rank() == 0:
            dist.barrier()
        return super().step(lr)


class DiesOnTheLastRank(Plain):
    def step(self, lr: float) -> StepResult:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise IndexError("list index out of range")
        return super().step(lr)


class AnyFault:
    """Makes any class above by name."""

    class Config(Section):
        fault: str = "Plain"

    def __call__(self, options: Config) -> Any:
        made = globals()[options.fault]
        return made(made.Config())


PLUGIN = AnyFault()
