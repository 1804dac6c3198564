"""What the ranks of the backend tests do, and the inputs they do it on. Everything is a pure function of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from drumroll import plugins
from drumroll.backends.base import Backend, ModelSpec, OptimSpec, RankContext, StepResult
from drumroll.packing import collate, denominators
from drumroll.types import Denominators, LossFn, LossOutput, MicroBatch, Stat, TokenOutputs, TrainSample

CPU = torch.device("cpu")
LR = 3e-4
MODELS = ("llama-untied", "llama-tied", "qwen3-untied", "qwen3-tied")


def write_model(folder: Path, family: str, tied: bool, vocab: int = 67, hidden: int = 32, layers: int = 2) -> Path:
    """A small model with random weights; the vocabulary does not divide by the ranks."""
    torch.manual_seed(7)
    make: dict[str, Callable[..., Any]] = {
        "llama": lambda **fields: LlamaForCausalLM(LlamaConfig(**fields)),
        "qwen3": lambda **fields: Qwen3ForCausalLM(Qwen3Config(**fields)),
    }
    model = make[family](
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden + 2, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.1,
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder


def make_samples(count: int = 8, vocab: int = 67) -> list[TrainSample]:
    """Ragged, with very different numbers of targets."""
    rng = np.random.default_rng(11)
    samples = []
    for index in range(count):
        length = int(rng.integers(4, 12)) if index % 2 else int(rng.integers(20, 40))
        mask = np.zeros(length, bool)
        mask[length // (2 if index % 3 else 4) :] = True
        targets = int(mask.sum())
        samples.append(TrainSample(rng.integers(1, vocab, length), mask, advantages=rng.normal(size=targets).astype(np.float32)))
    return samples


def without_targets(count: int, vocab: int = 67) -> list[TrainSample]:
    return [TrainSample(np.arange(1, 6) % vocab, np.zeros(5, bool), advantages=np.zeros(0, np.float32)) for _ in range(count)]


def loss_fn(outputs: TokenOutputs, micro: MicroBatch, counts: Denominators) -> LossOutput:
    """Advantage-weighted, with an entropy term so that both gradients of the head are used."""
    assert micro.advantages is not None
    assert outputs.entropy is not None
    per_token = -(micro.advantages + 1.0) * outputs.logprobs - 0.1 * outputs.entropy
    stats = {"entropy": outputs.entropy.detach(), "logprob": outputs.logprobs.detach()}
    return LossOutput(loss=per_token.sum() / counts.tokens, stats=stats)


Plan = Sequence[Sequence[TrainSample]]  # the micro-batches of one rank


def even_plan(samples: list[TrainSample], rank: int, ranks: int, passes: int) -> Plan:
    """Whole samples in turn to the ranks, then in runs to the passes; with more passes than samples some are empty."""
    mine = samples[rank::ranks]
    cut = -(-len(mine) // passes)
    return [mine[index * cut : (index + 1) * cut] for index in range(passes)]


def one_rank_plan(samples: list[TrainSample], rank: int, ranks: int, passes: int) -> Plan:
    """Rank 0 does all the work, the others fill in."""
    return even_plan(samples, 0, 1, passes) if rank == 0 else [[] for _ in range(passes)]


def start(rank: int, ranks: int, name: str, options: dict[str, Any], model: ModelSpec, optim: OptimSpec | None) -> Backend:
    plugin = plugins.load("backends", name)
    backend: Backend = plugin(plugin.Config(**options))
    backend.setup(RankContext(rank, ranks, CPU), model, optim)
    return backend


@dataclass
class Trained:
    """What is compared between backends."""

    logprobs: list[torch.Tensor]  # of every micro-batch, before training
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step
    results: list[StepResult] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # this rank's share, a step
    entropy: Stat = field(default_factory=Stat)  # of the first step, this rank's
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # after the last step


def train(backend: Backend, plan: Plan, counts: Denominators, steps: int = 3, loss: LossFn = loss_fn) -> Trained:
    micros = [collate(samples) for samples in plan]
    trained = Trained(logprobs=[backend.logprobs(micro).logprobs.clone() for micro in micros])
    for step in range(steps):
        share = 0.0
        for index, micro in enumerate(micros):
            stats = backend.forward_backward(micro, loss, counts, last=index == len(micros) - 1)
            share += stats["loss"].sum
            trained.entropy = trained.entropy.merge(stats["entropy"]) if step == 0 else trained.entropy
        trained.losses.append(share)
        if step == 0:
            trained.gradients = {name: gradient.clone() for name, gradient in backend.gradients()}
        trained.results.append(backend.step(LR))
    trained.weights = full_weights(backend)
    return trained


def full_weights(backend: Backend, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in backend.weights(dtype) for name, tensor in bucket}


def train_all(
    rank: int, ranks: int, name: str, options: dict[str, Any], folders: dict[str, Path], passes: Sequence[int]
) -> dict[Any, Trained]:
    """(model, number of passes) -> result, for a division of the samples in which token counts differ, and one in which a rank has none."""
    samples = make_samples()
    counts = denominators(samples)
    found: dict[Any, Trained] = {}
    for model, folder in folders.items():
        for count in passes:
            backend = start(rank, ranks, name, options, ModelSpec(str(folder)), OptimSpec(weight_decay=0.01))
            found[model, count] = train(backend, even_plan(samples, rank, ranks, count), counts)
        backend = start(rank, ranks, name, options, ModelSpec(str(folder)), OptimSpec(weight_decay=0.01))
        found[model, "one rank works"] = train(backend, one_rank_plan(samples, rank, ranks, 2), counts)
    return found


def plain_gradients(folder: Path, samples: Sequence[TrainSample]) -> tuple[dict[str, torch.Tensor], float, list[torch.Tensor]]:
    """Gradients, loss and log-probs from transformers alone, one unpadded sample at a time: what `single` itself is measured against."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = denominators(samples).tokens
    total, logprobs = 0.0, []
    for sample in samples:
        mask = torch.from_numpy(sample.target_mask)
        ids = torch.from_numpy(sample.token_ids)
        log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        chosen = log_p.gather(1, ids[1:, None]).squeeze(1)[mask[1:]]
        entropy = -(log_p.exp() * log_p).sum(-1)[mask[1:]]
        loss = (-(torch.from_numpy(sample.advantages) + 1.0) * chosen - 0.1 * entropy).sum() / tokens
        loss.backward()
        total += float(loss.detach())
        logprobs.append(chosen.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return gradients, total, logprobs


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; 0 where there is no difference."""
    gap = (found - expected).norm()
    return float(gap / expected.norm()) if gap else 0.0
