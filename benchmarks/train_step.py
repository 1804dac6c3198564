"""A training step of `single` on a ragged batch against a plain padded PyTorch loop.

    python benchmarks/train_step.py

The batch: 64 samples of 14 prompt tokens and a response whose length is geometric with a mean of 65, at most 256, as the long-tailed case
of `grpo_step.py` has them. Both sides train the same 4.5M-parameter Llama on it in fp32 on one thread: policy gradient with the GRPO
loss's weights, clip by the global norm, AdamW. Each is a process of its own; they step in turn.

The plain loop is what one writes without a library: micro-batches of a fixed number of rows, each padded to its longest row, an attention
mask, full logits, `log_softmax`, `torch.optim.AdamW`. How many rows is a choice; `--rows` has the one that was fastest here. drumroll's
step computes the entropy too, which it reports; the plain loop does not.

Share of the matmul peak: FLOPs of the real tokens (6 a parameter and token, embedding left out, and causal attention) over time, over the
rate of a 1024^3 fp32 matrix product measured in the same run, both by processor time. Padding counts for nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sides import Channel, Stopwatch, alternate, python

if TYPE_CHECKING:
    import torch

    from drumroll.types import TrainSample

OURS, PLAIN = "--ours", "--plain"
MODEL = "builtin:llama-4.5m"
PROMPT_TOKENS, MEAN, LIMIT, SAMPLES = 14, 65, 256, 64
LR, MAX_NORM = 1e-6, 1.0

Step = Callable[[Sequence["TrainSample"]], None]


def batch(seed: int, equal: bool, vocabulary: int) -> list[TrainSample]:
    """Random tokens, a length and an advantage for each sample."""
    from drumroll.types import TrainSample

    random = np.random.default_rng(seed)
    lengths = np.full(SAMPLES, MEAN) if equal else np.minimum(random.geometric(1 / (MEAN + 1), SAMPLES), LIMIT)
    samples = []
    for group, length in enumerate(lengths):
        tokens = random.integers(4, vocabulary, PROMPT_TOKENS + int(length), dtype=np.int64)
        mask = np.arange(len(tokens)) >= PROMPT_TOKENS
        advantages = np.full(int(length), random.normal(), dtype=np.float32)
        samples.append(TrainSample(token_ids=tokens, target_mask=mask, advantages=advantages, group_id=group // 8, index=group % 8))
    return samples


def ours(spec: dict[str, Any]) -> Step:
    """One optimizer step of the backend, packed as a run packs it."""
    import torch
    import torch.distributed as dist

    from drumroll import packing, plugins
    from drumroll.algorithms.presets import resolve
    from drumroll.backends.base import Backend, ModelSpec, OptimSpec, RankContext
    from drumroll.config import AlgorithmConfig, KLConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plugin = plugins.load("backends", plugins.SPECIFICATION_BACKEND)
    backend: Backend = plugin(plugin.Config())
    backend.setup(RankContext(0, 1, torch.device("cpu")), ModelSpec(path=spec["model"]), OptimSpec(max_grad_norm=MAX_NORM))
    loss = resolve(AlgorithmConfig(name="grpo", kl=KLConfig(coef=0.0)), LIMIT).loss()

    def step(samples: Sequence[TrainSample]) -> None:
        total = packing.denominators(samples)
        micros = packing.pack([len(s.token_ids) for s in samples], 1, spec["cap"])[0]
        for index, micro in enumerate(micros):
            backend.forward_backward(packing.collate([samples[i] for i in micro]), loss, total, index == len(micros) - 1)
        backend.step(LR)

    return step


def plain(spec: dict[str, Any]) -> Step:
    """The loop without a library."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    def step(samples: Sequence[TrainSample]) -> None:
        optimizer.zero_grad()
        for start in range(0, len(samples), spec["rows"]):
            ids, mask, targets, weights = padded(samples[start : start + spec["rows"]])
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            clipped = ratio.clamp(0.8, 1.2)
            terms = -torch.minimum(ratio * weights, clipped * weights) * targets
            (terms.sum(1) / targets.sum(1)).sum().div(len(samples)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return step


def padded(samples: Sequence[TrainSample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and attention mask [B, T]; target mask and advantages of the tokens that are predicted [B, T - 1]."""
    import torch

    shape = len(samples), max(len(s.token_ids) for s in samples)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    targets, weights = torch.zeros(shape), torch.zeros(shape)
    for row, sample in enumerate(samples):
        length = len(sample.token_ids)
        ids[row, :length] = torch.from_numpy(sample.token_ids)
        mask[row, :length] = 1
        targets[row, :length] = torch.from_numpy(sample.target_mask)
        assert sample.advantages is not None
        weights[row, :length] = float(sample.advantages[0])
    return ids, mask, targets[:, 1:], weights[:, 1:]


def take_turns(make: Callable[[dict[str, Any]], Step]) -> None:
    channel = Channel()
    import torch
    import transformers  # noqa: F401 - loaded before the memory of a model is counted

    import drumroll.backends.engine  # noqa: F401

    torch.set_num_threads(1)
    channel.ready()
    step = make(channel.spec)
    turn = 0
    while channel.wait():
        samples = batch(turn, channel.spec["equal"], channel.spec["vocabulary"])
        watch = Stopwatch()
        step(samples)
        channel.answer(watch.measure(sum(s.n_targets for s in samples)))
        turn += 1


def flops(samples: Sequence[TrainSample], config: Any, parameters: int) -> float:
    """Of forward and backward of the real tokens: 2 and 4 a parameter; causal attention has two products of T^2 / 2 a head and layer."""
    tokens = sum(len(s.token_ids) for s in samples)
    matmul = parameters - config.vocab_size * config.hidden_size  # the embedding is a look-up
    attention = sum(len(s.token_ids) ** 2 for s in samples) * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return float(6 * (matmul * tokens + attention))


def main() -> None:
    import common
    from transformers import AutoConfig, AutoModelForCausalLM

    from drumroll.models.locate import locate
    from drumroll.observe.checks import CheckRow, measured

    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each side that count, after one that does not")
    parser.add_argument("--rows", type=int, default=16, help="rows of the plain loop's micro-batches")
    parser.add_argument("--cap", type=int, default=2048, help="train.micro_batch_tokens of drumroll")
    options = parser.parse_args()
    common.announce()
    folder = locate(MODEL)
    config = AutoConfig.from_pretrained(folder)
    parameters = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    peak = common.matmul_rate()
    rows: list[CheckRow] = [measured("fp32 matmul rate of one core, GFLOP/s", peak / 1e9, backend="none")]
    for name, equal, target in (("ragged", False, 1.3), ("equal", True, None)):
        spec = {"model": str(folder), "vocabulary": config.vocab_size, "equal": equal, "rows": options.rows, "cap": options.cap}
        script = Path(__file__)
        sides = alternate({"drumroll": python(script, OURS), "plain": python(script, PLAIN)}, spec, options.rounds)
        batches = [batch(turn, equal, config.vocab_size) for turn in range(1, options.rounds + 1)]
        work = statistics.median([flops(samples, config, parameters) for samples in batches])
        for side, summary in sides.items():
            where: dict[str, str | int] = {"batch": name, "side": side}
            rows += common.side_rows("training step", summary, "single", where)
            share = work / summary.cpu_seconds / peak
            rows.append(measured("training step: share of the matmul rate", share, backend="single", options=where))
        check = "training step: times faster than a plain loop"
        rows += common.ratio_rows(check, sides["plain"], sides["drumroll"], target, {"batch": name})
    common.report(rows, f"A training step, {options.rounds} alternating pairs, medians", options.json)


if __name__ == "__main__":
    modes: dict[str, Callable[[dict[str, Any]], Step]] = {OURS: ours, PLAIN: plain}
    take_turns(modes[sys.argv[1]]) if sys.argv[1:2] and sys.argv[1] in modes else main()
