"""One GPU in a few minutes: are the backends right on it, how fast do they train, how fast does the embedded engine sample, in what memory?

Run it through `gpu_check.sh`, which says how. In this order, and what no longer fits into the time is reported as not run:

  1. `drumroll verify` of fsdp2 and ddp, fp32 and bf16, over NCCL at world size 1, in processes of their own
  2. the card's matmul rate: an 8192^3 product in bf16, a 4096^3 product in fp32
  3. training steps of a 0.5B-class model (random weights, made here) with bf16 compute and fp32 state, equal and ragged lengths: tokens/s,
     share of the matmul rate by real tokens, memory by kind and at its peak; with fsdp2 also compiled, and with activation checkpointing
  4. its weights to the embedded engine, digests compared, and 64 prompts x 128 tokens sampled; then training state sleeps and wakes: how
     much memory the driver gets back, how long it takes, that no digest changes
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumroll.backends.base import Backend
    from drumroll.observe.checks import CheckRow
    from drumroll.types import TrainSample

NO_GPU, MISSING = 3, 2
NEEDED = ("torch", "transformers", "pydantic", "pydantic_core", "yaml", "numpy", "safetensors", "rich", "typer", "jinja2")
BUDGET_S = 420.0  # nothing is started later than this
# Backend, its options and fields of ModelSpec, in the order in which they are measured while there is time; the first also samples, and
# sleeps.
TRIALS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("fsdp2", {}, {}),
    ("fsdp2", {}, {"compile": True}),
    ("fsdp2", {}, {"compile": True, "checkpointing": "full"}),
    ("single", {}, {}),
    ("fsdp2", {}, {"checkpointing": "selective"}),
    ("fsdp2", {"offload": True}, {}),
)
AIMED_AT = TRIALS[2][2]  # compiled and checkpointed, as large models are trained
TARGET = 0.45  # of the card's matmul rate
VERIFY_S = 110.0  # of one verification
_GIB = 1 << 30


@dataclass(slots=True, frozen=True)
class Size:
    """What is measured: the 0.5B class, or a toy that proves on a CPU that this file runs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    samples: int
    longest: int  # tokens of the longest sample
    micro_batch_tokens: int
    prompts: int
    sampled_tokens: int
    matmul: int  # edge of the bf16 matrices


FULL = Size(896, 24, 14, 2, 4864, 151936, 64, 1024, 16384, 64, 128, 8192)
TINY = Size(64, 2, 4, 2, 128, 512, 8, 64, 256, 4, 16, 256)


def main() -> int:
    options = arguments()
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        print(f"missing packages: {', '.join(absent)}; give a folder of their wheels: gpu_check.sh WHEELS, or put them on PYTHONPATH")
        return MISSING
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"NO GPU: torch {torch.__version__} sees no CUDA device here; nothing was checked")
        return NO_GPU
    from common import report

    started = time.monotonic()
    print(describe(options.device))
    verified, speeds = verifications(options, started), measurements(options, started)
    failed = [row for row in verified if not row.passed]
    word = "everything passed" if all(row.passed for row in verified + speeds) else "SOMETHING FAILED"
    print(f"{len(verified) - len(failed)} of {len(verified)} checks of verify passed; {time.monotonic() - started:.0f} s in all; {word}")
    report(failed + speeds, f"One device: {options.device}", options.json, unshown=[row for row in verified if row.passed])
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy model: proves that this file runs, measures nothing of interest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON rows to this file")
    return parser.parse_args()


def describe(device: str) -> str:
    import platform

    import torch
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return f"{name}; Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"


def verifications(options: argparse.Namespace, started: float) -> list[CheckRow]:
    """Every row of `drumroll verify`, and one row a run that could not be judged."""
    rows: list[CheckRow] = []
    for backend in ("fsdp2", "ddp"):
        for dtype in ("float32", "bfloat16"):
            begin = time.monotonic()
            found = verify(backend, dtype, options.device) if begin - started < BUDGET_S else [not_run(f"verify {dtype}", backend)]
            rows += found
            print(f"verify {backend} {dtype}: {sum(r.passed for r in found)} of {len(found)} passed, {time.monotonic() - begin:.0f} s")
    return rows


