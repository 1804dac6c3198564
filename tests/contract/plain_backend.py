"""A training backend from outside the package, written against the contract alone: plain PyTorch, gradients all-reduced before the step.

It is slow and simple on purpose. `drumroll verify tests/contract/plain_backend.py:Plain` proves it right; `faulty_backends.py` breaks it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from drumroll.backends import state
from drumroll.backends.base import Kind, ModelSpec, NamedTensor, OptimSpec, RankContext, StepResult
from drumroll.config import Section
from drumroll.digest import digest
from drumroll.errors import RunError, UserError
from drumroll.types import Denominators, LossFn, MicroBatch, Stat, TokenOutputs


class Plain:
    class Config(Section):
        """No options."""

    def __init__(self, options: Config) -> None:
        pass

    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        if model.compute_dtype is not torch.float32:
            raise UserError(f"this backend computes in float32, got {model.compute_dtype}")
        if model.lora is not None or (optim is not None and optim.name != "adamw"):
            raise UserError("this backend has AdamW, and no adapters")
        if model.head == "value":
            raise UserError("this backend has no value head")
        logging.disable_progress_bar()
        self.spec, self.optim = model, optim
        self.model = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).to(ctx.device).eval()
        self.parameters = dict(self.model.named_parameters())
        for name, parameter in self.parameters.items():
            chosen = not model.trainable or any(re.search(pattern, name) for pattern in model.trainable)
            parameter.requires_grad_(optim is not None and chosen)
        self.trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self.exp_avg = {name: torch.zeros_like(parameter) for name, parameter in self.trained.items()}
        self.exp_avg_sq = {name: torch.zeros_like(parameter) for name, parameter in self.trained.items()}
        self.steps = 0
        self.asleep: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies [N], one sample after the other."""
        if not len(micro.target_positions):
            return torch.zeros(0), torch.zeros(0)
        logits = torch.cat([self.model(ids[None], use_cache=False).logits[0] for ids in micro.token_ids.split(micro.lengths)])
        log_p = (logits[micro.target_positions - 1] / self.spec.temperature).log_softmax(-1)
        return log_p.gather(1, micro.token_ids[micro.target_positions, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch, entropy: bool = False) -> TokenOutputs:
        logprobs, entropies = self.forward(micro)
        return TokenOutputs(logprobs, entropies if entropy else None)

    def values(self, micro: MicroBatch) -> torch.Tensor:
        raise RunError("this backend has no value head")

    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        result = loss(TokenOutputs(*self.forward(micro)), micro, denominators)
        if result.loss.requires_grad:  # not so for an empty micro-batch
            self.backward(result.loss)
        if last:
            for name, parameter in self.trained.items():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.reduce(name, parameter.grad)
        stats = {name: Stat(float(v.sum()), len(v), float(v.max())) for name, v in result.stats.items() if len(v)}
        return stats | {"loss": Stat(float(result.loss.detach()), 1, float(result.loss.detach()))}

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def reduce(self, name: str, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)

    def step(self, lr: float) -> StepResult:
        norm = self.norm()
        skipped = not norm < float("inf")
        if not skipped:
            self.clip(norm)
            self.update(lr)
        self.zero()
        return StepResult(float("inf") if skipped else norm, skipped)

    def norm(self) -> float:
        return float(torch.stack([gradient.norm() for _, gradient in self.gradients()]).norm())

    def clip(self, norm: float) -> None:
        assert self.optim is not None
        if 0 < self.optim.max_grad_norm < norm:
            for _, gradient in self.gradients():
                gradient.mul_(self.optim.max_grad_norm / norm)

    @torch.no_grad()
    def update(self, lr: float) -> None:
        assert self.optim is not None
        (beta1, beta2), self.steps = self.optim.betas, self.steps + 1
        for name, gradient in self.gradients():
            parameter, exp_avg, exp_avg_sq = self.trained[name], self.exp_avg[name], self.exp_avg_sq[name]
            exp_avg.mul_(beta1).add_(gradient, alpha=1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            parameter.mul_(1 - lr * self.optim.weight_decay)
            scale = (exp_avg_sq / (1 - beta2**self.steps)).sqrt_().add_(self.optim.eps)
            parameter.addcdiv_(exp_avg / (1 - beta1**self.steps), scale, value=-lr)

    def zero(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = None

    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        for name, parameter in (self.trained if trained_only else self.parameters).items():
            yield [(name, parameter.detach().to(dtype))]

    def gradients(self) -> Iterator[NamedTensor]:
        for name, parameter in self.trained.items():
            assert parameter.grad is not None
            yield name, parameter.grad

    def digests(self, dtype: torch.dtype, apart: bool = False) -> dict[str, int]:
        return {name: digest(parameter.detach().to(dtype)) for name, parameter in self.parameters.items()}

    def stored(self) -> dict[str, torch.Tensor]:
        """Name in a checkpoint -> tensor."""
        tensors = {f"{state.MODEL}{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name in self.trained:
            tensors[f"{state.OPTIMIZER}{name}.exp_avg"] = self.exp_avg[name]
            tensors[f"{state.OPTIMIZER}{name}.exp_avg_sq"] = self.exp_avg_sq[name]
        return tensors | {f"{state.OPTIMIZER}step": torch.tensor(self.steps)}

    def save(self, directory: Path) -> None:
        state.save(directory, self.stored())

    def save_async(self, directory: Path) -> Future[None]:
        self.save(directory)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(self, directory: Path) -> None:
        tensors = self.stored()
        state.load(directory, tensors, (state.MODEL, state.OPTIMIZER))
        self.steps = int(tensors[f"{state.OPTIMIZER}step"])

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Everything that is held, by kind."""
        return {
            "parameter": list(self.parameters.values()),
            "gradient": [parameter.grad for parameter in self.trained.values() if parameter.grad is not None],
            "optimizer": [*self.exp_avg.values(), *self.exp_avg_sq.values()],
            "unsharded": [],
            "other": list(self.model.buffers()),
        }

    def sleep(self, what: Collection[Kind]) -> None:
        for tensor in (tensor for kind in what for tensor in self.tensors()[kind]):
            self.asleep.append((tensor, tensor.detach().cpu().clone()))
            tensor.data = torch.empty(0, device=tensor.device)

    def wake(self) -> None:
        for tensor, kept in self.asleep:
            tensor.data = kept.to(tensor.device)
        self.asleep = []

    def memory(self) -> dict[str, int]:
        return {kind: sum(tensor.untyped_storage().nbytes() for tensor in tensors) for kind, tensors in self.tensors().items()}

    def close(self) -> None:
        del self.model, self.parameters, self.trained, self.exp_avg, self.exp_avg_sq, self.asleep