def verify(backend: str, dtype: str, device: str) -> list[CheckRow]:
    """In a process of its own: whatever it does to the device ends with it."""
    from drumroll.observe.checks import read_rows

    with tempfile.TemporaryDirectory() as out:
        json = Path(out) / "rows.json"
        code = "from drumroll.cli import main; main()"
        arguments = ["verify", backend, "--only", "as it is", "--ranks", "1", "--device", device, "--dtype", dtype, "--json", str(json)]
        try:
            ran = subprocess.run(
                [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=VERIFY_S, check=False
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [not_run(f"verify {dtype}", backend, f"not done after {VERIFY_S:.0f} s")]
        if not json.is_file():
            print((ran.stdout + ran.stderr)[-3000:])
            return [not_run(f"verify {dtype}", backend, f"exit code {ran.returncode} and no rows")]
        return read_rows(json)


def not_run(check: str, backend: str, why: str = "no time left") -> CheckRow:
    from drumroll.observe.checks import CheckRow

    return CheckRow(check=check, backend=backend, options={"where": why}, value=float("nan"), passed=False)


def measurements(options: argparse.Namespace, started: float) -> list[CheckRow]:
    import torch
    from common import matmul_rate

    from drumroll.observe.checks import measured

    size = TINY if options.tiny else FULL
    rates = {
        dtype: matmul_rate(options.device, dtype, edge)
        for dtype, edge in ((torch.bfloat16, size.matmul), (torch.float32, size.matmul // 2))
    }
    rows = [measured(f"matmul rate, TFLOP/s, {str(dtype)[6:]}", rate / 1e12, backend="none") for dtype, rate in rates.items()]
    with tempfile.TemporaryDirectory() as out:
        folder = make_model(size, Path(out) / "model")
        for number, (backend, chosen, model) in enumerate(TRIALS):
            if time.monotonic() - started > BUDGET_S:
                rows.append(not_run("speed", backend))
                continue
            rows += speed(backend, chosen, model, folder, size, options.device, rates[torch.bfloat16], more=number == 0)
    return rows


def make_model(size: Size, folder: Path) -> Path:
    """A Qwen3-shaped model with tied embeddings and random weights in bf16, as a HF folder. Its tokenizer is a toy: only ids matter."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from drumroll.models.builtin import tokenizer

    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=64 if size.hidden > 64 else 16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).bfloat16()
    config.architectures = [type(model).__name__]
    folder.mkdir()
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class Subject:
    """One rank: a backend with the model, and an engine beside it where it is asked to sample."""

    def __init__(self, ctx: Any, backend: str, chosen: dict[str, Any], model: dict[str, Any], folder: Path, size: Size) -> None:
        import torch

        from drumroll import plugins
        from drumroll.algorithms.presets import resolve
        from drumroll.backends.base import ModelSpec, OptimSpec
        from drumroll.config import AlgorithmConfig, KLConfig

        self._ctx, self._folder, self._size = ctx, folder, size
        plugin = plugins.load("backends", backend)
        self._backend: Backend = plugin(plugin.Config(**chosen))
        self._backend.setup(ctx, ModelSpec(path=str(folder), compute_dtype=torch.bfloat16, **model), OptimSpec())
        self._loss = resolve(AlgorithmConfig(name="grpo", kl=KLConfig(coef=0.0)), size.longest).loss()

    def train(self, samples: Sequence[TrainSample], steps: int) -> tuple[float, float]:
        """Median seconds of `steps` optimizer steps, after two that do not count, and the last gradient norm."""
        import statistics

        from drumroll import packing

        total = packing.denominators(samples)
        micros = packing.pack([len(s.token_ids) for s in samples], 1, self._size.micro_batch_tokens)[0]
        seconds, norm = [], 0.0
        for _ in range(steps + 2):
            begin = time.perf_counter()
            for index, micro in enumerate(micros):
                batch = packing.collate([samples[i] for i in micro], self._ctx.device)
                self._backend.forward_backward(batch, self._loss, total, index == len(micros) - 1)
            norm = self._backend.step(1e-6).grad_norm  # a Python float: waits for the device
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds[2:]), norm

    def memory(self) -> dict[str, int]:
        """Bytes held by kind, and the most that was allocated."""
        import torch
        from sides import peak_bytes

        on_gpu = self._ctx.device.type == "cuda"
        return {**self._backend.memory(), "peak": torch.cuda.max_memory_allocated(self._ctx.device) if on_gpu else peak_bytes()}

    def sample(self) -> tuple[float, float, int, int]:
        """Seconds of a weight push and of sampling, tokens sampled, tensors whose digests agreed."""
        import torch

        from drumroll import plugins
        from drumroll.engines.base import EngineSpec, GenerateRequest, SamplingParams
        from drumroll.sync.base import Transport

        plugin = plugins.load("engines", plugins.EMBEDDED_ENGINE)
        engine = plugin(plugin.Config())
        engine.start(EngineSpec(str(self._folder), torch.bfloat16, self._ctx.device, seed=0, max_length=32 + self._size.sampled_tokens))
        transport: Transport = plugins.load("sync", "inprocess")()
        begin = time.perf_counter()
        pushed = transport.push(self._backend, engine, torch.bfloat16, 1)
        push = time.perf_counter() - begin
        params = SamplingParams(max_tokens=self._size.sampled_tokens)
        requests = [GenerateRequest(group, list(range(4, 36)), 8, params) for group in range(max(1, self._size.prompts // 8))]
        list(engine.generate(requests[:1]))
        begin = time.perf_counter()
        tokens = sum(len(completion.token_ids) for completion in engine.generate(requests))
        sampling = time.perf_counter() - begin
        engine.close()
        return push, sampling, tokens, pushed.matched

    def sleep(self) -> tuple[int, int, float, int]:
        """Bytes of training state, bytes that the driver gets back while it sleeps, seconds of sleep and wake, digests that changed."""
        import torch

        from drumroll.backends.base import KINDS

        def free() -> int:
            return torch.cuda.mem_get_info(self._ctx.device)[0] if self._ctx.device.type == "cuda" else 0

        before = self._backend.digests(torch.float32)
        state = self._backend.memory()
        if self._ctx.device.type == "cuda":
            torch.cuda.empty_cache()
        held, begin = free(), time.perf_counter()
        self._backend.sleep(KINDS)
        given_back = free() - held
        self._backend.wake()
        seconds = time.perf_counter() - begin
        after = self._backend.digests(torch.float32)
        return sum(state[kind] for kind in KINDS), given_back, seconds, sum(before[name] != after[name] for name in before)

    def close(self) -> None:
        self._backend.close()


def batch(size: Size, ragged: bool) -> list[TrainSample]:
    """Random tokens; every sample as long as the longest, or lengths spread evenly from a sixteenth of it."""
    import numpy as np

    from drumroll.types import TrainSample

    random = np.random.default_rng(0)
    lengths = random.integers(size.longest // 16, size.longest + 1, size.samples) if ragged else [size.longest] * size.samples
    samples = []
    for index, length in enumerate(lengths):
        tokens = random.integers(4, size.vocabulary, int(length), dtype=np.int64)
        mask = np.arange(len(tokens)) >= 1
        samples.append(TrainSample(tokens, mask, advantages=np.full(len(tokens) - 1, random.normal(), np.float32), group_id=index // 8))
    return samples


def flops(samples: Sequence[TrainSample], size: Size) -> float:
    """Forward and backward of the real tokens: 6 a weight and token (the tied embedding once, as the head), and causal attention."""
    head_dim = 64 if size.hidden > 64 else 16
    attention = size.hidden * head_dim * (size.heads + 2 * size.kv_heads) + size.heads * head_dim * size.hidden
    weights = size.layers * (attention + 3 * size.hidden * size.intermediate) + size.vocabulary * size.hidden
    tokens = sum(len(s.token_ids) for s in samples)
    squares = sum(len(s.token_ids) ** 2 for s in samples)
    return 6.0 * (weights * tokens + size.layers * size.heads * head_dim * squares)


def speed(
    backend: str, chosen: dict[str, Any], model: dict[str, Any], folder: Path, size: Size, device: str, peak: float, more: bool
) -> list[CheckRow]:
    """Training, memory and (once is enough) sampling and sleep with one backend. `chosen`: its options; `model`: fields of ModelSpec."""
    import math
    from functools import partial

    from drumroll.observe.checks import at_least, at_most, measured
    from drumroll.runtime.local import launch

    options = {"dtype": "bfloat16", "model": "tiny" if size is TINY else "0.5B", **chosen, **model}
    row = partial(measured, backend=backend, options=options)
    rows: list[CheckRow] = []
    subject = partial(Subject, backend=backend, chosen=chosen, model=model, folder=folder, size=size)
    with launch(subject, ranks=1, device=device, in_process=False) as ranks:
        for name, ragged in (("equal", False), ("ragged", True)):
            samples = batch(size, ragged)
            seconds, norm = ranks.call(Subject.train, samples, 5)[0]
            rows.append(row(f"train, {name}: tokens a second", sum(len(s.token_ids) for s in samples) / seconds))
            share = f"train, {name}: share of the bf16 matmul rate"
            reached = flops(samples, size) / seconds / peak
            aimed_at = model == AIMED_AT and size is FULL and not ragged
            rows.append(at_least(share, reached, TARGET, backend=backend, options=options) if aimed_at else row(share, reached))
            wrong = 0 if math.isfinite(norm) else 1
            rows.append(at_most(f"train, {name}: gradient norms not finite", wrong, 0, backend=backend, options=options))
        rows += [row(f"memory: {kind}, GiB", held / _GIB) for kind, held in ranks.call(Subject.memory)[0].items()]
        if more:
            push, sampling, tokens, matched = ranks.call(Subject.sample)[0]
            rows += [row("weight push with digests, s", push), row("tensors whose digests agreed", matched)]
            rows += [row("sample: tokens a second", tokens / sampling)]
            state, given_back, slept, changed = ranks.call(Subject.sleep)[0]
            rows += [row("sleep: training state, GiB", state / _GIB), row("sleep: the driver gets back, GiB", given_back / _GIB)]
            rows += [row("sleep and wake, s", slept)]
            rows.append(at_most("sleep and wake: digests that changed", changed, 0, backend=backend, options=options))
    return rows


if __name__ == "__main__":
    sys.exit(main())
